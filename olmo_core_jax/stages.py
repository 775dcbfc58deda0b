"""Every stage of a run, named once: its folder, its job, what has to be finished before it, what its card says.

A new stage is a row here, a job under jobs/ and a step of the flow. Whoever writes or reads a stage's folder asks this
module for its name.
"""

import re
from dataclasses import dataclass

from olmo_core_jax.errors import UserError


@dataclass(frozen=True)
class Stage:
    """name: folder under the run root; module: what `python -m` runs, under olmo_core_jax.

    upstream: stages that have to be finished before; a training stage starts from checkpoint 0 of the first of them.
    flags: the job's own, where one job serves several stages. part: for a stage that runs several times, the form of
    its subfolders, whose groups fill the flags: `eval_landmarks/100` runs with `--step=100`; usage: that form for people.
    distributed: may several processes share the job? text: a sentence for the card and for `olmo-jax --help`.
    """

    name: str
    module: str
    text: str
    upstream: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    part: str = ""
    usage: str = ""
    distributed: bool = False

    @property
    def verb(self) -> str:
        """The command of `olmo-jax` that runs its job."""
        return self.module.removesuffix(".job").rpartition(".")[2].replace("_", "-")


_TRAIN = "One training stage: the recipe's updates on the reference's batches."

PIPELINE = (
    Stage(
        "convert_weights",
        "jobs.convert_weights",
        "The reference's step-0 weights, converted; their logits compared with its.",
    ),
    Stage(
        "build_index",
        "jobs.build_index",
        "Every token file indexed, and the order of the instances computed.",
    ),
    Stage(
        "stage1_train",
        "jobs.train",
        _TRAIN,
        upstream=("convert_weights", "build_index"),
        flags=("--stage=stage1",),
        distributed=True,
    ),
    Stage(
        "eval_landmarks",
        "jobs.evaluate",
        "One checkpoint compared with the reference's of the same update.",
        upstream=("stage1_train",),
        flags=("--stage={stage}", "--step={step}"),
        part=r"(?:(?P<stage>stage\d+)-)?(?P<step>\d+)",
        usage="STEP",
        distributed=True,
    ),
    Stage(
        "warm_adam",
        "jobs.warm_adam",
        "Stage 1's end made the start of stage 2: what goes on, and what begins again.",
        upstream=("stage1_train",),
    ),
    Stage(
        "stage2_train",
        "jobs.train",
        _TRAIN,
        upstream=("warm_adam", "build_index"),
        flags=("--stage=stage2",),
        distributed=True,
    ),
    Stage(
        "final_eval",
        "jobs.evaluate",
        "The whole run compared with the reference, with a verdict for every check.",
        upstream=("stage1_train", "stage2_train"),
        flags=("--final",),
        distributed=True,
    ),
)
"""The stages of flows/reproduce.py in order."""

EXPERIMENTS = (
    Stage(
        "replay",
        "experiments.replay.job",
        "One window of a reference run, from its own checkpoints.",
        upstream=("build_index",),
        flags=("--window={stage}/{first}:{updates}",),
        part=r"(?P<stage>\w+)-(?P<first>\d+)-(?P<updates>\d+)",
        usage="STAGE-N-K",
        distributed=True,
    ),
)
"""Stages of other flows."""

STAGES = {stage.name: stage for stage in (*PIPELINE, *EXPERIMENTS)}

FINAL, LANDMARKS, INDEX = "final_eval", "eval_landmarks", "build_index"


def stage_of(folder: str) -> Stage:
    """The stage of a folder (`stage1_train`, `eval_landmarks/100`). Raises UserError that lists the stages."""
    name, slash, part = folder.partition("/")
    stage = STAGES.get(name)
    if stage is None or not re.fullmatch(stage.part, part) or bool(slash) != bool(stage.part):
        known = (f"{s.name}/{s.usage}" if s.part else s.name for s in STAGES.values())
        raise UserError(f"unknown stage {folder!r}: one of {', '.join(known)}")
    return stage


def flags_of(folder: str) -> tuple[str, ...]:
    """The flags with which a stage's job writes this folder. Raises UserError that lists the stages."""
    stage = stage_of(folder)
    found = re.fullmatch(stage.part, folder.partition("/")[2])
    groups = found.groupdict("stage1") if found else {}
    return tuple(flag.format(**groups) for flag in stage.flags)


def train_folder(stage: str) -> str:
    """The folder of a training stage, `stage1` or `stage2`."""
    return f"{stage}_train"


def landmark_folder(step: int, stage: str = "stage1") -> str:
    """The folder of a checkpoint's evaluation."""
    return f"{LANDMARKS}/{'' if stage == 'stage1' else f'{stage}-'}{step}"


def replay_folder(window: str) -> str:
    """The folder of a replayed window, [STAGE/]N:K."""
    stage, _, updates = window.rpartition("/")
    return f"replay/{stage or 'stage1'}-{updates.replace(':', '-')}"
