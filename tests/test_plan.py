"""`olmo-jax plan` against figures that were published or follow by hand."""

import json
import subprocess
import sys

import pytest

from olmo_core_jax import recipes
from olmo_core_jax.errors import UserError
from olmo_core_jax.plan import Assumptions, plan


@pytest.fixture(scope="module")
def seven():
    return plan(recipes.load_recipe("olmo3_7b"), Assumptions("v5p-256", mfu=0.5, price=2.0))


def test_updates_and_tokens_of_the_published_run(seven):
    assert [s.updates for s in seven] == [1_413_814, 47_684]
    assert seven[0].tokens == 5_929_965_715_456


def test_learning_rates_and_join_of_the_published_run(seven):
    rates = seven[0].learning_rates
    assert rates[597_046] == pytest.approx(1.650001782e-4, rel=1e-9)
    assert rates[1_413_814] == pytest.approx(3.932527e-5, rel=1e-6)
    (join,) = seven[0].joins
    assert join["before"] - join["after"] == pytest.approx(1.8e-10, rel=0.02)
    assert seven[1].learning_rates[47_684] == 0.0


def test_time_and_money_follow_from_peak_and_mfu(seven):
    seconds = seven[1].flops / (128 * 459e12 * 0.5)
    assert seven[1].days == pytest.approx(seconds / 86400)
    assert seven[1].chip_hours == pytest.approx(seconds / 3600 * 128)
    assert seven[1].cost == pytest.approx(2 * seven[1].chip_hours)
    assert seven[0].checkpoint_gib == pytest.approx(7_298_617_344 * 12 / 2**30)


def test_bad_input_is_named():
    recipe = recipes.load_recipe("laptop")
    with pytest.raises(UserError, match="--mfu 40"):
        Assumptions("v5p-256", mfu=40)
    for price in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="--price"):
            Assumptions("v5p-256", price=price)
    assert [s.cost for s in plan(recipe, Assumptions("v5p-256", price=0.0))] == [0.0, 0.0]
    for none in ("", "v5p-"):
        with pytest.raises(UserError, match=r"choose|customary"):
            Assumptions(none)
    with pytest.raises(UserError, match="v9"):
        Assumptions("v9-16")


def test_the_command_imports_no_jax_and_prints_json():
    code = (
        "import sys; from olmo_core_jax.cli import app\n"
        "try: app(['plan', '--recipe', 'laptop', '--json'])\n"
        "except SystemExit: pass\n"
        "assert not {'jax', 'torch'} & set(sys.modules), 'a controller imports no framework'"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [s["updates"] for s in json.loads(out.stdout)] == [400, 120]
