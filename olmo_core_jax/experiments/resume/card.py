"""The card of flows/verify_resume.py: an interrupted run beside an unbroken one."""

from olmo_core_jax.experiments.resume.comparison import ResumeCheck
from olmo_core_jax.report.tables import Badge, Table


def check_table(found: ResumeCheck) -> Table:
    """What was compared, the largest difference, and where."""
    rows = [
        [metric, f"{size:.3g}", str(at) if at else "", _badge(size == 0)]
        for metric, (size, at) in found.largest.items()
    ]
    rows += [
        _counted("updates that one run lacks", found.missing),
        _counted("updates with other batches", found.other_batches),
        _counted(f"arrays that differ at the end, of {found.array_count}", found.arrays),
    ]
    return Table(["", "difference", "where", "verdict"], rows, texts=("where", "verdict"))


def summary(found: ResumeCheck) -> str:
    """One sentence for people."""
    verdict = "is the unbroken run, bit for bit" if found.same else "is NOT the unbroken run"
    return (
        f"The interrupted run {verdict}: {found.updates} updates in {found.attempts} attempts, "
        f"{found.repeated} of them made twice (largest difference {found.repeat_difference:.3f})."
    )


def draw(card, found: ResumeCheck) -> None:
    """Puts sentence and table on a Metaflow card."""
    from metaflow.cards import Markdown

    card.append(Markdown(f"# Verify resume\n\n{summary(found)}"))
    card.append(Markdown(check_table(found).markdown()))


def _badge(ok: bool) -> Badge:
    return Badge("pass" if ok else "FAIL")


def _counted(what: str, wrong: list) -> list[str]:
    shown = ", ".join(map(str, wrong[:5])) + (" …" if len(wrong) > 5 else "")
    return [what, str(len(wrong)), shown, _badge(not wrong)]
