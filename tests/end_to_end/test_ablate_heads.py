"""The head-dimension ablation as a person starts it: quick to start, clear in refusal, and fair."""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import json_lines

FLOW = Path(__file__).parents[2] / "flows" / "ablate_heads.py"


@pytest.fixture
def run(tmp_path):
    """run("run", ...) is the flow's exit code and output, in its own folder and Metaflow store."""
    env = os.environ | {"METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    for name in ("OLMO_LAUNCH", "METAFLOW_RUN_MAX_WORKERS"):
        env.pop(name, None)

    def start(*command):
        done = subprocess.run(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=env,
            timeout=1800,
        )
        return done.returncode, done.stdout

    return start


def test_help_imports_no_framework(run):
    code = (
        "import runpy, sys; sys.argv = ['ablate_heads.py', '--help']\n"
        f"try: runpy.run_path({str(FLOW)!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print({'jax', 'torch', 'orbax', 'flax'} & set(sys.modules))"
    )
    status, out = run("-c", code)
    assert status == 0 and out.endswith("set()\n")


@pytest.mark.parametrize(
    ("recipe", "said"),
    [("laptop", "extends no other one"), ("uneven.yaml", "differ in parameters (400,944 and")],
)
def test_what_cannot_be_compared_has_one_clear_error(run, tmp_path, recipe, said):
    uneven = "extends: laptop_4x12\nname: uneven\nmodel: {head_dim: 24}\n"
    (tmp_path / "uneven.yaml").write_text(uneven)
    status, out = run(str(FLOW), "run", "--recipe", recipe, "--output", str(tmp_path / "root"))
    assert status != 0
    assert said in out and "Traceback" not in out
    assert not (tmp_path / "root").exists(), "nothing was begun"


ARTIFACTS = """
import json, pickle
from metaflow import Flow, namespace
from metaflow.cards import get_cards
namespace(None)
run = Flow("AblateHeads").latest_run
tasks = {step.id: list(step) for step in run}
sizes = {f"{t.pathspec} {a.id}": len(pickle.dumps(a.data)) for ts in tasks.values() for t in ts for a in t}
end, compare = tasks["end"][0].data, tasks["compare"][0]
train = sorted(tasks["train"], key=lambda t: t.created_at)
print(json.dumps({
    "successful": run.successful,
    "sizes": sizes,
    "figures": end.figures, "costs": end.costs, "fair": end.fair, "arms": end.arms, "table": end.table,
    "card": get_cards(compare)[0].get(),
    "live": [get_cards(t)[0].get() for t in train],
    "in turn": train[0].finished_at <= train[1].created_at,
}))
"""


@pytest.mark.slow
def test_two_arms_are_trained_and_compared(run, tmp_path):
    root = tmp_path / "root"
    status, out = run(str(FLOW), "run", "--updates", "12", "--output", str(root))
    assert status == 0, out
    status, said = run("-c", ARTIFACTS)
    assert status == 0, said
    found = json.loads(said.splitlines()[-1])
    assert found["successful"] and found["fair"] and found["arms"] == ["4x12", "2x24"]
    assert found["costs"] == {"parameters": 400_944, "FLOPs a token": 1_977_840.0}
    assert not {name: size for name, size in found["sizes"].items() if size > 4096}
    assert found["in turn"], "beside each other, each would be timed under the other's load"
    for arm, page in zip(("4x12", "2x24"), found["live"], strict=True):
        assert f"laptop_{arm}: stage 1" in shown(page) and "Update **12**" in shown(page)
    for text in ("4 heads of 12", "2 heads of 24", "400,944", "fastest tenth"):
        assert text in shown(found["card"]) and text in found["table"]
    assert_figures_are_the_logs(found["figures"], root)

    stamps = {p: p.stat().st_mtime_ns for p in root.rglob("result.json")}
    status, out = run(str(FLOW), "run", "--updates", "11", "--output", str(root))
    assert status != 0 and "of another ablation: choose another output folder" in out
    assert stamps == {p: p.stat().st_mtime_ns for p in root.rglob("result.json")}


def shown(page):
    """What a card's page draws: Metaflow puts it into the page in base64."""
    data = re.findall(r'__MF_DATA__\["[^"]*"\] = "([^"]+)"', page)
    assert len(data) == 1
    return base64.b64decode(data[0]).decode()


def assert_figures_are_the_logs(figures, root):
    """Worked out anew from both metrics.jsonl: the losses differ, but not in what was fed or where they began."""
    losses = {}
    for name in ("4x12", "2x24"):
        rows = json_lines(root / name / "stage1_train/metrics/metrics.jsonl")
        losses[name] = [row["train/CE loss"] for row in rows]
        assert len(losses[name]) == 12
        mean = sum(losses[name][-3:]) / 3
        assert figures[f"{name}/CE loss, mean of updates 10 to 12"] == pytest.approx(
            mean, rel=1e-12
        )
        assert figures[f"{name}/tokens per second and device"] > 0
        assert figures[f"{name}/heldout/code"] == pytest.approx(mean, abs=0.5)
    gaps = [abs(a - b) for a, b in zip(*losses.values(), strict=True)]
    assert figures["CE loss, max |difference|"] == max(gaps) > 0
    instances = [(root / n / "stage1_train/instances.jsonl").read_text() for n in losses]
    assert instances[0] == instances[1]
