"""Random histories of a contended cluster, each from a seed. Whatever happens: one trainer at a time, no checkpoint
lost, no success without a result, no retry spent on waiting, and the end state of the run that nobody disturbed."""

import itertools
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_kube.lab import Controller, Killed, Lab
from standin_state import chain

from olmo_core_jax.launch.job import JobFailed

pytest.importorskip("kubernetes")

STEPS, EVERY = 60, 5
USED_UP = "ReachedMaxRestarts.*no checkpoint since"
REASONS = ["Preempted", "PodsReadyTimeout", "NodeFailures", "ClusterQueueStopped"]


class Person(threading.Thread):
    """Starts the controller again whenever it ended without a result: as Argo, a flow's retry or a person does."""

    def __init__(self, lab: Lab):
        super().__init__(daemon=True)
        self.lab, self.result, self.starts, self.stopped = lab, None, 0, 0
        self.error: BaseException | None = None
        self.start()

    def run(self):
        while self.result is None and self.error is None and self.starts < 60:
            self.lab.kill.clear()
            self.starts += 1
            try:
                controller = Controller(self.lab.launcher())
                controller.join()
                self.result = controller.result
                if controller.error:
                    raise controller.error
            except Killed:
                time.sleep(0.02)
            except JobFailed as e:
                self.stopped += 1
                if not re.search(USED_UP, str(e)):
                    self.error = e
            except BaseException as e:
                self.error = e


def happen(lab: Lab, dice: random.Random, counts: dict) -> None:
    """One event, if the state of the cluster allows it."""
    kind = dice.choice(
        [
            "disrupt",
            "lose",
            "crash",
            "evict",
            "evict",
            "kill",
            "kill",
            "outage",
            "fault",
            "queue",
            "delete",
        ]
    )
    pods = lab.cluster.running_pods()
    if kind in ("disrupt", "lose", "crash"):
        if not pods:
            return
        pod = dice.choice(pods)
        {"disrupt": lab.cluster.disrupt, "lose": lab.cluster.lose_node, "crash": lab.cluster.crash}[
            kind
        ](pod)
    elif kind == "evict":
        lab.cluster.held = dice.random() < 0.5
        lab.cluster.evict(dice.choice(REASONS))
        time.sleep(dice.uniform(0, 0.15))
        lab.cluster.held = False
    elif kind == "kill":
        lab.kill.set()
    elif kind == "outage":
        lab.api.down = True
        time.sleep(dice.uniform(0, 0.2))
        lab.api.down = False
    elif kind == "fault":
        fault = dice.choice(
            [429, 500, 503, 401, 404, "reset", "reset-after-headers", "gone", "cut", "end"]
        )
        verb = dice.choice(["get", "list", "watch", "create", "delete", "log"])
        if fault in (401, 404) and verb != "get":
            fault = 503
        lab.api.fail(
            fault,
            verb,
            "" if verb != "get" else "jobsets",
            times=1 if fault == 401 else dice.randint(1, 2),
        )
    elif kind == "queue":
        lab.cluster.held = True
        time.sleep(dice.uniform(0, 0.3))
        lab.cluster.held = False
    elif kind == "delete" and (jobset := lab.cluster.jobset()) and dice.random() < 0.5:
        name = jobset["metadata"]["name"]
        with lab.store.changed:
            if lab.store.find(("jobset.x-k8s.io", "jobsets", "default", name)):
                lab.store.mark_deleted(
                    ("jobset.x-k8s.io", "jobsets", "default", name), None, "Foreground"
                )
    counts[kind] = counts.get(kind, 0) + 1


def play(seed: int, tmp_path) -> None:
    dice = random.Random(seed)
    flags = [f"--steps={STEPS}", f"--every={EVERY}", "--pause=0.008"]
    counts: dict[str, int] = {}
    with Lab(
        tmp_path,
        seed=seed,
        flags=flags,
        hosts=dice.choice([1, 2, 2, 3]),
        max_restarts=dice.choice([0, 1, 20]),
    ) as lab:
        lab.cluster.start_delay = dice.choice([0.0, 0.02, 0.1])
        person = Person(lab)
        for _ in range(dice.randint(3, 9)):
            time.sleep(dice.uniform(0.0, 0.2))
            happen(lab, dice, counts)
        person.join(300)
        assert person.error is None, repr(person.error)
        assert person.result is not None, f"unfinished after {counts}: {lab.said[-5:]}"
        check(lab, person, counts)


def check(lab: Lab, person: Person, counts: dict) -> None:
    assert person.result.outputs["state"] == chain(STEPS)
    leaders = lab.leaders()
    for before, after in itertools.pairwise(leaders):
        assert before.ended is not None and before.ended <= after.started, "two trainers at once"
        begins = (
            int(re.search(rb"begins at (\d+)", after.log)[1]) if b"begins" in after.log else None
        )
        reached = [int(n) for n in re.findall(rb"step (\d+)", before.log)]
        if begins is not None and reached:
            saved = max(reached) if before.poll() == 42 else max(reached) // EVERY * EVERY
            # A process that dies between its line and its checkpoint has not made that checkpoint yet.
            assert begins >= saved or (before.poll() != 42 and begins >= saved - EVERY), (
                "a checkpoint was lost"
            )
    assert all(p.poll() != 43 for p in leaders), "a second trainer tried to start"
    crashes = counts.get("crash", 0)
    assert len(lab.cluster.counted) <= crashes, "something but a crash was counted as a retry"
    made = {
        r.body["metadata"]["annotations"]["olmo-core-jax/submission"]
        for r in lab.api.seen("create", "jobsets")
    }
    assert made == {"1"}, "a submission was counted although nothing stopped early"
    assert person.stopped <= crashes


def test_random_schedules(tmp_path):
    for seed in range(5):
        play(seed, tmp_path / str(seed))


@pytest.mark.slow
def test_two_hundred_random_schedules(tmp_path):
    failures = {}

    def one(seed: int):
        try:
            play(seed, tmp_path / str(seed))
        except BaseException as e:
            failures[seed] = f"{type(e).__name__}: {e}"

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(1000, 1200)))
    assert not failures, "\n".join(f"seed {s}: {e}" for s, e in failures.items())
