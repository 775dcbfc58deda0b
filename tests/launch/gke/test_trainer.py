"""The real trainer as pods of a JobSet: two hosts over loopback, preempted, suspended, crashed, moved elsewhere."""

import itertools
import json
import random
import time
from pathlib import Path

import pytest
import yaml
from fake_kube.kubelet import module_runner
from fake_kube.lab import Lab
from helpers import json_lines

from olmo_core_jax.launch.job import job_of
from olmo_core_jax.launch.profile import Profile
from olmo_core_jax.launch.run import run
from olmo_core_jax.recipes import load_recipe

pytest.importorskip("kubernetes")
pytestmark = pytest.mark.slow

STEPS, EVERY = 24, 6


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The laptop recipe, cut short, and a run root with its first two stages done."""
    folder = tmp_path_factory.mktemp("prepared")
    recipe = load_recipe("laptop").model_dump()
    recipe["stage1"] |= {
        "stop_at": STEPS,
        "reference": None,
        "checkpoints": {"every": EVERY, "landmarks": [], "keep": 2},
    }
    recipe |= {"name": "short", "stage2": None}
    path = folder / "short.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path, folder


def trainer_lab(tmp_path, recipe: Path, **gke) -> Lab:
    """A laboratory whose pods run `jobs/train` on a run root that is ready for it."""
    lab = Lab(tmp_path, translate=module_runner, grace_scale=0.1, **({"hosts": 2} | gke))
    local = Profile()
    for stage in ("convert_weights", "build_index"):
        run(job_of(stage, str(recipe), lab.root), local)
    lab.job = job_of("stage1_train", str(recipe), lab.root)
    return lab


def last_lines(root: str, name: str) -> dict[int, dict]:
    """The last line of every step; a step that was repeated must have been repeated exactly."""
    path = next(Path(root, "stage1_train").rglob(name))
    return {row["step"]: row for row in json_lines(path)}


def losses(root: str) -> list[float]:
    lines = last_lines(root, "metrics.jsonl")
    assert sorted(lines) == list(range(1, STEPS + 1))
    return [lines[s]["train/CE loss"] for s in sorted(lines)]


def batches(root: str) -> list[str]:
    lines = last_lines(root, "instances.jsonl")
    return [lines[s]["digest"] for s in sorted(lines)]


@pytest.fixture(scope="module")
def undisturbed(prepared, tmp_path_factory):
    """Losses and batches of two hosts that nobody disturbed."""
    tmp_path = tmp_path_factory.mktemp("undisturbed")
    with trainer_lab(tmp_path, prepared[0]) as lab:
        lab.start().finish(1200)
        assert len(lab.leaders()) == 1
        return losses(lab.root), batches(lab.root)


def at_step(lab: Lab, step: int, attempt: int = 1) -> None:
    """Waits for an update that this attempt, or a later one, has made: one that came before is no sign of life."""
    path = Path(lab.root, "stage1_train", "metrics", "metrics.jsonl")

    def there() -> bool:
        return any(r["step"] >= step and r["attempt"] >= attempt for r in json_lines(path))

    lab.until(there, 900)


@pytest.fixture(scope="module")
def local(prepared, tmp_path_factory):
    """The same of a run without any cluster."""
    with trainer_lab(tmp_path_factory.mktemp("local"), prepared[0]) as lab:
        run(lab.job, Profile())
        return losses(lab.root), batches(lab.root)


def test_one_host_gives_the_local_runs_bits(prepared, local, tmp_path):
    with trainer_lab(tmp_path, prepared[0], hosts=1) as lab:
        controller = lab.start()
        at_step(lab, 8)
        lab.cluster.disrupt(lab.running(hosts=1)[0], grace=60)
        controller.finish(1200)
        assert (losses(lab.root), batches(lab.root)) == local
        assert [p.poll() for p in lab.leaders()] == [42, 0]


def test_two_hosts_agree_with_the_local_run(undisturbed, local):
    assert undisturbed[1] == local[1]
    assert undisturbed[0] == pytest.approx(local[0], abs=1e-5)


def test_preempted_suspended_crashed_and_still_the_same_bits(prepared, undisturbed, tmp_path):
    with trainer_lab(tmp_path, prepared[0]) as lab:
        controller = lab.start()
        at_step(lab, 3)
        lab.cluster.disrupt(lab.running()[1], grace=60)
        lab.until(lambda: len(lab.leaders()) == 2, 300)
        at_step(lab, 8, attempt=2)
        lab.cluster.held = True
        lab.cluster.evict()
        lab.until(lambda: not lab.cluster.running_pods(), 300)
        lab.cluster.held = False
        at_step(lab, 14, attempt=3)
        lab.cluster.crash(lab.running()[0])
        controller.finish(1200)
        assert losses(lab.root) == undisturbed[0]
        assert batches(lab.root) == undisturbed[1]
        codes = [p.poll() for p in lab.leaders()]
        assert codes == [42, 42, 137, 0], codes
        assert lab.cluster.jobset()["status"]["restartsCountTowardsMax"] == 1


def queued_hosts(lab) -> int | None:
    """Hosts that the JobSet asks for; None while there is none."""
    jobset = lab.cluster.jobset()
    return jobset and jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"]


def test_preempted_suspended_admitted_on_another_shape_and_restarted(prepared, local, tmp_path):
    """From two hosts to one while Kueue holds it back; the local run's results within rounding."""
    with trainer_lab(tmp_path, prepared[0]) as lab:
        first = lab.start()
        at_step(lab, 3)
        lab.cluster.disrupt(lab.running()[1], grace=60)
        lab.until(lambda: len(lab.leaders()) == 2, 300)
        at_step(lab, 7, attempt=2)
        lab.cluster.held = True
        lab.cluster.evict()
        lab.until(lambda: not lab.cluster.running_pods(), 300)
        lab.kill.set()
        first.join(60)
        lab.kill.clear()
        moved = lab.profile.gke.model_copy(update={"hosts": 1})
        second = lab.start(lab.launcher(lab.profile.model_copy(update={"gke": moved})))
        lab.until(lambda: queued_hosts(lab) == 1, 60)  # the first JobSet is gone
        assert not lab.cluster.running_pods()
        lab.cluster.held = False
        at_step(lab, 15, attempt=3)
        lab.cluster.crash(lab.running(hosts=1)[0])
        second.finish(1200)
        assert batches(lab.root) == local[1]
        assert losses(lab.root) == pytest.approx(local[0], abs=1e-5)
        assert [p.poll() for p in lab.leaders()] == [42, 42, 137, 0]
        launches = Path(lab.root, "stage1_train", "launches").iterdir()
        assert sorted(json.loads(p.read_text())["hosts"] for p in launches) == [1, 2]


@pytest.mark.parametrize("seed", range(10))
def test_random_histories(prepared, undisturbed, tmp_path, seed):
    """One or two events at random moments, start-up and compile included."""
    dice = random.Random(seed)
    with trainer_lab(tmp_path, prepared[0], max_restarts=5) as lab:
        controller = lab.start()
        for _ in range(dice.randint(1, 2)):
            lab.running()
            time.sleep(dice.uniform(0.2, 12))
            pods = lab.cluster.running_pods()
            kind = dice.choice(["disrupt", "lose", "crash", "evict", "kill"])
            if kind == "evict":
                lab.cluster.evict()
            elif kind == "kill":
                lab.kill.set()
                controller.join(60)
                lab.kill.clear()
                controller = lab.start()
            elif pods:
                getattr(lab.cluster, {"lose": "lose_node"}.get(kind, kind))(dice.choice(pods))
            if lab.cluster.jobset()["status"].get("terminalState"):
                break
            lab.until(
                lambda: (
                    lab.cluster.jobset()["status"].get("terminalState")
                    or len(lab.cluster.running_pods()) == 2
                ),
                300,
            )
        controller.finish(1200)
        assert losses(lab.root) == undisturbed[0]
        assert batches(lab.root) == undisturbed[1]
        leaders = lab.leaders()
        assert all(a.ended <= b.started for a, b in itertools.pairwise(leaders))
