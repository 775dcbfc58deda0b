"""The flow as a person starts it: what it says to mistakes, and what it survives."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from helpers import json_lines

from olmo_core_jax.recipes import load_recipe

FLOW = Path(__file__).parents[2] / "flows" / "reproduce.py"


@pytest.fixture
def flow(tmp_path):
    """flow("run", ...) starts the flow in its own folder and Metaflow store; ends with everything that it started."""
    env = os.environ | {"METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    env.pop("OLMO_LAUNCH", None)
    started = []

    def start(*arguments, **more):
        process = subprocess.Popen(
            [sys.executable, str(FLOW), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=env | more,
        )
        started.append(process)
        return process

    start.env = env
    yield start
    for process in started:
        if process.poll() is None:
            process.kill()


def ended(process, timeout=600):
    out, _ = process.communicate(timeout=timeout)
    return process.returncode, out


def test_a_recipe_without_stage_2_is_refused_before_anything_runs(flow, tmp_path):
    code, out = ended(flow("run", "--recipe", "olmo3_7b_stage3", "--output", str(tmp_path / "r")))
    assert code != 0 and "olmo3_7b_stage3 has no stage 2" in out and "Traceback" not in out
    assert not (tmp_path / "r").exists()


def test_missing_files_are_named_before_anything_runs(flow, tmp_path):
    mine = {"extends": "laptop", "name": "mine", "weights": {"hf": "my/step0"}}
    mine["stage2"] = {"reference": {"curve": "my/curve.csv", "hf": {120: "my/hf"}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine))
    code, out = ended(flow("run", "--recipe", "mine.yaml", "--output", str(tmp_path / "r")))
    assert code != 0 and "Traceback" not in out and not (tmp_path / "r").exists()
    for field, path in (
        ("weights.hf", "step0"),
        ("stage2.reference.curve", "curve.csv"),
        ("stage2.reference.hf.120", "hf"),
    ):
        assert f"{field}: {tmp_path}/my/{path}" in out
    assert out.count(f"{tmp_path}/my/") == 3 * out.count("names what is not there")


def test_help_imports_no_framework():
    code = (
        "import runpy, sys; sys.argv = ['reproduce.py', '--help']\n"
        f"try: runpy.run_path({str(FLOW)!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print({'jax', 'torch', 'orbax', 'flax'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--recipe", "nope"], "unknown recipe 'nope'"),
        (["run", "--recip", "laptop"], "no such option: --recip"),
        (["run", "--output", "/proc/nowhere"], "choose a writable output folder"),
    ],
)
def test_mistakes_have_one_clear_error(flow, arguments, said):
    code, out = ended(flow(*arguments))
    assert code != 0
    assert said in out
    assert "Traceback" not in out


def test_a_run_id_that_exists_is_refused(flow, tmp_path):
    (tmp_path / ".metaflow/Reproduce/7").mkdir(parents=True)
    code, out = ended(flow("run", "--run-id", "7"))
    assert code != 0 and "--run-id 7 exists already" in out


@pytest.fixture
def short(tmp_path):
    """The laptop recipe, cut to 100 updates and 20: the same reference, the same seven stages."""
    recipe = load_recipe("laptop").model_dump()
    recipe["name"] = "short"
    recipe["stage1"] |= {"stop_at": 100, "checkpoints": {"every": 10, "landmarks": [50, 100]}}
    recipe["stage2"] |= {"stop_at": 20, "checkpoints": {"every": 10}}
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return str(path)


def wait_for(condition, what, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_flow_resumes_exactly(flow, short, tmp_path):
    root = tmp_path / "root"
    metrics = root / "stage1_train/metrics/metrics.jsonl"
    first = flow("run", "--recipe", short, "--output", str(root))
    wait_for(lambda: len(json_lines(metrics)) > 25, "25 updates")
    trainer = json.loads((root / "stage1_train/lock.json").read_text())["pid"]
    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_for(lambda: not alive(trainer), "the trainer to leave with its flow", 60)
    before = {p: p.read_bytes() for p in root.glob("*/result.json")}
    assert {p.parent.name for p in before} == {"convert_weights", "build_index"}

    code, out = ended(flow("resume"))
    assert code == 0, out
    assert "resuming run " in out and re.search(r"Cloning.*/convert_weights/", out)
    assert all(p.read_bytes() == b for p, b in before.items())
    assert {p.name for p in root.iterdir() if (p / "result.json").exists()} >= {
        "stage1_train",
        "warm_adam",
        "stage2_train",
        "final_eval",
    }
    assert_repeats_are_exact(metrics)
    assert_artifacts_are_small(flow.env)

    stamps = {
        p: p.stat().st_mtime_ns for p in root.rglob("*") if p.is_file() and p.name != "log.txt"
    }
    code, out = ended(flow("resume", "stage1_train"))
    assert code == 0, out
    changed = {str(p.relative_to(root)) for p, t in stamps.items() if p.stat().st_mtime_ns != t}
    drawn_anew = ("lock.json", "report.html")  # the page is a view of files that stay as they are
    assert not {c for c in changed if not c.endswith(drawn_anew)}, "finished stages are left alone"


def assert_repeats_are_exact(metrics):
    """Updates that stand twice in the log, before and after a kill, have the same loss and norm to the last bit."""
    seen, repeated = {}, 0
    for line in json_lines(metrics):
        values = {k: line[k] for k in ("train/CE loss", "train/Z loss", "optim/total grad norm")}
        assert seen.setdefault(line["step"], values) == values
        repeated += line["attempt"] > 1
    assert sorted(seen) == list(range(1, 101)) and repeated


def assert_artifacts_are_small(env):
    code = (
        "import json, pickle\nfrom metaflow import Flow, namespace\nnamespace(None)\n"
        "run = Flow('Reproduce').latest_run\n"
        "print(json.dumps([[s.id, a.id, len(pickle.dumps(a.data))] for s in run for t in s for a in t]))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    sizes = json.loads(out.stdout.splitlines()[-1])
    assert sizes and not [s for s in sizes if s[2] > 4096]


@pytest.mark.slow
def test_a_killed_trainer_is_started_again_by_its_flow(flow, short, tmp_path):
    root = tmp_path / "root"
    metrics = root / "stage1_train/metrics/metrics.jsonl"
    running = flow("run", "--recipe", short, "--output", str(root))
    wait_for(lambda: len(json_lines(metrics)) > 15, "15 updates")
    os.kill(json.loads((root / "stage1_train/lock.json").read_text())["pid"], signal.SIGKILL)
    code, out = ended(running)
    assert code == 0, out
    assert "signal SIGKILL; starting again (1 of 2)" in out
    assert_repeats_are_exact(metrics)
