"""The flow as an Argo WorkflowTemplate: made without a cluster, as infra/README.md says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

gcs_emulator = pytest.importorskip("gcs_emulator", exc_type=ImportError)
pytestmark = pytest.mark.slow

FLOW = Path(__file__).resolve().parents[3] / "flows" / "reproduce.py"
PROFILE = "/home/olmo/launch/tpu7x-4x4x4.yaml"


def test_every_stage_is_a_small_pod_that_may_watch_for_weeks(tmp_path):
    fake = {"type": "authorized_user", "client_id": "x", "client_secret": "x", "refresh_token": "x"}
    (tmp_path / "c.json").write_text(
        json.dumps(fake | {"token": "x", "expiry": "2099-01-01T00:00:00Z"})
    )
    with gcs_emulator.bucket_on_loopback() as url:
        env = os.environ | {
            "STORAGE_EMULATOR_HOST": url,
            "GOOGLE_CLOUD_PROJECT": "emulator",
            "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "c.json"),
            "METAFLOW_HOME": str(tmp_path),
            "METAFLOW_DEFAULT_DATASTORE": "gs",
            "METAFLOW_DATASTORE_SYSROOT_GS": f"gs://{gcs_emulator.BUCKET}/metaflow",
            "METAFLOW_KUBERNETES_NAMESPACE": "olmo",
            "METAFLOW_KUBERNETES_SERVICE_ACCOUNT": "controller",
            "METAFLOW_KUBERNETES_CONTAINER_IMAGE": "r/trainer:cpu",
            "USERNAME": "tester",
        }
        options = [
            "kubernetes:cpu=1,memory=2048",
            "timeout:hours=1440",
            f'environment:vars={{"OLMO_LAUNCH": "{PROFILE}"}}',
            "retry:times=3",
        ]
        command = [sys.executable, str(FLOW), *(x for o in options for x in ("--with", o))]
        command += ["argo-workflows", "create", "--only-json"]
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr[-2000:]
    template = json.loads(done.stdout)
    pods = {
        t["name"]: t
        for t in template["spec"]["templates"]
        if t.get("serviceAccountName") and "hook" not in t["name"]
    }
    stages = {
        "convert-weights",
        "build-index",
        "stage1-train",
        "eval-landmarks",
        "warm-adam",
        "stage2-train",
        "final-eval",
    }
    assert stages <= set(pods)
    for name in stages:
        pod = pods[name]
        env = {e["name"]: e.get("value") for e in pod["container"]["env"]}
        assert env["OLMO_LAUNCH"] == PROFILE
        assert pod["serviceAccountName"] == "controller"
        assert pod["activeDeadlineSeconds"] == 1440 * 3600
        assert pod["retryStrategy"]["limit"] == 3
        assert pod["container"]["resources"]["requests"]["cpu"] == "1"
