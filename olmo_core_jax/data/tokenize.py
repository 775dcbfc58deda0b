"""Text to shards: documents, each closed by EOS, as headerless arrays, and a mix that names them."""

import gzip
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from olmo_core_jax.data.index import default_dtype
from olmo_core_jax.errors import UserError

DOCUMENTS_AT_ONCE = 1024
TOKENS_A_SHARD = 1 << 28


@dataclass(frozen=True)
class Tokenized:
    """mix: the manifest that was written; eos_inside: documents whose text held the EOS itself."""

    mix: str
    shards: int
    documents: int
    tokens: int
    eos_inside: int


def tokenize(
    inputs: Sequence[str],
    tokenizer: str,
    eos_id: int,
    output: str,
    *,
    label: str = "text",
    text_field: str = "text",
    tokens_a_shard: int = TOKENS_A_SHARD,
) -> Tokenized:
    """Writes `output`/part-NNNNN.npy and `output`/mix.txt from .jsonl(.gz) or text files.

    A JSONL line is a document (its `text_field`), any other file is one document. tokenizer: a
    tokenizer.json, or the folder of one. Tokens have the smallest type that holds the vocabulary.
    A document may end one shard late, but is never cut in two. Raises UserError; overwrites
    nothing.
    """
    encoder = _load(tokenizer, eos_id)
    dtype = np.dtype(default_dtype(encoder.get_vocab_size())).newbyteorder("<")
    folder = Path(output)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{output} is not empty: choose a new folder; nothing is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    shard = _Shards(folder, dtype, tokens_a_shard)
    documents = eos_inside = 0
    for texts in _grouped(_documents(inputs, text_field), DOCUMENTS_AT_ONCE):
        for encoding in encoder.encode_batch_fast(texts, add_special_tokens=False):
            ids = np.array([*encoding.ids, eos_id], dtype)
            eos_inside += bool(np.any(ids[:-1] == eos_id))
            shard.add(ids)
            documents += 1
    shard.close()
    if documents == 0:
        raise UserError(f"{', '.join(inputs)}: no documents")
    mix = folder / "mix.txt"
    mix.write_text("".join(f"{label},{name}\n" for name in shard.names))
    return Tokenized(str(mix), len(shard.names), documents, shard.total, eos_inside)


class _Shards:
    """Collects documents and writes a file whenever enough have come."""

    def __init__(self, folder: Path, dtype: np.dtype, limit: int):
        self.folder, self.dtype, self.limit = folder, dtype, limit
        self.names: list[str] = []
        self.total = self._held = 0
        self._documents: list[np.ndarray] = []

    def add(self, ids: np.ndarray) -> None:
        self._documents.append(ids)
        self._held += len(ids)
        if self._held >= self.limit:
            self.close()

    def close(self) -> None:
        """Writes what is held, if anything."""
        if not self._documents:
            return
        name = f"part-{len(self.names):05d}.npy"
        partial = self.folder / f".{name}.partial"
        with open(partial, "wb") as f:
            np.concatenate(self._documents).tofile(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, self.folder / name)
        self.names.append(name)
        self.total += self._held
        self._documents, self._held = [], 0


def _load(path: str, eos_id: int):
    from tokenizers import Tokenizer

    file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise UserError(f"{file} does not exist: give a tokenizer.json or the folder of one")
    try:
        encoder = Tokenizer.from_file(file)
    except Exception as e:
        raise UserError(f"{file} is no tokenizer of the tokenizers library: {e}") from None
    if encoder.id_to_token(eos_id) is None:
        raise UserError(f"{file} has no token {eos_id}: correct eos_id")
    return encoder


def _documents(inputs: Sequence[str], text_field: str) -> Iterator[str]:
    for path in inputs:
        try:
            if path.endswith((".jsonl", ".jsonl.gz", ".json.gz")):
                yield from _jsonl(path, text_field)
            else:
                yield Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"{path} cannot be read: {e}") from None


def _jsonl(path: str, text_field: str) -> Iterator[str]:
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as f:
        for number, line in enumerate(f, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[text_field]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise UserError(f"{path} line {number} is no JSON object with text {text_field!r}")
            yield text


def _grouped(items: Iterator[str], size: int) -> Iterator[list[str]]:
    group: list[str] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
