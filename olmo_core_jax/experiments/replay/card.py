"""The card of flows/replay.py: one row a window."""

from collections.abc import Mapping

from olmo_core_jax.report.tables import Badge, Table, number

Figures = Mapping[str, Mapping[str, float]]
"""Window -> figures of its job (experiments/replay/job.py)."""

COLUMNS = {
    "updates": "updates",
    "CE": "CE difference, largest",
    "gradient norm": "gradient norm, largest relative difference",
    "against fp64": "gradient norm against fp64, largest relative difference",
    "LR": "LR, largest relative difference",
    "Adam count": "Adam count",
    "theirs": "Adam count (reference)",
    "weights": "params at the end, relative difference",
    "mu": "mu at the end, relative difference",
    "nu": "nu at the end, relative difference",
}


def window_table(figures: Figures) -> Table:
    """Largest differences of every window; norms, rates and tensors relative, losses in nats."""
    rows = [
        [
            window,
            *(number(found.get(name)) for name in COLUMNS.values()),
            f"{number(found.get('skipped here'))} / {number(found.get('skipped there'))}",
            Badge("pass" if found.get("passed") else "FAIL"),
        ]
        for window, found in figures.items()
    ]
    return Table(["window", *COLUMNS, "skipped", "verdict"], rows, texts=("skipped", "verdict"))


def draw(card, figures: Figures) -> None:
    """Puts the table on a Metaflow card."""
    from metaflow.cards import Markdown

    failed = [window for window, found in figures.items() if not found.get("passed")]
    verdict = (
        "Every window is the same run." if not failed else f"Not the same run: {', '.join(failed)}."
    )
    card.append(Markdown(f"# Replay\n\n{verdict}\n\nLargest differences of every window:"))
    card.append(Markdown(window_table(figures).markdown()))
