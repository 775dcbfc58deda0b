"""What a person does to a stage: detach, attach, move it to another shape, look, cancel. And several slices as one job."""

import json
import re
from pathlib import Path

import pytest
from fake_kube.lab import Lab
from standin_state import chain, said

from olmo_core_jax.launch.job import JobFailed

pytest.importorskip("kubernetes")


def test_the_launcher_detaches_and_attaches(tmp_path):
    with Lab(tmp_path, flags=["--steps=80", "--pause=0.02"]) as lab:
        controller = lab.start()
        lab.until(lambda: lab.steps())
        lab.kill.set()
        controller.join(60)
        lab.kill.clear()
        assert lab.cluster.running_pods()
        assert lab.start().finish().outputs["state"] == chain(80)
        assert len(lab.leaders()) == 1 and len(lab.api.seen("create", "jobsets")) == 1
        assert said(lab, "attached to JobSet")


def test_another_shape_goes_on_from_the_last_checkpoint(tmp_path):
    with Lab(tmp_path, flags=["--steps=100", "--pause=0.02"]) as lab:
        first = lab.start()
        lab.until(lambda: len(lab.steps()) >= 2)
        lab.kill.set()
        first.join(60)
        lab.kill.clear()
        gke = lab.profile.gke.model_copy(update={"hosts": 3})
        second = lab.start(lab.launcher(lab.profile.model_copy(update={"gke": gke})))
        lab.running(hosts=3)
        assert second.finish().outputs["state"] == chain(100)
        assert lab.leaders()[0].poll() == 42
        records = sorted(Path(lab.root, "stage1_train", "launches").glob("*.json"))
        assert sorted(json.loads(p.read_text())["hosts"] for p in records) == [2, 3]


def test_status_and_cancel(tmp_path):
    with Lab(tmp_path, flags=["--steps=1000", "--pause=0.02"]) as lab:
        launcher = lab.launcher()
        assert launcher.status() == "no JobSet, and no result yet"
        launcher.submit()
        lab.until(lambda: lab.steps())
        assert re.match(
            r"(running|starting): started, . of 1 slices ready; newest checkpoint \d+",
            launcher.status(),
        )
        assert launcher.cancel() is True
        assert not lab.cluster.running_pods() and lab.cluster.jobset() is None
        assert launcher.cancel() is False


def test_cancelling_by_hand_also_ends_a_controller_that_watches(tmp_path):
    with Lab(tmp_path, gate=True) as lab:
        controller = lab.start()
        lab.running()
        assert lab.launcher().cancel() is True
        with pytest.raises(JobFailed, match="cancelled by hand"):
            controller.finish()
        assert len(lab.api.seen("create", "jobsets")) == 1 and lab.cluster.jobset() is None
        lab.open_gate()
        assert lab.start().finish().outputs["state"] == chain(20)  # and it can be started again


def test_slices_start_fail_and_end_together(tmp_path):
    """Two slices of two hosts: a host of one is lost, all four restart, and the result is the undisturbed one."""
    with Lab(tmp_path, gate=True, shape="v5p-2x2x2", hosts=None, slices=2) as lab:
        controller = lab.start()
        lab.running(hosts=4)
        lab.until(lambda: said(lab, "2 of 2 slices ready"))
        assert said(lab, r"submitted JobSet .* on 2 x v5p-2x2x2 \(16 devices\)")
        lab.cluster.disrupt(lab.running(hosts=4)[3])
        lab.until(lambda: len(lab.kubelet.history) == 8)
        lab.running(hosts=4)
        lab.open_gate()
        assert controller.finish().outputs["state"] == chain(20)
        slices = [env["SLICE_INDEX"] for env in lab.kubelet.environments]
        assert slices == ["0", "0", "1", "1"] * 2
        assert {env["OLMO_SHAPE"] for env in lab.kubelet.environments} == {"2 x v5p-2x2x2"}
        status = lab.cluster.jobset()["status"]
        assert (status["restarts"], status["restartsCountTowardsMax"]) == (1, 0)
