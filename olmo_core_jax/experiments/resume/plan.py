"""Planned interruptions: how a resume is put to the test where it has to hold, on the real hardware.

A plan is `7:term,13:kill,20:save`: the first attempt gets SIGTERM in update 7, the second one SIGKILL
in update 13, the third one SIGKILL while checkpoint 20 is being written; later attempts run through.
"""

import os
import signal
from dataclasses import dataclass
from typing import Literal

from olmo_core_jax.errors import UserError

KINDS = ("term", "kill", "save")


@dataclass(frozen=True)
class Interruption:
    """What happens to one attempt, and at which update."""

    step: int
    kind: str

    def strike(self, step: int, moment: Literal["update", "save"]) -> None:
        """Ends this process, or tells it to end, if that is planned for this moment."""
        if step == self.step and moment == ("save" if self.kind == "save" else "update"):
            os.kill(os.getpid(), signal.SIGTERM if self.kind == "term" else signal.SIGKILL)


def parse_plan(text: str) -> list[Interruption]:
    """The plan of a text, empty for an empty one. Raises UserError that names what is wrong."""
    plan = []
    for part in filter(None, text.split(",")):
        step, _, kind = part.strip().partition(":")
        if not step.isdigit() or kind not in KINDS:
            raise UserError(
                f"interruption {part!r}: write UPDATE:KIND, KIND one of {', '.join(KINDS)}"
            )
        plan.append(Interruption(int(step), kind))
    steps = [1, *(i.step for i in plan)]
    # The next attempt begins after the update that ended this one, or further back: only a later
    # update is sure to lie ahead of it. Before update 1 there is none that a resume could lose.
    if steps != sorted(set(steps)):
        raise UserError(f"interruptions {text!r}: updates have to grow, from 2 on")
    return plan


def of_attempt(text: str, attempt: int) -> Interruption | None:
    """What the plan holds for an attempt, which counts from 1."""
    plan = parse_plan(text)
    return plan[attempt - 1] if attempt <= len(plan) else None
