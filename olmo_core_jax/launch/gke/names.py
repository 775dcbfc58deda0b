"""Names of what is created in a cluster: stable for a run root and stage, so a restarted controller finds its job."""

import hashlib
import re
from pathlib import Path

from olmo_core_jax import storage

JOB = "slice"
"""Name of the replicated Job inside every JobSet: one child Job a slice."""

# Pods are called NAME-slice-SLICE-HOST-xxxxx and may not exceed 63 characters. 28 leaves room for 1000 slices of
# 10000 hosts, and is what topology-aware slicing of TPU7x allows.
LONGEST = 28

RUN_ROOT = "olmo-core-jax/run-root"
STAGE = "olmo-core-jax/stage"
RUN_LABEL = "olmo-core-jax/run"
DIGEST = "olmo-core-jax/launch-digest"
SUBMISSION = "olmo-core-jax/submission"
START_STEP = "olmo-core-jax/start-step"
REPORTED = "olmo-core-jax/reported"


def canonical(run_root: str) -> str:
    """One spelling of a run root: absolute where local, without a slash at the end."""
    return run_root.rstrip("/") if storage.is_remote(run_root) else str(Path(run_root).resolve())


def run_hash(run_root: str) -> str:
    """Ten hexadecimal digits that stand for a run root; also a label by which all its JobSets are found."""
    return hashlib.sha256(canonical(run_root).encode()).hexdigest()[:10]


def jobset_name(run_root: str, stage: str) -> str:
    """A DNS label of at most 28 characters, the same for the same run root and stage folder whatever the shape."""
    digest = hashlib.sha256(f"{canonical(run_root)}\0{stage}".encode()).hexdigest()[:10]
    readable = (
        re.sub(r"[^a-z0-9]+", "-", stage.lower())
        .strip("-")[: LONGEST - len(digest) - 1]
        .rstrip("-")
    )
    return f"{readable}-{digest}" if readable[:1].isalpha() else f"s{readable[1:]}-{digest}"
