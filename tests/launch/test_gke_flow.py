"""The whole flow, every stage a JobSet on the loopback cluster, its run root in a bucket; killed, then resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml
from fake_kube.kubelet import module_runner
from fake_kube.lab import Lab

from olmo_core_jax import storage
from olmo_core_jax.recipes import load_recipe

pytest.importorskip("kubernetes")
pytest.importorskip("gcsfs")
gcs_emulator = pytest.importorskip("gcs_emulator", exc_type=ImportError)
pytestmark = pytest.mark.slow

FLOW = Path(__file__).resolve().parents[2] / "flows" / "reproduce.py"
ROOT = "gs://olmo-runs/short"


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """A bucket on loopback, and what clients need to find it."""
    fake = {"type": "authorized_user", "client_id": "x", "client_secret": "x", "refresh_token": "x"}
    credentials = tmp_path / "credentials.json"
    credentials.write_text(json.dumps(fake | {"token": "x", "expiry": "2099-01-01T00:00:00Z"}))
    with gcs_emulator.bucket_on_loopback() as url:
        for name, value in environment(url, credentials, tmp_path).items():
            monkeypatch.setenv(name, value)
        storage._client.cache_clear()
        yield
    storage._client.cache_clear()


def environment(url: str, credentials: Path, tmp_path: Path) -> dict[str, str]:
    return {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_CLOUD_PROJECT": "emulator",
        "GOOGLE_APPLICATION_CREDENTIALS": str(credentials),
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@pytest.fixture
def recipe(tmp_path):
    """The laptop recipe, cut short."""
    found = load_recipe("laptop").model_dump()
    every = {"checkpoints": {"every": 6, "landmarks": [6], "keep": 2}, "reference": None}
    found["stage1"] |= every | {"stop_at": 18}
    found["stage2"] |= {
        "reference": None,
        "max_tokens": 12288,
        "checkpoints": {"every": 6, "landmarks": [], "keep": 2},
    }
    found["evaluation"] |= {"limit": 2}
    path = tmp_path / "short.yaml"
    path.write_text(yaml.safe_dump(found | {"name": "short"}))
    return path


def kubeconfig(lab: Lab, path: Path) -> None:
    user = {"name": "u", "user": {"token": "token-1"}}
    cluster = {"name": "c", "cluster": {"server": lab.api.url}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "default"}}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
    path.write_text(
        yaml.safe_dump(config | {"users": [user], "clusters": [cluster], "contexts": [context]})
    )


def launch_profile(path: Path) -> None:
    gke = {
        "shape": "n2-standard-16",
        "hosts": 2,
        "image": "r/i:1",
        "queue": "tpus",
        "max_restarts": 2,
    }
    gke["watching"] = {"refresh": 1.0}
    stages = ("convert_weights", "build_index", "eval_landmarks", "warm_adam", "final_eval")
    path.write_text(
        yaml.safe_dump(
            {"backend": "gke", "gke": gke, "gke_stages": {s: {"hosts": 1} for s in stages}}
        )
    )


def started(lab: Lab) -> Counter:
    """How often each stage's JobSet was created."""
    key = "olmo-core-jax/stage"
    return Counter(
        r.body["metadata"]["annotations"][key] for r in lab.api.seen("create", "jobsets")
    )


def test_flow_on_jobsets_with_a_bucket_killed_and_resumed(bucket, recipe, tmp_path):
    with Lab(tmp_path, translate=module_runner, grace_scale=0.1) as lab:
        kubeconfig(lab, tmp_path / "kubeconfig")
        launch_profile(tmp_path / "profile.yaml")
        env = os.environ | {
            "KUBECONFIG": str(tmp_path / "kubeconfig"),
            "OLMO_LAUNCH": str(tmp_path / "profile.yaml"),
            "METAFLOW_HOME": str(tmp_path / "metaflow"),
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path),
            "USERNAME": "tester",
            "PYTHONPATH": str(FLOW.parents[1]),
        }

        def flow(*arguments: str) -> subprocess.Popen:
            out = open(tmp_path / f"{arguments[0]}.txt", "wb")  # noqa: SIM115
            command = [sys.executable, str(FLOW), *arguments]
            return subprocess.Popen(
                command, env=env, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True
            )

        first = flow("run", f"--recipe={recipe}", f"--output={ROOT}")
        metrics = f"{ROOT}/stage1_train/metrics/metrics.jsonl"

        def training():
            assert first.poll() is None, (tmp_path / "run.txt").read_text()[-3000:]
            time.sleep(0.5)
            return storage.exists(metrics)

        lab.until(training, 600)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        assert lab.cluster.running_pods()  # the job does not notice
        second = flow("resume")
        assert second.wait(1200) == 0, (tmp_path / "resume.txt").read_text()[-3000:]
        stages = [
            "convert_weights",
            "build_index",
            "stage1_train",
            "eval_landmarks/6",
            "warm_adam",
            "stage2_train",
            "final_eval",
        ]
        for stage in stages:
            assert storage.exists(f"{ROOT}/{stage}/result.json"), stage
        counts = started(lab)
        assert {counts[s] for s in stages} == {1}, counts
        assert not lab.cluster.counted
        assert storage.exists(f"{ROOT}/final_eval/report.html")
        logs = [e.name for e in storage.list_dir(f"{ROOT}/stage1_train/pod_logs")]
        assert len(logs) == 2  # both hosts, one attempt
