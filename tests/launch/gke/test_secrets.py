"""A planted secret reaches the pod's environment and nothing else: no manifest, log, record, message or error."""

import re
from pathlib import Path

import pytest
import yaml
from fake_kube.lab import Lab

from olmo_core_jax.errors import JobError, UserError
from olmo_core_jax.launch.gke.manifest import render, to_yaml
from olmo_core_jax.launch.profile import load_profile

pytest.importorskip("kubernetes")

PLANTED = "hf_PlantedSecretValue0123456789"
TOKEN = "api-token-PlantedSecretValue0123456789"
NEEDLE = "PlantedSecretValue"


def everything(lab: Lab) -> str:
    """All that a stage leaves behind: files, what was said, what was sent, what the API server keeps."""
    files = [p.read_text(errors="replace") for p in Path(lab.root).rglob("*") if p.is_file()]
    sent = [repr((r.verb, r.plural, r.name, r.query, r.body)) for r in lab.api.requests]
    return "\n".join([*files, *sent, *lab.said, repr(lab.store.objects), repr(lab.store.history)])


def secret_lab(tmp_path, **more) -> Lab:
    secrets = {"HF_TOKEN": {"secret": "hf-token", "key": "token"}}
    lab = Lab(tmp_path, secrets=secrets, secret_values={"hf-token": {"token": PLANTED}}, **more)
    lab.api.tokens = {TOKEN}
    return lab


def test_nothing_that_a_stage_leaves_behind_holds_a_secret(tmp_path):
    with secret_lab(tmp_path) as lab:
        lab.start(lab.launcher(connect=lambda context: lab.api.connect(TOKEN))).finish()
        assert lab.kubelet.environments[0]["HF_TOKEN"] == PLANTED  # it is where it belongs
        assert NEEDLE not in everything(lab)
        assert NEEDLE not in to_yaml(render(lab.job, lab.profile))


@pytest.mark.parametrize("fault", [401, 403, 422, 500, "reset"])
def test_no_error_holds_a_secret(tmp_path, fault):
    with secret_lab(tmp_path, watching={"api_patience": 0.1}) as lab:
        lab.api.fail(fault, times=10**6)
        with pytest.raises(JobError) as error:
            lab.start(lab.launcher(connect=lambda context: lab.api.connect(TOKEN))).finish()
        assert NEEDLE not in str(error.value) and NEEDLE not in repr(error.value.__cause__)
        assert NEEDLE not in everything(lab)


@pytest.mark.parametrize("name", ["HF_TOKEN", "NOTE"])
def test_a_secret_in_a_profile_is_refused_without_being_repeated(tmp_path, name):
    path = tmp_path / "p.yaml"
    gke = {"shape": "v5p-256", "image": "i", "env": {name: PLANTED}}
    path.write_text(yaml.safe_dump({"backend": "gke", "gke": gke}))
    with pytest.raises(UserError, match="looks like a secret") as error:
        load_profile(str(path))
    assert NEEDLE not in str(error.value)


def test_no_shipped_file_holds_anything_like_a_secret():
    root = Path(__file__).resolve().parents[3]
    shape = re.compile(
        r"\bhf_[A-Za-z0-9]{20,}|\bghp_\w{20,}|\bAIza[\w-]{30,}|-----BEGIN .*PRIVATE|\bya29\.\w"
    )
    for folder in ("infra", "olmo_core_jax/launch", "flows", "docs"):
        for path in (root / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".yaml", ".md", ".tf", ".example"):
                assert not shape.search(path.read_text()), path
