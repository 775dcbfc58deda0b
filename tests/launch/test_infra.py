"""infra/ as far as it can be checked without a cloud, and the guides against the command line."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from olmo_core_jax.launch.profile import load_profile

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"
GUIDES = [INFRA / "README.md", ROOT / "docs" / "reproduce-on-gke.md"]


@pytest.mark.parametrize("path", sorted((INFRA / "launch").glob("*.yaml")), ids=lambda p: p.stem)
def test_launch_profiles_are_valid(path):
    profile = load_profile(str(path))
    assert profile.name == path.stem
    if profile.backend == "gke":
        assert profile.gke_of("build_index").processes == 1
        assert profile.gke_of("stage1_train").processes > 1


def test_queues_cover_what_the_profiles_ask_for():
    from olmo_core_jax.launch.gke.quota import free_of, needs

    documents = [
        d for p in (INFRA / "k8s").glob("*.yaml") for d in yaml.safe_load_all(p.read_text()) if d
    ]
    flavors = {d["metadata"]["name"]: d for d in documents if d["kind"] == "ResourceFlavor"}
    queues = {d["metadata"]["name"]: d for d in documents if d["kind"] == "ClusterQueue"}
    for path in (INFRA / "launch").glob("*.yaml"):
        profile = load_profile(str(path))
        for stage in ("stage1_train", "convert_weights") if profile.gke else ():
            gke = profile.gke_of(stage)
            quota = free_of(queues[gke.queue], flavors, gke)
            for resource, amount in needs(gke).items():
                assert quota.get(resource, 0) >= amount, (path.stem, stage, resource)


def test_kustomization_lists_every_file():
    listed = yaml.safe_load((INFRA / "k8s" / "kustomization.yaml").read_text())["resources"]
    there = {p.name for p in (INFRA / "k8s").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(listed) == there


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kustomize_builds():
    done = subprocess.run(
        ["kubectl", "kustomize", str(INFRA / "k8s")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(list(yaml.safe_load_all(done.stdout))) == 20


@pytest.mark.skipif(not shutil.which("terraform"), reason="terraform is not installed")
def test_terraform_is_formatted():
    done = subprocess.run(
        ["terraform", "fmt", "-check", "-diff", str(INFRA / "terraform")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_terraform_files_parse_and_name_only_what_they_declare():
    """As far as that goes without the provider, whose registry is not at hand."""
    hcl2 = pytest.importorskip("hcl2")
    declared, text = set(), ""
    for path in sorted((INFRA / "terraform").glob("*.tf")):
        text += "".join(line for line in path.open() if not line.lstrip().startswith("#"))
        for kind, blocks in hcl2.loads(path.read_text()).items():
            for block in blocks:
                declared |= set(declarations(kind, block))
    used = set(re.findall(r"\b(?:var|local)\.\w+|(?:data\.)?\bgoogle_\w+\.\w+", text))
    assert used <= declared
    variables = {name for name in declared if name.startswith("var.")}
    assert variables <= used and len(variables) > 5


def declarations(kind: str, block: dict):
    """What later expressions may name: var.x, local.x, TYPE.NAME, data.TYPE.NAME."""
    for first, body in block.items():
        first = first.strip('"')
        if kind in ("variable", "locals"):
            yield f"{'var' if kind == 'variable' else 'local'}.{first}"
        elif kind in ("resource", "data"):
            before = "data." if kind == "data" else ""
            yield from (f"{before}{first}.{name.strip(chr(34))}" for name in body)


def test_terraform_and_the_profiles_agree_on_names():
    pools = (INFRA / "terraform" / "node_pools.tf").read_text()
    assert '"tpu7x-${each.value[0] * 8}-${each.key}-placement-policy"' in pools
    seen = set()
    for path in (INFRA / "launch").glob("*.yaml"):
        gke = load_profile(str(path)).gke
        if gke and gke.placement_policy:
            hosts, topology = gke.hardware.hosts, gke.hardware.topology
            assert gke.placement_policy == f"tpu7x-{hosts * 8}-{topology}-placement-policy", path
            seen.add(gke.capacity)
    assert seen == {"spot", "reservation", "flex-start"}
    iam = (INFRA / "terraform" / "iam.tf").read_text()
    for document in yaml.safe_load_all((INFRA / "k8s" / "accounts.yaml").read_text()):
        if document["kind"] == "ServiceAccount":
            assert f'"${{local.pool}}/{document["metadata"]["name"]}"' in iam


@pytest.mark.parametrize("guide", GUIDES, ids=lambda p: p.name)
def test_guides_name_verbs_and_files_that_exist(guide):
    from typer.main import get_command

    from olmo_core_jax.cli import app

    text = guide.read_text()
    verbs = set(get_command(app).commands)
    for word in re.findall(r"olmo-jax ([a-z][a-z|-]+)", text):
        assert set(word.split("|")) <= verbs, word
    for path in re.findall(r"(?<![\w/.-])((?:infra|docs|flows|tests)/[\w./-]+\w)", text):
        assert (ROOT / path).exists(), path


def test_image_files_copy_what_exists():
    text = (INFRA / "docker" / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, _ = [w for w in line.split() if not w.startswith("--")]
        for source in sources:
            assert (ROOT / source).exists(), source
