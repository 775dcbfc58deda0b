"""A run root and weights in a bucket, against an emulator on loopback: the jobs as they are started on a cluster."""

import json
import os
import subprocess
import sys

import gcs_emulator as emulator
import pytest

from olmo_core_jax.recipes import load_recipe

for module in ("gcsfs", "google.cloud.storage", "gcp_storage_emulator"):
    pytest.importorskip(module)
pytestmark = pytest.mark.slow

LAPTOP = load_recipe("laptop")

CHECK = """
import sys
from pathlib import Path
from olmo_core_jax import storage
from olmo_core_jax.checkpoint import inspection
step, source, copy = sys.argv[1:]
assert not inspection.verify(step).problems
assert inspection.diff(step, source).same
for file in Path(source).iterdir():
    storage.write_file(f"{copy}/{file.name}", file)
assert inspection.diff(step, copy).same
print(inspection.list_checkpoints(step.rpartition("/")[0]))
"""


@pytest.fixture
def bucket(tmp_path):
    """(URI of an empty bucket, the environment in which Google's, Orbax's and tensorstore's clients talk to it)."""
    credentials = tmp_path / "credentials.json"
    fake = dict.fromkeys(("client_id", "client_secret", "refresh_token", "token"), "fake")
    credentials.write_text(
        json.dumps(fake | {"type": "authorized_user", "expiry": "2099-01-01T00:00:00Z"})
    )
    with emulator.bucket_on_loopback() as url:
        yield (
            f"gs://{emulator.BUCKET}",
            os.environ
            | {
                "STORAGE_EMULATOR_HOST": url,
                "TENSORSTORE_GCS_HTTP_URL": url,
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
                "GOOGLE_CLOUD_PROJECT": "emulator",
                "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
                "GOOGLE_APPLICATION_CREDENTIALS": str(credentials),
                "JAX_PLATFORMS": "cpu",
            },
        )


def run(env: dict, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_conversion_into_a_bucket_and_out_of_one(bucket):
    root, env = bucket
    job = ["-m", "olmo_core_jax.jobs.convert_weights", "--recipe=laptop", f"--run-root={root}/run"]
    assert "logits against the reference's" in run(env, *job)
    assert "already done" in run(env, *job)
    step = f"{root}/run/convert_weights/checkpoints/0"
    assert "good" in run(env, "-c", CHECK, step, LAPTOP.weights.hf, f"{root}/hf")


UPLOAD = """
import sys
from pathlib import Path
from olmo_core_jax import storage
folder, uri = Path(sys.argv[1]), sys.argv[2]
for file in folder.rglob("*"):
    if file.is_file():
        storage.write_file(f"{uri}/{file.relative_to(folder)}", file)
"""
SUMS = """
import sys
from olmo_core_jax import storage
sums = [storage.read_json(f"{root}/warm_adam/checkpoints/0/meta/metadata")["checksums"] for root in sys.argv[1:]]
assert sums[0] == sums[1] and len(sums[0]) > 100, sums
"""


def test_warm_start_in_a_bucket_from_a_native_checkpoint_in_one(bucket):
    root, env = bucket
    native = LAPTOP.stage1.reference.native[400]
    run(env, "-c", UPLOAD, native, f"{root}/native/step400")
    for name, source in {"a": native, "b": f"{root}/native/step400"}.items():
        job = ["-m", "olmo_core_jax.jobs.warm_adam", "--recipe=laptop", f"--run-root={root}/{name}"]
        assert "Adam count" in run(env, *job, f"--from-native={source}")
    run(env, "-c", SUMS, f"{root}/a", f"{root}/b")
