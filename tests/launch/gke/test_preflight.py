"""The preflight table against a cluster that has everything, and against one that lacks one thing at a time."""

import dataclasses
import http.server
import shutil
import threading

import crd_files
import pytest
import yaml
from fake_kube.lab import Lab
from typer.testing import CliRunner

from olmo_core_jax import recipes
from olmo_core_jax.launch.gke import api, image
from olmo_core_jax.launch.gke import preflight as pre
from olmo_core_jax.launch.gke.quota import quantity
from olmo_core_jax.recipes import load_recipe

pytest.importorskip("kubernetes")

jobset_crd = crd_files.jobset_crd
K = "kueue.x-k8s.io"
FLAVOR_LABELS = {"node.kubernetes.io/instance-type": "n2-standard-16"}


@pytest.fixture
def registry():
    """A registry on loopback with one image, olmo:1, behind an anonymous token as Docker Hub's."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            if self.headers.get("Authorization") != "Bearer t":
                self.send_response(401)
                realm = f"http://127.0.0.1:{self.server.server_address[1]}/token"
                self.send_header(
                    "WWW-Authenticate",
                    f'Bearer realm="{realm}",service="r",scope="repository:olmo:pull"',
                )
            else:
                self.send_response(200 if self.path == "/v2/olmo/manifests/1" else 404)
            self.end_headers()

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"token": "t"}')

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    ).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def deployment(image_name: str, ready: int = 1) -> dict:
    containers = [{"name": "manager", "image": image_name}]
    return {
        "spec": {"template": {"spec": {"containers": containers}}},
        "status": {"readyReplicas": ready},
    }


def put(lab, group, plural, namespace, name, body):
    lab.store.remove((group, plural, namespace, name))
    lab.store.create((group, plural, namespace, name), {"metadata": {"name": name}} | body)


@pytest.fixture
def ready(tmp_path, registry, jobset_crd, monkeypatch):
    """A laboratory with everything in place."""
    monkeypatch.setattr(image, "_google_token", lambda: None)
    secrets = {"HF_TOKEN": {"secret": "hf-token", "key": "token"}}
    lab = Lab(
        tmp_path,
        image=f"{registry}/olmo:1",
        service_account="trainer",
        secrets=secrets,
        cpu="14",
        memory="48Gi",
    )
    with lab:
        put(
            lab,
            "apps",
            "deployments",
            "jobset-system",
            "jobset-controller-manager",
            deployment("r/jobset/jobset:v0.10.1"),
        )
        put(
            lab,
            "apps",
            "deployments",
            "kueue-system",
            "kueue-controller-manager",
            deployment("r/kueue/kueue:v0.17.1"),
        )
        put(
            lab,
            "apiextensions.k8s.io",
            "customresourcedefinitions",
            "",
            "jobsets.jobset.x-k8s.io",
            jobset_crd or crd_files.ANY_JOBSET,
        )
        put(lab, K, "localqueues", "default", "tpus", {"spec": {"clusterQueue": "all"}})
        put(lab, K, "resourceflavors", "", "n2", {"spec": {"nodeLabels": FLAVOR_LABELS}})
        put(lab, K, "clusterqueues", "", "all", cluster_queue("32", "128Gi"))
        for i in range(2):
            put(
                lab,
                "",
                "nodes",
                "",
                f"n{i}",
                {"metadata": {"name": f"n{i}", "labels": FLAVOR_LABELS}},
            )
        put(lab, "", "serviceaccounts", "default", "trainer", {})
        put(lab, "", "secrets", "default", "hf-token", {"data": {"token": "eA=="}})
        for stage in ("convert_weights", "build_index"):
            from olmo_core_jax.results import StageResult, write_result

            write_result(
                lab.root, stage, StageResult(stage=stage, inputs={}, outputs={}, figures={})
            )
        yield lab


def cluster_queue(cpu: str, memory: str) -> dict:
    resources = [{"name": "cpu", "nominalQuota": cpu}, {"name": "memory", "nominalQuota": memory}]
    flavors = [{"name": "n2", "resources": resources}]
    return {
        "spec": {"resourceGroups": [{"coveredResources": ["cpu", "memory"], "flavors": flavors}]}
    }


def look(lab, profile=None) -> dict[str, pre.Row]:
    kube = api.Kube(lambda: lab.api.connect(), "default", 0.2, lambda text: None, lambda s: None)
    return {r.what: r for r in pre.preflight(lab.job, profile or lab.profile, kube)}


def test_all_pass(ready):
    rows = look(ready)
    assert len(rows) == 12 and all(r.passed for r in rows.values()), pre.table(list(rows.values()))
    assert "28 of 32 cpu" in rows["queue"].text
    assert ready.cluster.jobset() is None  # the dry run made nothing
    assert pre.table(list(rows.values())).endswith("all pass")


def controller(lab, what: str, tag: str, ready: int = 1):
    namespace, name = f"{what}-system", f"{what}-controller-manager"
    put(lab, "apps", "deployments", namespace, name, deployment(f"r/{what}:{tag}", ready))


BREAK = {
    "JobSet": (lambda lab: controller(lab, "jobset", "v0.9.1"), "0.10 or newer"),
    "Kueue": (lambda lab: controller(lab, "kueue", "v0.17.1", ready=0), "not ready"),
    "queue": (
        lambda lab: put(lab, K, "clusterqueues", "", "all", cluster_queue("16", "128Gi")),
        "asks for 28 cpu; the quota is 16",
    ),
    "nodes": (lambda lab: lab.store.remove(("", "nodes", "", "n1")), "1 of 2 nodes have the labels"),
    "account": (lambda lab: lab.store.remove(("", "serviceaccounts", "default", "trainer")), "not found"),
    "secret HF_TOKEN": (lambda lab: put(lab, "", "secrets", "default", "hf-token", {"data": {}}), "no key token"),
    "stages before": (lambda lab: shutil.rmtree(f"{lab.root}/build_index"), "build_index not finished"),
    "manifest": (lambda lab: lab.api.fail(422, "create", "jobsets"), "422"),
    "cluster": (lambda lab: lab.api.fail(403, "get", "/version", times=9), "403"),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAK)
def test_each_missing_thing_is_named_and_nothing_else(ready, what):
    spoil, words = BREAK[what]
    spoil(ready)
    rows = look(ready)
    assert [r.what for r in rows.values() if not r.passed] == [what]
    assert words in rows[what].text


def test_queue_missing_uncovered_and_wrong_flavor(ready):
    put(
        ready,
        K,
        "resourceflavors",
        "",
        "n2",
        {"spec": {"nodeLabels": {"node.kubernetes.io/instance-type": "c3"}}},
    )
    assert "does not cover cpu" in look(ready)["queue"].text
    ready.store.remove((K, "localqueues", "default", "tpus"))
    assert "not found: get localqueues tpus" in look(ready)["queue"].text


def test_missing_image_and_unreadable_run_root(ready, tmp_path):
    gke = ready.profile.gke.model_copy(update={"image": ready.profile.gke.image + "2"})
    assert (
        "does not exist" in look(ready, ready.profile.model_copy(update={"gke": gke}))["image"].text
    )
    gke = ready.profile.gke.model_copy(update={"shared_paths": []})
    assert (
        "pods do not see"
        in look(ready, ready.profile.model_copy(update={"gke": gke}))["run root"].text
    )


def test_an_unreachable_cluster_fails_every_row_that_needs_it_and_is_asked_once(ready):
    ready.api.down = True
    rows = look(ready)
    assert not rows["cluster"].passed and "no answer" in rows["cluster"].text
    assert {r.plural for r in ready.api.requests} == {"/version"}
    failed = {r.what for r in rows.values() if not r.passed}
    assert failed == set(rows) - {"image", "run root", "recipe", "stages before"}


def test_a_run_root_that_cannot_be_used_is_a_row_and_not_a_crash(ready, monkeypatch):
    def forbidden(*args):
        raise ConnectionRefusedError("403 no storage.objects.create access")  # no error of ours

    with monkeypatch.context() as patch:
        patch.setattr(pre.storage, "write_bytes", forbidden)
        patch.setattr(pre.storage, "delete", forbidden)
        assert "403 no storage.objects.create" in look(ready)["run root"].text
    pre.storage.write_text(
        f"{ready.root}/recipe.yaml", recipes.dump_recipe(load_recipe("olmo3_7b"))
    )
    row = look(ready)["recipe"]
    assert not row.passed and "another recipe" in row.text


def test_a_recipe_without_published_weights_needs_no_conversion(ready, tmp_path):
    own = load_recipe("laptop").model_dump() | {"weights": {"hf": None}, "name": "own"}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    shutil.rmtree(f"{ready.root}/convert_weights")
    assert "convert_weights not finished" in look(ready)["stages before"].text
    ready.job = dataclasses.replace(ready.job, recipe=str(tmp_path / "own.yaml"))
    assert look(ready)["stages before"].passed


def test_the_last_evaluation_follows_the_last_stage_that_there_is(ready):
    final = dataclasses.replace(ready.job, folder="final_eval", recipe="laptop")
    with pytest.raises(pre.Wrong, match="stage2_train not finished"):
        pre._upstream(final)
    with pytest.raises(pre.Wrong, match="stage1_train not finished"):
        pre._upstream(dataclasses.replace(final, recipe="laptop_4x12"))


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("ubuntu", ("registry-1.docker.io", "library/ubuntu", "latest")),
        ("a/b:1", ("registry-1.docker.io", "a/b", "1")),
        ("europe-west4-docker.pkg.dev/p/r/i:tpu", ("europe-west4-docker.pkg.dev", "p/r/i", "tpu")),
        ("localhost:5000/i@sha256:ab", ("localhost:5000", "i", "sha256:ab")),
        ("h.io/i:1@sha256:ab", ("h.io", "i", "sha256:ab")),
    ],
)
def test_image_references(reference, parts):
    assert image.parse(reference) == parts


def test_quantities():
    assert [quantity(q) for q in ("500m", "64", "128Gi", "1.5k", 3)] == [
        0.5,
        64,
        128 * 2**30,
        1500,
        3,
    ]


def test_the_command_ends_with_0_only_if_all_pass(ready, monkeypatch, tmp_path):
    from olmo_core_jax.cli import app

    monkeypatch.setattr(api, "connect", lambda context: ready.api.connect())
    path = tmp_path / "p.yaml"
    path.write_text(
        yaml.safe_dump({"backend": "gke", "gke": ready.profile.gke.model_dump(exclude_unset=True)})
    )
    command = [
        "preflight",
        "--recipe=laptop",
        f"--run-root={ready.root}",
        "--stage=stage1_train",
        f"--profile={path}",
    ]
    passed = CliRunner().invoke(app, command)
    assert passed.exit_code == 0 and "all pass" in passed.output
    ready.store.remove(("", "nodes", "", "n1"))
    failed = CliRunner().invoke(app, command)
    assert failed.exit_code == 1 and "1 of 12 fail" in failed.output
