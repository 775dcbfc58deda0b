"""Learning rates against the published run's values and OLMo-core's own schedulers."""

import itertools
import math

import pytest

from olmo_core_jax.errors import UserError
from olmo_core_jax.optim.schedules import check_schedule, joins, learning_rate, schedule_length
from olmo_core_jax.recipes.schema import (
    WSD,
    Checkpoints,
    Cosine,
    Data,
    HalfCosine,
    Linear,
    Segment,
    Stage,
    Stitched,
)

BATCH = 4_194_304  # 512 instances of 8192 tokens
DATA = Data(mix="mix.txt", base="data", sequence_length=8192, seed=34521)


def stage(schedule, max_tokens: int, batch: int = BATCH, stop_at: int | None = None) -> Stage:
    return Stage(
        data=DATA,
        batch_tokens=batch,
        max_tokens=max_tokens,
        stop_at=stop_at,
        schedule=schedule,
        checkpoints=Checkpoints(every=1000),
    )


def of_length(schedule, updates: int, stop_at: int | None = None) -> Stage:
    return stage(schedule, updates * BATCH, stop_at=stop_at)


def published(second_warmup: int = 597_046, first_end: int = 597_046, **more) -> Stage:
    """Stage 1 of the 7B run: a cosine of 5T tokens, then the second half of one of 7T."""
    five = Cosine(peak=3e-4, warmup=2000, max_tokens=5 * 10**12)
    seven = HalfCosine(peak=3e-4, warmup=second_warmup, max_tokens=7 * 10**12)
    segments = [
        Segment(until=first_end, schedule=five),
        Segment(until=1_413_814, schedule=seven),
    ]
    return stage(Stitched(segments=segments, **more), 7 * 10**12, stop_at=1_413_814)


def test_the_published_stitched_run():
    run = published()
    assert run.total_steps == 1_668_931
    assert schedule_length(run.schedule.segments[0].schedule, run) == 1_192_093
    expected = {
        1: 1.5e-7,
        1000: 1.5e-4,
        2000: 3e-4,
        100_000: 2.955077e-4,
        300_000: 2.603392e-4,
        500_000: 1.992075e-4,
        597_046: 1.650001782e-4,
        700_000: 1.447092e-4,
        1_000_000: 8.983408e-5,
        1_200_000: 6.064124e-5,
        1_413_814: 3.932527e-5,
    }
    for step, rate in expected.items():
        assert learning_rate(run, step) == pytest.approx(rate, rel=2e-7), step
    check_schedule(run, "stage1")
    (join,) = joins(run)
    assert join.step == 597_046
    assert join.before == pytest.approx(1.650001782e-4, rel=1e-9)
    assert join.after == pytest.approx(1.65e-4, rel=1e-9)
    assert abs(join.before - join.after) == pytest.approx(1.8e-10, rel=0.02)


def test_joining_at_the_step_that_part_2_names():
    """Its script loads step 596047, a thousand updates before part 1 ended: -0.38 %."""
    (join,) = joins(published(first_end=596_047))
    assert join.before == pytest.approx(1.65356e-4, rel=1e-5)
    assert join.after == pytest.approx(1.64724e-4, rel=1e-5)
    assert join.jump == pytest.approx(-0.0038, abs=5e-5)
    check_schedule(published(first_end=596_047))


def test_a_jump_at_a_join_is_refused_with_both_values_unless_allowed():
    early = published(first_end=500_000)
    with pytest.raises(UserError) as refused:
        check_schedule(early, "stage1")
    for part in ("update 500000", "0.00019920753", "0.00013818031", "allow_jump 1.00%"):
        assert part in str(refused.value)
    check_schedule(published(first_end=500_000, allow_jump=0.5))


def test_stage_2_is_47684_updates_down_to_exactly_zero():
    peak = 0.00020712352850360292
    run = stage(Linear(peak=peak), 100_000_000_000, batch=2_097_152)
    assert run.total_steps == 47_684
    assert learning_rate(run, 1) == pytest.approx(2.0711918e-4, rel=1e-7)
    assert learning_rate(run, 47_683) == pytest.approx(4.34e-9, rel=1e-2)
    assert learning_rate(run, 47_684) == 0.0
    check_schedule(run)


def test_stage_3_warms_up_from_zero():
    peak = 0.00020712352850360292
    run = stage(Linear(peak=peak, warmup=200), 50_000_000_000)
    assert run.total_steps == 11_921
    assert learning_rate(run, 1) == pytest.approx(1.0356e-6, rel=1e-4)
    assert learning_rate(run, 200) == peak
    assert learning_rate(run, 11_921) == 0.0


def test_wsd_boundaries():
    run = of_length(WSD(peak=1e-3, warmup=0, decay=30, alpha_f=0.1), 100)
    rates = [learning_rate(run, n) for n in range(0, 101)]
    assert rates[0] == rates[1] == 1e-3, "no warm-up starts at the peak"
    assert rates[:71] == [1e-3] * 71
    assert all(a > b for a, b in itertools.pairwise(rates[70:]))
    assert rates[100] == 1e-4
    assert learning_rate(run, 200) == 1e-4, "past the end it stays at the floor"
    warm = of_length(WSD(peak=1e-3, warmup=10, decay=90), 100)
    assert [learning_rate(warm, n) for n in (1, 5, 10)] == [1e-4, 5e-4, 1e-3]
    check_schedule(warm)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (WSD(peak=1e-3, warmup=50, decay=60), r"warmup 50 \+ decay 60 is longer than .* 100"),
        (WSD(peak=1e-3, warmup=0, decay=101), "decay 101 is longer"),
        (Cosine(peak=1e-3, warmup=101), "warmup 101 is longer"),
        (Linear(peak=1e-3, max_tokens=50 * BATCH), "over at update 50, the run at 100"),
    ],
)
def test_impossible_phases_are_refused(schedule, message):
    with pytest.raises(UserError, match=message):
        check_schedule(of_length(schedule, 100), "stage1")


def test_segments_must_be_in_order_and_reach_the_end():
    def stitched(*ends):
        parts = [Segment(until=e, schedule=Linear(peak=1e-3, alpha_f=1.0)) for e in ends]
        return of_length(Stitched(segments=parts), 100)

    check_schedule(stitched(50, 100))
    with pytest.raises(UserError, match=r"\[60, 60\]"):
        check_schedule(stitched(60, 60))
    with pytest.raises(UserError, match="end at 90, the stage at 100"):
        check_schedule(stitched(50, 90))


def test_a_segment_rules_up_to_its_last_update():
    low, high = (
        Segment(until=u, schedule=Linear(peak=p, alpha_f=1.0)) for u, p in ((50, 1e-4), (100, 1e-3))
    )
    run = of_length(Stitched(segments=[low, high], allow_jump=math.inf), 100)
    assert [learning_rate(run, n) for n in (49, 50, 51, 100)] == [1e-4, 1e-4, 1e-3, 1e-3]
    check_schedule(run)


@pytest.mark.reference
@pytest.mark.parametrize("warmup", [0, 7, 40])
def test_every_update_equals_olmo_core(warmup):
    theirs = pytest.importorskip("olmo_core.optim")
    peak, T = 3.3e-4, 100
    pairs = [
        (Cosine(peak=peak, warmup=warmup), theirs.CosWithWarmup(warmup=warmup)),
        (HalfCosine(peak=peak, warmup=warmup), theirs.HalfCosWithWarmup(warmup=warmup)),
        (
            Linear(peak=peak, warmup=warmup, alpha_f=0.25),
            theirs.LinearWithWarmup(warmup=warmup, alpha_f=0.25),
        ),
        (
            WSD(peak=peak, warmup=warmup, decay=30),
            theirs.WSD(warmup=warmup, decay=30, decay_fraction=None),
        ),
    ]
    for ours, scheduler in pairs:
        last = T if isinstance(ours, WSD) else T + 20  # OLMo-core's WSD goes below zero past T
        for step in range(1, last + 1):
            expected = scheduler.get_lr(peak, step, T)
            actual = learning_rate(of_length(ours, T), step)
            assert actual == pytest.approx(expected, rel=1e-13, abs=1e-19), (ours.kind, step)
