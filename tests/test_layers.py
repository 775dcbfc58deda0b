"""Who may import whom (docs/architecture.md): neither wing knows the other, and the ground knows none of them."""

import ast
from pathlib import Path

import pytest

import olmo_core_jax

ROOT = Path(olmo_core_jax.__file__).parent
CONTROL = {"launch", "report"}
WORK = {"jobs", "train", "evaluate", "checkpoint", "parity", "model", "optim", "data", "compile"}
# At the door: it may knock anywhere, and nobody imports it.
DOOR = {"cli"}
# Experiments have a side in either wing.
EITHER = {"experiments", "plan.py", "compare", "hardware"}
PARTS = sorted(p.name for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists())


def imported(part: Path) -> set[str]:
    """The parts of the package that the files of one part import, wherever in the file."""
    found = set()
    for file in [part] if part.suffix == ".py" else part.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("olmo_core_jax"):
                names = node.module.split(".")[1:2] or [alias.name for alias in node.names]
                found |= set(names)
    return found


@pytest.mark.parametrize("part", PARTS)
def test_imports_run_downwards(part):
    names = imported(ROOT / part)
    forbidden = DOOR - {part}
    if part in CONTROL:
        forbidden |= WORK
    elif part in WORK:
        forbidden |= CONTROL
    elif part not in DOOR | EITHER:
        forbidden |= CONTROL | WORK
    assert not names & forbidden
