"""Documents to tokenizer, raw token files, mixes and held-out sets."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from . import settings

# A held-out document is long enough to be its own text and short enough to leave room for others.
HELDOUT_CHARS = (300, 6_000)
STAGE2_CHARS = (200, 12_000)


def build(documents: dict[str, list[str]], out: Path) -> dict:
    """Write tokenizer/, data/, mixes/ and heldout/ under `out`; return the token counts."""
    parts = {domain: _split(domain, texts) for domain, texts in documents.items()}
    _drop_leaks(parts)
    tokenizer = _train_tokenizer(
        [text for domain, part in parts.items() if domain != "noise" for text in part["rest"]]
    )
    _save_tokenizer(tokenizer, out / "tokenizer")
    counts: dict[str, dict] = {"stage1": {}, "stage2": {}, "heldout": {}}
    mixes: dict[str, list[str]] = {"stage1": [], "stage2": []}
    (out / "heldout").mkdir(parents=True, exist_ok=True)
    heldout_lines = []
    for domain, want in settings.DOMAINS.items():
        encode = _Encoder(tokenizer, parts[domain])
        part_number = 0
        for stage, files in (("stage1", want["files"]), ("stage2", 1)):
            if not want[stage]:
                continue
            texts, tokens = encode.take("rest" if stage == "stage1" else "clean", want[stage])
            chunks = _chunks(tokens, files)
            counts[stage][domain] = sum(map(len, chunks))
            for chunk in chunks:
                relative = f"{domain}/{{TOKENIZER}}/part-{part_number}-00000.npy"
                mixes[stage].append(f"{domain},{relative}")
                write_tokens(out / "data" / relative.format(TOKENIZER=settings.TOKENIZER), chunk)
                part_number += 1
        if want["heldout"]:
            texts, tokens = encode.take("heldout", want["heldout"])
            counts["heldout"][domain] = sum(map(len, tokens))
            write_tokens(out / "heldout" / f"{domain}.npy", np.concatenate(tokens))
            heldout_lines += [json.dumps({"domain": domain, "text": text}) for text in texts]
    (out / "heldout/documents.jsonl").write_text("\n".join(heldout_lines) + "\n")
    _write_mixes(mixes, out / "mixes")
    total = sum(counts["stage1"].values())
    if total < settings.MIN_STAGE1_TOKENS:
        raise SystemExit(f"stage 1 has {total} tokens, fewer than {settings.MIN_STAGE1_TOKENS}")
    return counts


def write_tokens(path: Path, tokens: np.ndarray) -> None:
    """Headerless little-endian uint16, the smallest type that holds the vocabulary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.asarray(tokens).astype("<u2").tobytes())


def _split(domain: str, texts: list[str]) -> dict[str, list[str]]:
    """Shuffle a domain and set aside candidates for held-out and stage 2, without duplicates."""
    texts = list(dict.fromkeys(texts))
    random.Random(f"{settings.CORPUS_SEED}-{domain}").shuffle(texts)
    want = settings.DOMAINS[domain]
    parts: dict[str, list[str]] = {"heldout": [], "clean": [], "rest": []}
    # Some 5 characters a token is more than any domain has, so the parts are never too small.
    budget = {"heldout": 5 * want["heldout"], "clean": 5 * want["stage2"]}
    limits = {"heldout": HELDOUT_CHARS, "clean": STAGE2_CHARS}
    for text in texts:
        for name in ("heldout", "clean"):
            low, high = limits[name]
            if budget[name] > 0 and low <= len(text) <= high:
                budget[name] -= len(text)
                parts[name].append(text)
                break
        else:
            parts["rest"].append(text)
    return parts


def _drop_leaks(parts: dict[str, dict[str, list[str]]]) -> None:
    """Drop held-out documents whose text also stands inside any training document."""
    training = "\0".join(
        text for part in parts.values() for name in ("clean", "rest") for text in part[name]
    )
    for part in parts.values():
        part["heldout"] = [text for text in part["heldout"] if text.strip() not in training]


def _train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.EOS_ID,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([settings.EOS, settings.PAD])
    ids = [tokenizer.token_to_id(name) for name in (settings.EOS, settings.PAD)]
    if ids != [settings.EOS_ID, settings.PAD_ID]:
        raise SystemExit(f"special tokens have ids {ids}: the corpus is too small for the BPE")
    return tokenizer


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=settings.EOS,
        pad_token=settings.PAD,
        model_max_length=settings.SEQUENCE_LENGTH,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


class _Encoder:
    """Encodes the documents of one part until a number of tokens is reached."""

    def __init__(self, tokenizer: Tokenizer, parts: dict[str, list[str]]):
        self.tokenizer, self.parts = tokenizer, parts

    def take(self, part: str, tokens_wanted: int) -> tuple[list[str], list[np.ndarray]]:
        texts, tokens, count = [], [], 0
        for text in self.parts[part]:
            if count >= tokens_wanted:
                break
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            texts.append(text)
            tokens.append(np.array([*ids, settings.EOS_ID]))
            count += len(tokens[-1])
        return texts, tokens


def _chunks(tokens: list[np.ndarray], files: int) -> list[np.ndarray]:
    """Whole documents dealt to `files` files; none a multiple of the sequence length.

    A loader that joined files, or kept remainders, would then give other batches.
    """
    bounds = [round(i * len(tokens) / files) for i in range(files + 1)]
    chunks = []
    for start, end in pairwise(bounds):
        while sum(map(len, tokens[start:end])) % settings.SEQUENCE_LENGTH == 0:
            end -= 1
        chunks.append(np.concatenate(tokens[start:end]))
    return chunks


def _write_mixes(mixes: dict[str, list[str]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    notes = {
        "stage1": "# All domains, a little base64 among them. Paths are relative to data/.",
        "stage2": "# A cleaner mix: no code and no base64. Files that stage 1 never reads.",
    }
    for stage, lines in mixes.items():
        (folder / f"{stage}.txt").write_text("\n".join([notes[stage], *lines]) + "\n")


def mix_paths(out: Path, stage: dict) -> list[Path]:
    """The token files of a stage in mix order."""
    lines = (out / stage["mix"]).read_text().splitlines()
    entries = [line.split(",")[1] for line in lines if line and not line.startswith("#")]
    return [out / "data" / entry.format(TOKENIZER=settings.TOKENIZER) for entry in entries]
