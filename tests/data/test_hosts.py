"""Real processes as hosts: whatever their number and workers, each update is the same rows."""

import subprocess
import sys

import numpy as np
import pytest
from mixes import make_recipe

from olmo_core_jax import recipes
from olmo_core_jax.data.stage_data import build_stage_data

HOST = """
import sys
import numpy as np
from olmo_core_jax import recipes
from olmo_core_jax.data.loader import Loader
from olmo_core_jax.data.stage_data import open_stage_data

if __name__ == "__main__":
    folder, recipe, out = sys.argv[1:4]
    host, hosts, workers, first, last = map(int, sys.argv[4:])
    section = recipes.load_recipe(recipe).stage1
    index, order = open_stage_data(folder, section)
    mine = np.split(np.arange(section.batch_instances), hosts)[host]
    options = dict(first_step=first, last_step=last, rows=mine, workers=workers)
    with Loader(index, order, **options) as loader:
        read = [(ids, batch.tokens) for _, ids, batch in loader]
    np.savez(out, ids=[i for i, _ in read], tokens=[t for _, t in read])
"""


@pytest.fixture
def hosts(make_mix, tmp_path):
    """hosts(count, workers, first, last) -> ids [updates, B], tokens [updates, B, S]."""
    recipe = make_recipe(make_mix(), batch=8, updates=24, epochs=2)
    (tmp_path / "recipe.yaml").write_text(recipes.dump_recipe(recipe))
    (tmp_path / "host.py").write_text(HOST)
    _, order = build_stage_data(str(tmp_path / "index"), recipe, "stage1")

    def run(count: int, workers: int, first: int, last: int):
        outs = [tmp_path / f"{count}-{workers}-{first}-{h}.npz" for h in range(count)]
        common = [sys.executable, "host.py", str(tmp_path / "index"), "recipe.yaml"]
        running = [
            subprocess.Popen(
                [*common, str(out), *map(str, (h, count, workers, first, last))], cwd=tmp_path
            )
            for h, out in enumerate(outs)
        ]
        assert [p.wait(timeout=120) for p in running] == [0] * count
        parts = [np.load(out) for out in outs]
        return tuple(np.concatenate([p[k] for p in parts], axis=1) for k in ("ids", "tokens"))

    return run, order


@pytest.mark.slow
def test_hosts_and_workers_change_nothing(hosts):
    run, order = hosts
    ids, tokens = run(1, 0, 1, 24)
    assert np.array_equal(ids, [order.batch(s) for s in range(1, 25)])
    for count, workers, first in ((2, 0, 1), (4, 1, 1), (1, 2, 7), (2, 1, 14), (4, 0, 24)):
        other_ids, other_tokens = run(count, workers, first, 24)
        assert np.array_equal(other_ids, ids[first - 1 :])
        assert np.array_equal(other_tokens, tokens[first - 1 :])
