"""Fixtures: schemas of JobSet and Kueue, in OLMO_CRDS or a folder `crds` below the checkout's parent.

`crds` skips a test where there are none; `jobset_crd` is for tests that can do with less.
"""

import os
from pathlib import Path

import pytest


def crd_folder() -> Path | None:
    named = os.environ.get("OLMO_CRDS")
    beside = Path(__file__).resolve().parents[3]
    found = [Path(named)] if named else sorted(beside.glob("*/crds"))
    return next((f for f in found if list(f.glob("*jobsets.yaml"))), None)


@pytest.fixture(scope="session")
def crds():
    """CustomResourceDefinitions by kind."""
    from olmo_core_jax.launch.gke.check import load_crds

    pytest.importorskip("jsonschema")
    folder = crd_folder()
    if folder is None:
        pytest.skip("no CRD files: set OLMO_CRDS to a folder with JobSet's and Kueue's")
    return load_crds(str(folder))


@pytest.fixture(scope="session")
def jobset_crd():
    """JobSet's definition; None where there are no files."""
    from olmo_core_jax.launch.gke.check import load_crds

    folder = crd_folder()
    return load_crds(str(folder))["JobSet"] if folder else None


ANY_JOBSET = {
    "spec": {
        "names": {"kind": "JobSet"},
        "versions": [{"name": "v1alpha2", "schema": {"openAPIV3Schema": {"type": "object"}}}],
    }
}
"""A definition that takes every JobSet."""
