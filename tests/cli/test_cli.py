"""`olmo-jax` with options that cannot be: one message that names the option, exit code 2, no traceback."""

import re
import sys

import pytest

from olmo_core_jax import cli
from olmo_core_jax.errors import USER_ERROR


@pytest.fixture
def refused(monkeypatch, capsys):
    """Types a command that has to be refused; gives what it says, on one line."""

    def type_in(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["olmo-jax", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        plain = re.sub(r"\x1b\[[0-9;]*m|│", "", capsys.readouterr().err)
        said = " ".join(plain.split())
        assert end.value.code == USER_ERROR, said
        return said

    return type_in


@pytest.mark.parametrize("instances", ["0", "-1", "-8", "100000000000"])
def test_a_batch_that_cannot_be_is_refused(refused, instances):
    said = refused(
        "compile", "--recipe=laptop", "--hardware=v5p-8", f"--batch-instances={instances}"
    )
    assert "Invalid value for '--batch-instances'" in said


@pytest.mark.parametrize("more", [[], ["--batch-instances=8"]])
def test_a_missing_stage_is_told_before_a_compiler_is_looked_for(refused, more):
    said = refused(
        "compile", "--recipe=olmo3_7b_stage3", "--hardware=h200", "--stage=stage2", *more
    )
    assert said == "UserError: recipe olmo3_7b_stage3 has no training stage 'stage2', only stage1"


@pytest.mark.parametrize("root", ["", " "])
def test_an_empty_run_root_is_refused(refused, root):
    verbs = [["data", verb, root] for verb in ("audit", "preflight")]
    verbs += [["data", "where", root, "--step=1"], ["report", root], ["logs", "--stage=x"]]
    verbs += [
        [v, "--recipe=laptop", "--stage=stage1_train"] for v in ("render", "status", "cancel")
    ]
    for verb in verbs:
        arguments = verb if root in verb else [*verb, f"--run-root={root}"]
        assert "run-root (or RUN_ROOT) is empty" in refused(*arguments)


@pytest.mark.parametrize("more", [[], ["--replay=600:20"]])
def test_a_plan_for_no_hardware_or_a_negative_price(refused, more):
    for option in ("--hardware=", "--hardware=v5p-04x4x4"):
        assert "v5p-" in refused("plan", "--recipe=olmo3_7b", option, *more)
    assert "--price -1.0" in refused("plan", "--recipe=olmo3_7b", "--price=-1", *more)


def test_a_flows_output_may_be_left_out_but_not_be_blank():
    pytest.importorskip("metaflow")
    from olmo_core_jax.launch.flow_entry import StageError, plan

    assert plan("laptop", "", "7").run_root.endswith("/runs/laptop-7")
    with pytest.raises(StageError, match="--output is blank"):
        plan("laptop", "  ", "7")


@pytest.mark.parametrize("verb", cli._JOBS)
def test_every_job_is_a_verb_with_its_own_arguments(monkeypatch, capsys, verb):
    """The module that a verb names is there, and its parser answers."""
    left = []
    monkeypatch.setattr("olmo_core_jax.jobs.common.leave", left.append)
    monkeypatch.setattr(sys, "argv", ["olmo-jax", verb, "--help"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0 and not left
    assert "--run-root" in capsys.readouterr().out
