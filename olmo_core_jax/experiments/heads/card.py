"""The card of flows/ablate_heads.py: two splits of attention into heads, side by side."""

from collections.abc import Mapping

from olmo_core_jax.compare import curves
from olmo_core_jax.experiments.heads.comparison import FAST, Ablation, Trained
from olmo_core_jax.report import vega
from olmo_core_jax.report.tables import Badge, Table, loss, number

DIFFERENCE, NONE = "difference", "no difference"

Costs = Mapping[str, float]
"""Parameters and FLOPs a token: the same for both arms, or the flow has not begun."""


def figure_table(found: Ablation, costs: Costs) -> Table:
    """A row a figure: both arms, and the ablated minus the baseline."""
    a, b = found.arms
    first, last = found.tail
    rows = [[what, number(value), number(value), "0"] for what, value in costs.items()]
    rows.append(
        _losses(f"CE loss, mean of updates {first:,} to {last:,}", *_means(found, first, last))
    )
    rows += [
        _losses(f"held-out CE loss, {domain}", a.heldout[domain], b.heldout[domain])
        for domain in sorted(a.heldout.keys() & b.heldout.keys())
    ]
    rows.append(["skipped updates", *map(str, (a.skipped, b.skipped, b.skipped - a.skipped))])
    rows.append(_speeds("tokens a second and device, median", found, 0.5))
    rows.append(_speeds("the same of the fastest tenth of updates", found, FAST))
    return Table(["", _title(a), _title(b), DIFFERENCE], rows)


def fairness_table(found: Ablation) -> Table:
    """What has to be the same for both arms, and how often it was not."""
    rows = [[what, str(n), Badge("FAIL" if n else "pass")] for what, n in found.unfair().items()]
    return Table(["has to be the same", "differ", "verdict"], rows, texts=("verdict",))


def summary(found: Ablation) -> str:
    """The comparison in a sentence or two, for people."""
    a, b = found.arms
    if not found.fair:
        wrong = ", ".join(f"{n} {what}" for what, n in found.unfair().items() if n)
        return (
            f"NOT a fair comparison of {a.name} and {b.name}: {wrong or 'no first weights found'}."
        )
    first, last = found.tail
    gap = found.gap
    x, y = _means(found, first, last)
    return (
        f"{b.name} against {a.name} over {last:,} updates: CE loss {y:.4f} and {x:.4f} at the end "
        f"(mean of the last {last - first + 1}; difference {y - x:+.4f}), largest difference "
        f"{number(gap.largest)} at update {gap.at:,}; {found.speed_ratio():.3f} times the tokens a "
        f"second (the fastest tenth of updates: {found.speed_ratio(FAST):.3f})."
    )


def draw(card, found: Ablation, costs: Costs) -> None:
    """Puts sentence, charts and tables on a Metaflow card."""
    from metaflow.cards import Markdown, VegaChart

    card.append(Markdown(f"# Head-dimension ablation\n\n{summary(found)}"))
    card.append(Markdown(figure_table(found, costs).markdown()))
    card.extend([VegaChart(chart) for chart in charts(found)])
    card.append(
        Markdown(
            f"{fairness_table(found).markdown()}\n\nThe difference is that of one seed: how large it would be "
            "between two seeds of the same arm, a second run with another weights.init_seed says."
        )
    )


def charts(found: Ablation) -> list[dict]:
    """Both loss curves, their difference, and the speed of each, by update."""
    a, b = found.arms
    colours = {
        _title(a): vega.COLOURS["reference"],
        _title(b): vega.COLOURS["this run"],
        DIFFERENCE: vega.COLOURS["this run"],
        NONE: vega.COLOURS[vega.NOISE],
    }

    def both(metric: str) -> vega.Lines:
        return {_title(arm): vega.curve(arm.rows, metric) for arm in found.arms}

    gap = found.gap
    level = {NONE: ([1, found.last_step], [0.0, 0.0]), DIFFERENCE: (gap.steps, gap.values)}
    return [
        vega.lines("CE loss", both(curves.CE), colours),
        vega.lines(f"CE loss, {b.name} minus {a.name}", level, colours),
        vega.lines("Tokens a second and device", both(curves.TPS), colours),
    ]


def _title(arm: Trained) -> str:
    heads, _, width = arm.name.partition("x")
    return f"{heads} heads of {width}"


def _means(found: Ablation, first: int, last: int) -> list[float]:
    return [arm.mean(curves.CE, first, last) for arm in found.arms]


def _losses(what: str, a: float, b: float) -> list[str]:
    return [what, loss(a), loss(b), f"{b - a:+.6f}"]


def _speeds(what: str, found: Ablation, share: float) -> list[str]:
    a, b = (arm.speed(share) for arm in found.arms)
    if a != a or b != b:
        return [what, "–", "–", "–"]
    return [what, f"{a:,.0f}", f"{b:,.0f}", f"× {found.speed_ratio(share):.3f}"]
