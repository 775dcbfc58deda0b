"""Several faults of one input, told in one message."""

from olmo_core_jax.errors import UserError

SHOWN = 20
"""Faults that are spelled out; the rest is counted."""


def refuse(what: str, problems: list[str], remedy: str) -> None:
    """Raises UserError with all `problems` of `what`; does nothing where there is none."""
    if not problems:
        return
    shown = "".join(f"\n  - {p}" for p in problems[:SHOWN])
    more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    raise UserError(f"{what}: {len(problems)} problem(s); {remedy}{shown}{more}")
