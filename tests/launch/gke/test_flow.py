"""The whole flow, every stage a JobSet on the loopback cluster, its run root in a bucket; killed, then resumed.

Secrets are planted where real ones are (the controller's environment and kubeconfig, the pods' Secret, the token for the
bucket), and looked for in everything that the flow leaves behind.
"""

import base64
import gzip
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
from olmo_core_jax.storage import files

pytest.importorskip("kubernetes")
pytest.importorskip("gcsfs")
gcs_emulator = pytest.importorskip("gcs_emulator", exc_type=ImportError)
pytestmark = pytest.mark.slow

FLOW = Path(__file__).resolve().parents[3] / "flows" / "reproduce.py"
BUCKET = "gs://olmo-runs"
ROOT = f"{BUCKET}/short"
NEEDLE = b"PlantedSecretValue"


def planted(kind: str) -> str:
    """A secret of its own for every place."""
    return f"{kind}_{NEEDLE.decode()}0123456789"


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """A bucket on loopback, and what clients need to find it."""
    fake = {"type": "authorized_user", "client_id": "x", "client_secret": "x", "refresh_token": "x"}
    credentials = tmp_path / "credentials.json"
    credentials.write_text(
        json.dumps(fake | {"token": planted("gcs"), "expiry": "2099-01-01T00:00:00Z"})
    )
    with gcs_emulator.bucket_on_loopback() as url:
        for name, value in environment(url, credentials, tmp_path).items():
            monkeypatch.setenv(name, value)
        files._client.cache_clear()
        yield
    files._client.cache_clear()


def environment(url: str, credentials: Path, tmp_path: Path) -> dict[str, str]:
    return {
        "STORAGE_EMULATOR_HOST": url,
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_CLOUD_PROJECT": "emulator",
        "GOOGLE_APPLICATION_CREDENTIALS": str(credentials),
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": planted("gcs"),
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
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
    user = {"name": "u", "user": {"token": planted("kubernetes")}}
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
        "secrets": {"HF_TOKEN": {"secret": "hf-token", "key": "token"}},
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


def spellings(needle: bytes) -> list[bytes]:
    """As it is, and inside base64 (cards, Kubernetes) at each of the three alignments."""
    found = [needle]
    for before in range(3):
        inside = base64.b64encode(b"x" * before + needle)
        found.append(inside[-(-before * 8 // 6) : (before + len(needle)) * 8 // 6])
    return found


@pytest.mark.parametrize("before", [b"", b"a", b"ab", b"abc"])
def test_a_secret_is_found_in_base64(before):
    inside = base64.b64encode(before + NEEDLE + b"and more")
    assert any(s in inside for s in spellings(NEEDLE))
    assert not any(s in base64.b64encode(before + NEEDLE[::-1]) for s in spellings(NEEDLE))


def texts(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, what is gzipped (Metaflow's artifacts) as it is inside."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            found[str(path)] = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    return found


def left_behind(lab: Lab, tmp_path: Path) -> dict[str, dict[str, bytes]]:
    """All that the flow has written or sent, by kind of place; not the files that secrets were given in."""
    requests = {
        str(i): repr((r.verb, r.plural, r.name, r.query, r.body)).encode()
        for i, r in enumerate(lab.api.requests)
    }
    return {
        "bucket": {n: storage.read_bytes(f"{BUCKET}/{n}") for n, _ in storage.walk(BUCKET)},
        "Metaflow's datastore": texts(tmp_path / ".metaflow"),
        "Metaflow's home": texts(tmp_path / "metaflow"),
        "output of the flow": {p.name: p.read_bytes() for p in tmp_path.glob("*.txt")},
        "output of the pods": {name: p.log for name, p in lab.kubelet.history},
        "requests": requests,
        "API server": {
            str(i): repr(o).encode()
            for i, o in enumerate([*lab.store.objects.values(), *lab.store.history])
        },
    }


def check_secrets(lab: Lab, tmp_path: Path) -> None:
    """They were where they belong, and are nowhere else. Each place holds what shows that it was read rightly."""
    assert {env["HF_TOKEN"] for env in lab.kubelet.environments} == {planted("pod")}
    assert {r.token for r in lab.api.requests} == {planted("kubernetes")}
    known = {
        "bucket": b"eval_landmarks/6: done in",
        "Metaflow's datastore": b"gs://olmo-runs/short/stage1_train",
        "Metaflow's home": b"",
        "output of the flow": b"submitted JobSet",
        "output of the pods": b"recipe short",
        "requests": b"secretKeyRef",
        "API server": b"olmo-core-jax/run-root",
    }
    for place, found in left_behind(lab, tmp_path).items():
        assert not found or any(known[place] in content for content in found.values()), place
        assert found or not known[place], place
        for name, content in found.items():
            assert not any(needle in content for needle in spellings(NEEDLE)), f"{place}: {name}"


def test_flow_on_jobsets_with_a_bucket_killed_and_resumed(bucket, recipe, tmp_path):
    secrets = {"hf-token": {"token": planted("pod")}}
    with Lab(tmp_path, translate=module_runner, grace_scale=0.1, secret_values=secrets) as lab:
        lab.api.tokens = {planted("kubernetes")}
        kubeconfig(lab, tmp_path / "kubeconfig")
        launch_profile(tmp_path / "profile.yaml")
        env = os.environ | {
            "KUBECONFIG": str(tmp_path / "kubeconfig"),
            "OLMO_LAUNCH": str(tmp_path / "profile.yaml"),
            "METAFLOW_HOME": str(tmp_path / "metaflow"),
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path),
            "USERNAME": "tester",
            "HF_TOKEN": planted("controller"),
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

        lab.until(training, 1200)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        assert lab.cluster.running_pods()  # the job does not notice
        second = flow("resume")
        assert second.wait(2400) == 0, (tmp_path / "resume.txt").read_text()[-3000:]
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
        check_secrets(lab, tmp_path)
