"""Manifests: golden files, schemas, names, and the failure policy played through."""

import copy
import re
from pathlib import Path

import crd_files
import pytest
import yaml
from fake_kube.policy import job_failure, jobset_action

from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.topology import Topology, process_id
from olmo_core_jax.launch.gke import names
from olmo_core_jax.launch.gke.check import check
from olmo_core_jax.launch.gke.manifest import launch_digest, render
from olmo_core_jax.launch.gke.profile import GKE
from olmo_core_jax.launch.job import job_of
from olmo_core_jax.launch.profile import Profile, load_profile
from olmo_core_jax.stages import STAGES

crds, jobset_crd = crd_files.crds, crd_files.jobset_crd
INFRA = Path(__file__).resolve().parents[3] / "infra"
RUN = "gs://my-project-olmo-runs/7b"
PROFILES = ["cpu-cluster", "v5p-256", "tpu7x-4x4x4", "tpu7x-4x8x8", "tpu7x-2x4x4x4"]
JOB = job_of("stage1_train", "olmo3_7b", RUN)


def gke(**section) -> Profile:
    base = {"shape": "v5p-4x4x8", "image": "i"} | section
    return Profile.model_validate({"backend": "gke", "topology": {}, "gke": base})


def pod_of(manifest: dict) -> dict:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", PROFILES)
def test_golden_files(name):
    """`olmo-jax render` of the profiles in infra/launch is what infra/jobs shows."""
    manifest = render(JOB, load_profile(str(INFRA / "launch" / f"{name}.yaml")))
    assert manifest == yaml.safe_load((INFRA / "jobs" / f"stage1_train.{name}.yaml").read_text())


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("stage", ["stage1", "build_index"])
def test_manifests_fit_the_schemas(name, stage, crds):
    pytest.importorskip("kubernetes_validate")
    job = JOB if stage == "stage1" else job_of("build_index", "olmo3_7b", RUN)
    check(render(job, load_profile(str(INFRA / "launch" / f"{name}.yaml"))), crds["JobSet"])


def test_kueue_files_fit_the_schemas(crds):
    from jsonschema import Draft202012Validator

    from olmo_core_jax.launch.gke.check import crd_problems

    seen = set()
    for path in sorted((INFRA / "k8s").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if document and document["kind"] in crds:
                assert list(crd_problems(document, crds[document["kind"]])) == [], path
                seen.add(document["kind"])
    assert seen >= {"ResourceFlavor", "ClusterQueue", "LocalQueue", "WorkloadPriorityClass"}
    assert Draft202012Validator


def rule_of(m: dict) -> dict:
    return m["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"][1][
        "onExitCodes"
    ]


def container_of(m: dict) -> dict:
    return pod_of(m)["containers"][0]


WRONG = {
    "unknown field": (lambda m: m["spec"].update(bogus=1), r"spec: .*bogus"),
    "wrong enum": (lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="Retry"), r"rules\[0\]\.action"),
    "number as text": (lambda m: m["spec"]["replicatedJobs"][0].update(replicas="32"), r"Jobs\[0\]\.replicas"),
    "no container name": (lambda m: pod_of(m)["containers"][0].pop("name"), r"containers\[0\]: .*'name' is a required"),
    "env value no text": (lambda m: container_of(m)["env"].append({"name": "A", "value": 1}), r"env\[\d+\]\.value"),
    "bad quantity": (lambda m: container_of(m)["resources"]["limits"].update({"google.com/tpu": "four"}), r"limits"),
    "typed null": (lambda m: pod_of(m).update(serviceAccountName=None), r"serviceAccountName"),
    "long name": (lambda m: m["metadata"].update(name="n" * 50), r"metadata\.name: pods would be called"),
    "restart policy": (lambda m: pod_of(m).update(restartPolicy="OnFailure"), r"podFailurePolicy needs Never"),
    "no such container": (
        lambda m: rule_of(m).update(containerName="x"),
        r"podFailurePolicy\.rules\[1\]\.onExitCodes\.containerName",
    ),
    "no such volume": (lambda m: pod_of(m).update(volumes=[]), r"volumes: a container mounts 'shm'"),
}  # fmt: skip


ONLY_BY_CRD = ("unknown field", "wrong enum", "number as text", "bad quantity", "typed null")
"""Faults that JobSet's definition alone finds; the core schemas and our own rules find the others."""


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_manifests_are_refused_with_the_fields_path(fault, jobset_crd):
    pytest.importorskip("kubernetes_validate")
    if jobset_crd is None and fault in ONLY_BY_CRD:
        pytest.skip("no CRD files: set OLMO_CRDS to a folder with JobSet's and Kueue's")
    manifest = copy.deepcopy(render(JOB, gke()))
    check(manifest, jobset_crd)
    spoil, message = WRONG[fault]
    spoil(manifest)
    with pytest.raises(UserError, match=message):
        check(manifest, jobset_crd)


def test_a_wrong_manifest_never_leaves_the_launcher(tmp_path, crds, monkeypatch):
    from fake_kube.lab import Lab

    from olmo_core_jax.launch.gke import watch as launcher_module

    def spoiled(*args, **kwargs):
        manifest = render(*args, **kwargs)
        manifest["spec"]["bogus"] = 1
        return manifest

    monkeypatch.setattr(launcher_module, "render", spoiled)
    with Lab(tmp_path) as lab:
        key = ("apiextensions.k8s.io", "customresourcedefinitions", "", "jobsets.jobset.x-k8s.io")
        lab.store.create(key, crds["JobSet"])
        with pytest.raises(UserError, match="bogus"):
            lab.start().finish()
        assert not lab.api.seen("create")


def test_a_jobset_controller_that_is_too_old_refuses_by_name(crds):
    old = copy.deepcopy(crds["JobSet"])
    rules = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
        "properties"
    ]["failurePolicy"]
    rules["properties"]["rules"]["items"]["properties"].pop("onJobFailureMessagePatterns")
    with pytest.raises(UserError, match=r"rules\[0\]: .*onJobFailureMessagePatterns"):
        check(render(JOB, gke()), old)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"shape": "v5p-3x3x3"}, "gke.*not a topology"),
        ({"capacity": "reservation"}, "go together"),
        ({"env": {"HF_TOKEN": "x"}}, "gke.env.*HF_TOKEN looks like a secret"),
        ({"env": {"NOTE": "hf_abcdefghijklmnopqrstuvwxyz"}}, "NOTE looks like a secret"),
        ({"processes_per_host": 2}, "TPU7x"),
        ({"shm": "lots"}, "gke.shm"),
        ({"labels": {"team": "a b"}}, "gke.labels.team"),
        ({"quueue": "x"}, "gke.quueue"),
        ({"grace_seconds": 5}, "gke.grace_seconds"),
    ],
)
def test_wrong_profiles_are_refused_with_the_fields_name(tmp_path, section, message):
    path = tmp_path / "p.yaml"
    path.write_text(
        yaml.safe_dump({"backend": "gke", "gke": {"shape": "v5p-256", "image": "i"} | section})
    )
    with pytest.raises(UserError, match=message):
        load_profile(str(path))


def test_names_are_stable_short_and_different():
    stages = ["stage1_train", "eval_landmarks/100", "eval_landmarks/1000000", "final_eval", "7b"]
    found = [names.jobset_name(RUN, s) for s in stages]
    assert found == [names.jobset_name(RUN + "/", s) for s in stages]
    assert len(set(found)) == len(stages)
    assert all(re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", n) and len(n) <= 28 for n in found)
    assert names.jobset_name(RUN + "2", "stage1_train") != found[0]
    big = render(JOB, gke(shape="v5p-16x16x24", slices=4))
    check(big)


def test_shape_changes_the_launch_and_never_the_name():
    small, large = render(JOB, gke(shape="tpu7x-4x4x4")), render(JOB, gke(shape="tpu7x-4x8x8"))
    assert small["metadata"]["name"] == large["metadata"]["name"]
    assert launch_digest(JOB, gke(shape="tpu7x-4x4x4")) != launch_digest(
        JOB, gke(shape="tpu7x-4x8x8")
    )
    patient = gke(watching={"queue_timeout": 60.0})
    assert launch_digest(JOB, gke()) == launch_digest(JOB, patient)


def test_what_a_tpu7x_host_with_two_processes_asks_for():
    manifest = render(JOB, load_profile(str(INFRA / "launch" / "tpu7x-4x8x8.yaml")))
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = pod_of(manifest)
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (64, 64, 0)
    assert [c["resources"]["limits"] for c in pod["containers"]] == [{"google.com/tpu": "2"}] * 2
    assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    csi = next(v["csi"] for v in pod["volumes"] if "csi" in v)
    assert csi["volumeAttributes"]["hostNetworkPodKSA"] == "true"
    rules = job["podFailurePolicy"]["rules"]
    assert [r["onExitCodes"]["containerName"] for r in rules[1:]] == ["train-0", "train-1"] * 2


def test_capacity_and_platform_become_selectors_and_tolerations():
    spot = pod_of(render(JOB, gke(capacity="spot")))
    assert spot["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert {t["key"] for t in spot["tolerations"]} == {
        "google.com/tpu",
        "cloud.google.com/gke-spot",
    }
    flex = pod_of(render(JOB, gke(capacity="flex-start")))
    assert flex["nodeSelector"]["cloud.google.com/gke-flex-start"] == "true"
    held = pod_of(render(JOB, gke(capacity="reservation", reservation="r1")))
    assert held["nodeSelector"]["cloud.google.com/reservation-name"] == "r1"
    one_host = pod_of(render(JOB, gke(shape="tpu7x-2x2x1")))
    assert "cloud.google.com/gke-tpu-topology" not in one_host["nodeSelector"]
    cpu = pod_of(render(JOB, gke(shape="n2-standard-16")))
    assert "tolerations" not in cpu and "securityContext" not in cpu["containers"][0]


def test_cpu_and_gpu_hosts_are_told_their_coordinator():
    manifest = render(JOB, gke(shape="h100", hosts=4))
    (topology,) = [
        a for a in pod_of(manifest)["containers"][0]["command"] if a.startswith("--topology=")
    ]
    name = manifest["metadata"]["name"]
    assert (
        f'"coordinator":"{name}-slice-0-0.{name}:8482"' in topology
        and '"num_processes":4' in topology
    )
    tpu = " ".join(pod_of(render(JOB, gke()))["containers"][0]["command"])
    assert "coordinator" not in tpu and '"platform":"tpu"' in tpu and '"attention":"splash"' in tpu


def test_processes_wait_longer_for_each_other_in_a_cluster():
    def topology_of(profile: Profile) -> Topology:
        command = pod_of(render(JOB, profile))["containers"][0]["command"]
        (text,) = [a.partition("=")[2] for a in command if a.startswith("--topology=")]
        return Topology.model_validate_json(text)

    usual = topology_of(gke()).distributed
    assert (usual.mode, usual.wait_seconds, usual.heartbeat_seconds) == ("auto", 900, 300)
    own = gke().model_copy(
        update={"topology": Topology.model_validate({"distributed": {"wait_seconds": 60}})}
    )
    chosen = topology_of(own).distributed
    assert (chosen.wait_seconds, chosen.heartbeat_seconds) == (60, 300)
    alone = topology_of(gke(shape="v5p-2x2x1")).distributed
    assert alone == Topology().distributed


@pytest.mark.parametrize("stage", [s.name for s in STAGES.values() if not s.distributed])
def test_a_stage_of_one_process_is_not_given_several(stage):
    job = job_of(stage, "olmo3_7b", RUN)
    with pytest.raises(
        UserError, match=f"{job.folder} runs in one process.*gke_stages.{job.folder}"
    ):
        render(job, gke())
    render(job, gke(shape="v5p-2x2x1"))


def test_process_numbers():
    worker = {"TPU_WORKER_ID": "3", "MEGASCALE_SLICE_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b,c,d"}
    assert process_id(Topology(), worker) == 7
    two_a_host = worker | {
        "TPU_PROCESS_ADDRESSES": ",".join(f"{h}:{p}" for h in "abcd" for p in (1, 2))
    }
    assert process_id(Topology(), two_a_host) == 11
    assert process_id(Topology(), {"JOB_COMPLETION_INDEX": "5"}) == 5


def failed_pod(code: int, disrupted: bool = False) -> dict:
    conditions = [{"type": "DisruptionTarget", "status": "True"}] if disrupted else []
    ended = [{"name": "train", "state": {"terminated": {"exitCode": code}}}]
    return {
        "metadata": {"namespace": "n", "name": "p"},
        "status": {"conditions": conditions, "containerStatuses": ended},
    }


# exit code, evicted: what the JobSet does
ENDS = {
    (42, False): "RestartJobSetAndIgnoreMaxRestarts",
    (143, False): "RestartJobSetAndIgnoreMaxRestarts",
    (137, True): "RestartJobSetAndIgnoreMaxRestarts",
    (1, True): "RestartJobSetAndIgnoreMaxRestarts",
    (2, True): "RestartJobSetAndIgnoreMaxRestarts",
    (1, False): "RestartJobSet",
    (134, False): "RestartJobSet",
    (137, False): "RestartJobSet",
    (139, False): "RestartJobSet",
    (2, False): "FailJobSet",
    (43, False): "FailJobSet",
    (44, False): "FailJobSet",
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_failure_policy_tells_disruption_crash_and_mistake_apart(end):
    manifest = render(JOB, gke())
    reason, message = job_failure(manifest, [failed_pod(*end)])
    assert jobset_action(manifest["spec"]["failurePolicy"], reason, message) == ENDS[end]


def test_a_hundred_disruptions_restart_and_four_crashes_fail():
    manifest = render(JOB, gke(max_restarts=3))
    policy = manifest["spec"]["failurePolicy"]
    counted = 0

    def happens(code: int, disrupted: bool) -> bool:
        nonlocal counted
        action = jobset_action(policy, *job_failure(manifest, [failed_pod(code, disrupted)]))
        counted += action == "RestartJobSet"
        return counted <= policy["maxRestarts"]

    assert all(happens(137, True) for _ in range(100))
    assert [happens(1, False) for _ in range(4)] == [True, True, True, False]


def test_defaults_need_no_more_than_shape_and_image():
    assert GKE.model_validate({"shape": "v5p-256", "image": "i"}).devices == 128
