"""Manifests in OLMo-core's format.

One `label,path` a line, `#` comments, `{TOKENIZER}` where the tokenizer's name goes. The order of
the lines is part of the data order, so nothing here sorts.
"""

import importlib.util
import os
import random
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from olmo_core_jax import storage
from olmo_core_jax.data.problems import refuse
from olmo_core_jax.errors import UserError

TOKENIZER_FOLDERS = {
    # AI2 stored these mixes under another name of the same tokenizer.
    "allenai/dolma2-tokenizer": {
        "OLMo-mix-0625-official": "allenai/dolma3-tokenizer",
        "OLMo-mix-0925-official": "allenai/dolma3-tokenizer",
        "OLMo-midtraining-mix-0625-100B": "allenai/dolma3-tokenizer",
        "OLMo-midtraining-mix-0925-ingredient1-100B": "allenai/dolma3-tokenizer",
        "OLMo-midtraining-mix-0925-ingredient2-100B": "allenai/dolma3-tokenizer",
        "OLMo-longmino-mix-0625": "allenai/dolma3-tokenizer",
        "OLMo-longmino-mix-0925": "allenai/dolma3-tokenizer",
    }
}
"""tokenizer name -> mix name -> what `{TOKENIZER}` becomes, where that is not the name itself."""


@dataclass(frozen=True)
class Source:
    """One line of a mix. path is relative to the recipe's `base`, with the tokenizer filled in."""

    label: str
    path: str

    def uri(self, base: str) -> str:
        return storage.join(base, self.path)


def load_mix(mix: str, tokenizer: str, permutation_seed: int | None = None) -> list[Source]:
    """The sources of a mix: a file, a gs:// or https:// URI, or a name that ai2-olmo-core ships.

    permutation_seed: shuffles the files with Python's own generator, as OLMo-core does.
    Raises UserError that lists every bad line.
    """
    sources = parse_mix(read_mix(mix), mix, tokenizer)
    if permutation_seed is not None:
        random.Random(permutation_seed).shuffle(sources)
    return sources


def parse_mix(text: str, mix: str, tokenizer: str) -> list[Source]:
    """The sources in a manifest's text. Raises UserError that lists bad lines and duplicates."""
    name = Path(mix).name.removesuffix(".txt")
    folder = TOKENIZER_FOLDERS.get(tokenizer, {}).get(name, tokenizer)
    sources, problems = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        label, comma, path = (part.strip() for part in line.partition(","))
        if not (label and comma and path) or "," in path:
            problems.append(f"line {number} is not `label,path`: {line!r}")
            continue
        sources.append(Source(label, path.replace("{TOKENIZER}", folder).lstrip("/")))
    for path, times in Counter(s.path for s in sources).items():
        if times > 1:
            problems.append(f"{path} is listed {times} times")
    if not sources and not problems:
        problems.append("it names no files")
    refuse(f"mix {mix}", problems, "correct the manifest")
    return sources


def read_mix(mix: str) -> str:
    """A manifest's text, wherever it is. Raises UserError."""
    try:
        if mix.startswith(("https://", "http://")):
            with urllib.request.urlopen(mix, timeout=60) as answer:
                return answer.read().decode()
        if storage.is_remote(mix) or os.path.isfile(mix):
            return storage.read_text(mix)
        shipped = shipped_mix(mix)
        if shipped is not None:
            return shipped.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"mix {mix} cannot be read: {e}") from None
    raise UserError(
        f"mix {mix!r} is neither a file nor a mix of an installed ai2-olmo-core: "
        "give a path or URL, or pip install ai2-olmo-core"
    )


def shipped_mix(name: str) -> Path | None:
    """The manifest of that name in an installed ai2-olmo-core, which is not imported for it."""
    spec = importlib.util.find_spec("olmo_core")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, "data", "mixes", f"{name}.txt")
        if "/" not in name and path.is_file():
            return path
    return None
