"""`olmo-jax` verbs as a person types them: the entry point, a kubeconfig, the loopback cluster; exit codes and words."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from fake_kube.lab import Lab, run_standin

from olmo_core_jax import cli
from olmo_core_jax.errors import CRASH, USER_ERROR
from olmo_core_jax.launch import commands
from olmo_core_jax.launch.gke import watch
from olmo_core_jax.launch.job import job_of
from olmo_core_jax.launch.profile import load_profile

pytest.importorskip("kubernetes")

TRAINER = ["--folder=stage1_train", "--steps=20", "--every=5", "--pause=0.01"]


@dataclass
class Shell:
    """Types commands for one run root and profile."""

    lab: Lab
    profile: Path
    capsys: pytest.CaptureFixture
    patch: pytest.MonkeyPatch

    def __call__(self, verb: str, *flags: str, **changes) -> tuple[int, str, str]:
        """(exit code, stdout, stderr). changes: other values of the usual options, None to leave one out."""
        usual = {"recipe": "laptop", "run-root": self.lab.root, "stage": "stage1_train"}
        usual |= {"profile": str(self.profile)}
        if verb == "logs":
            usual = {k: usual[k] for k in ("run-root", "stage")}
        usual |= {k.replace("_", "-"): v for k, v in changes.items()}
        options = [f"--{k}={v}" for k, v in usual.items() if v is not None]
        self.patch.setattr(sys, "argv", ["olmo-jax", verb, *options, *flags])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = self.capsys.readouterr()
        assert "Traceback" not in out + err
        return int(end.value.code or 0), out, err


def write_kubeconfig(path: Path, server: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "users": [{"name": "u", "user": {"token": "token-1"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(yaml.safe_dump(config))


@pytest.fixture
def shell(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    monkeypatch.delenv("OLMO_LAUNCH", raising=False)
    monkeypatch.setattr(watch, "CONFIRM_SECONDS", 0.02)
    with Lab(tmp_path, translate=lambda command: run_standin(command) + TRAINER) as lab:
        write_kubeconfig(tmp_path / "kubeconfig", lab.api.url)
        section = lab.profile.gke.model_dump(exclude_unset=True)
        path = tmp_path / "profile.yaml"
        path.write_text(yaml.safe_dump({"backend": "gke", "gke": section}))
        yield Shell(lab, path, capsys, monkeypatch)


def test_a_stage_by_hand_from_render_to_logs(shell):
    lab = shell.lab
    lab.cluster.held = True
    code, out, _ = shell("render")
    assert code == 0 and yaml.safe_load(out)["kind"] == "JobSet"
    assert not lab.api.requests

    name = yaml.safe_load(out)["metadata"]["name"]
    assert shell("status") == (0, "no JobSet, and no result yet\n", "")
    code, out, _ = shell("submit")
    told = (
        f"stage1_train: submitted JobSet {name} on n2-standard-16 (2 devices), from the beginning"
    )
    assert (code, out) == (0, f"{told}\n")
    assert shell("submit")[1] == f"stage1_train: attached to JobSet {name}\n"
    lab.until(lambda: lab.cluster.workload())
    code, out, _ = shell("status")
    assert code == 0 and re.fullmatch(r"queued: in the queue: .*; no checkpoint yet\n", out)

    assert shell("cancel") == (0, "deleted\n", "")
    assert shell("cancel") == (0, "there was no JobSet\n", "")
    code, out, err = shell("logs")
    assert (code, out) == (USER_ERROR, "") and "there are no logs under" in err

    lab.cluster.held = False
    code, out, _ = shell("resume-until-done")
    assert code == 0 and out.endswith("stage1_train: finished; 1 figures in result.json\n")
    assert shell("status")[1].startswith("finished: Completed; the stage's result is there")
    assert "finished before" in shell("submit")[1]
    code, out, _ = shell("logs")
    assert code == 0 and "Z step 20" in out and len(re.findall("^==> ", out, re.M)) == 1
    assert shell("logs", "--all")[1] == out  # the second host said nothing
    assert len(lab.leaders()) == 1


def test_a_replay_that_a_flow_started_is_seen_and_cancelled_by_hand(shell):
    lab = shell.lab
    lab.cluster.held = True
    flows = job_of("replay/stage1-380-20", "laptop", lab.root)
    watch.Launcher(flows, load_profile(str(shell.profile))).submit()
    lab.until(lambda: lab.cluster.workload())
    code, out, _ = shell("render", stage=flows.folder)
    assert code == 0 and "--window=stage1/380:20" in out
    code, out, _ = shell("status", stage=flows.folder)
    assert code == 0 and out.startswith("queued: in the queue")
    assert shell("submit", stage=flows.folder)[1].startswith(f"{flows.folder}: attached to JobSet")
    assert shell("cancel", stage=flows.folder) == (0, "deleted\n", "")


def test_a_stage_that_fails_ends_with_its_own_code_and_last_words(shell):
    shell.lab.kubelet.translate = lambda command: [
        *run_standin(command),
        *TRAINER,
        "--fail-at=7",
        f"--code={USER_ERROR}",
    ]
    code, _, err = shell("resume-until-done")
    assert code == USER_ERROR
    assert re.match(r"JobFailed: stage1_train: FailJobSetFailurePolicyAction: ", err)
    assert "    step 7\n" in err and "logs of every attempt: " in err


def test_preflight_is_one_table_and_fails_as_a_whole(shell):
    code, out, _ = shell("preflight")
    assert code == 1
    assert re.search(r"^ok    cluster +reachable, v1\.34", out, re.M)
    assert re.search(
        r"^FAIL  JobSet +not found: get deployments jobset-controller-manager$", out, re.M
    )
    assert re.search(r"^FAIL  queue +not found: get localqueues tpus$", out, re.M)
    assert re.search(r"^\d of 11 fail$", out, re.M)


def test_without_credentials(shell, tmp_path):
    shell.patch.setenv("KUBECONFIG", str(tmp_path / "none"))
    for verb in ("submit", "status", "cancel", "resume-until-done"):
        code, out, err = shell(verb)
        assert (code, out) == (USER_ERROR, "")
        assert re.match(rf"UserError: no usable Kubernetes credentials in {tmp_path}/none .*", err)
        assert "get-credentials" in err
    code, out, _ = shell("preflight")
    assert code == 1 and re.search(r"^FAIL  cluster +no usable Kubernetes credentials", out, re.M)
    assert re.search(r"^ok    run root", out, re.M)


def test_a_cluster_that_does_not_answer(shell, tmp_path):
    """By hand nobody waits for hours; the profile's own patience is for watches."""
    shell.patch.setattr(commands, "HAND_SECONDS", 0.2)
    shell.patch.setattr("olmo_core_jax.launch.gke.api.FIRST_DELAY", 0.1)
    write_kubeconfig(tmp_path / "kubeconfig", "http://127.0.0.1:9")
    for verb in ("submit", "status", "cancel"):
        code, out, err = shell(verb)
        assert code == CRASH and "trying again" in out
        assert re.match(r"Unreachable: get jobsets \S+: the Kubernetes API gave no answer for", err)
        assert "port=9" in err


def test_a_namespace_that_is_not_there(shell):
    shell.lab.api.fail(404, "create", "jobsets")
    code, _, err = shell("submit")
    assert code == USER_ERROR
    assert err == (
        "UserError: the cluster has no JobSet v1alpha2, or no namespace default: see infra/README.md\n"
    )


@pytest.mark.parametrize("verb", ["render", "submit", "status", "cancel", "preflight"])
@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ({"gke": {"shape": "v5p-256", "image": "i", "queu": "q"}}, "unknown key gke.queu"),
        ({"gke": {"shape": "v5p-257", "image": "i"}}, "gke: v5p-257: no slice has 257 cores"),
        ({"gke": {"shape": "v5p-256"}}, "gke.image: Field required"),
        ({}, "backend gke needs a `gke` section"),
        (None, "cannot be read: "),
    ],
    ids=["key", "shape", "missing", "section", "file"],
)
def test_wrong_profiles_are_named_with_their_field(shell, verb, profile, words):
    shell.profile.unlink()
    if profile is not None:
        shell.profile.write_text(yaml.safe_dump({"backend": "gke"} | profile))
    code, out, err = shell(verb)
    assert (code, out) == (USER_ERROR, "")
    assert err.startswith(f"UserError: launch profile {shell.profile}") and words in err
    assert not shell.lab.api.requests


@pytest.mark.parametrize("verb", ["render", "submit"])
def test_wrong_arguments_are_named(shell, verb, tmp_path):
    for changes, words in (
        ({"stage": "stage9"}, "unknown stage 'stage9': one of convert_weights, "),
        ({"recipe": "nothing"}, "nothing"),
        ({"run_root": "/somewhere/else"}, "on this machine's disk, which pods do not see"),
        (
            {"profile": None},
            "has no gke section: name one that has, with --profile or in OLMO_LAUNCH",
        ),
    ):
        code, out, err = shell(verb, **changes)
        assert (code, out) == (USER_ERROR, "") and words in err, changes
    assert not shell.lab.api.seen("create")
