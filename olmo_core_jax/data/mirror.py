"""A mix's files to a bucket: a list for Google's Storage Transfer Service, or a direct copy.

24 TB are for the transfer service, which copies from https:// by itself and checks what it is told.
The direct copy takes up where it was stopped and records size and checksum of every file it has
verified.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from olmo_core_jax import storage
from olmo_core_jax.data import shards
from olmo_core_jax.data.mix import load_mix
from olmo_core_jax.data.problems import refuse
from olmo_core_jax.errors import UserError
from olmo_core_jax.storage.readers import Reader, reader_for

PIECE = 32 << 20
"""Bytes a request of the direct copy."""
COPIES = 8
"""Files copied at the same time."""
RECORD = "mirror.json"


@dataclass(frozen=True)
class Copied:
    """A verified file. sha256: of the bytes read from the source and found at the target."""

    path: str
    bytes: int
    sha256: str


def transfer_list(mix: str, tokenizer: str, base: str, output: str) -> int:
    """Writes `output`, a TsvHttpData-1.0 list of the mix's files under the https:// `base`.

    Each line has the URL and its size, sorted by URL as the service requires. Returns total bytes.
    Raises UserError that lists every missing file.
    """
    if not base.startswith("https://"):
        raise UserError(f"{base}: the transfer service reads lists of https:// addresses only")
    found = _sized(mix, tokenizer, base)
    rows = sorted((storage.join(base, path), size) for path, size in found.items())
    text = "TsvHttpData-1.0\n" + "".join(f"{url}\t{size}\n" for url, size in rows)
    storage.write_text(output, text)
    return sum(found.values())


def mirror(
    mix: str,
    tokenizer: str,
    base: str,
    target: str,
    say: Callable[[str], None] = lambda line: None,
) -> list[Copied]:
    """Copies every file of a mix from `base` (folder, gs://, https://) to `target`, keeping paths.

    Files that an earlier call has copied and that are still there are not read again. Each file is
    complete and verified, or absent. `target`/mirror.json records them. Raises UserError that lists
    every missing source; a target file of other content is never overwritten.
    """
    found = _sized(mix, tokenizer, base)
    record_uri = storage.join(target, RECORD)
    record = _read_record(record_uri)
    present = dict(zip(found, shards.sizes(target, list(found)), strict=True))
    todo = [
        path
        for path, size in found.items()
        if path not in record or not (record[path].bytes == present[path] == size)
    ]
    reader = reader_for(base)
    with ThreadPoolExecutor(COPIES) as pool:
        jobs = pool.map(lambda p: _copy(reader, base, target, p, found[p], present[p]), todo)
        for done in jobs:
            record[done.path] = done
            storage.write_json(record_uri, [asdict(c) for c in record.values()])
            say(f"{done.path}: {done.bytes} bytes")
    return [record[path] for path in found]


def _sized(mix: str, tokenizer: str, base: str) -> dict[str, int]:
    """path -> bytes of a mix's files. Raises UserError that lists the missing ones."""
    paths = [s.path for s in load_mix(mix, tokenizer)]
    sizes = shards.sizes(base, paths)
    missing = [storage.join(base, p) for p, s in zip(paths, sizes, strict=True) if s is None]
    refuse(f"mix {mix}", [f"{m} does not exist" for m in missing], "correct base or the manifest")
    return {p: s for p, s in zip(paths, sizes, strict=True) if s is not None}


def _copy(
    reader: Reader, base: str, target: str, path: str, size: int, present: int | None
) -> Copied:
    """Copies and verifies a file, through a partial local one that a later call goes on with."""
    source, uri = storage.join(base, path), storage.join(target, path)
    partial = _partial(target, path, source)
    digest = _fetch(reader, source, size, partial)
    if present is not None:
        _same(uri, partial, digest)
    else:
        storage.write_file(uri, partial)
        if storage.size(uri) != size or _sha256(uri, size) != digest:
            raise UserError(f"{uri} differs from {source} after the copy: copy it again")
    partial.unlink()
    return Copied(path, size, digest)


def _fetch(reader: Reader, source: str, size: int, partial: Path) -> str:
    """Completes a partial file from its source; its sha256."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    done = partial.stat().st_size if partial.exists() else 0
    if done > size:
        partial.unlink()
        done = 0
    with open(partial, "ab") as f:
        while done < size:
            data = reader.read(source, done, min(PIECE, size - done))
            f.write(data)
            done += len(data)
    with open(partial, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _same(uri: str, partial: Path, digest: str) -> None:
    if _sha256(uri, storage.size(uri)) != digest:
        partial.unlink()
        raise UserError(f"{uri} exists with other content: move it away; nothing is overwritten")


def _sha256(uri: str, size: int) -> str:
    digest = hashlib.sha256()
    reader = reader_for(uri)
    for offset in range(0, size, PIECE):
        digest.update(reader.read(uri, offset, min(PIECE, size - offset)))
    return digest.hexdigest()


def _partial(target: str, path: str, source: str) -> Path:
    """Where an unfinished copy lies; the same for the same source and target."""
    name = hashlib.sha256(f"{source}\n{target}\n{path}".encode()).hexdigest()[:24]
    root = Path(os.environ.get("OLMO_JAX_CACHE", Path(tempfile.gettempdir(), "olmo-jax-mirror")))
    return root / f"{name}.partial"


def _read_record(uri: str) -> dict[str, Copied]:
    try:
        return {c["path"]: Copied(**c) for c in json.loads(storage.read_bytes(uri))}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{uri} is not a record of a mirror: move it away") from None


def summary(copied: Sequence[Copied]) -> str:
    """A line for people."""
    return f"{len(copied)} files, {sum(c.bytes for c in copied)} bytes, all verified"
