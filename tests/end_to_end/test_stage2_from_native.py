"""Stage 2 from the state that OLMo-core itself left behind at stage 1's end: its weights, its moments, its Adam count."""

import jax
import pytest

from olmo_core_jax.compare import checks
from olmo_core_jax.compare.stage import read_stage
from olmo_core_jax.evaluate.weights import our_params, reference_params, weight_figures
from olmo_core_jax.hardware.topology import Mesh
from olmo_core_jax.launch.job import job_of
from olmo_core_jax.launch.profile import load_profile
from olmo_core_jax.launch.run import run
from olmo_core_jax.recipes import load_recipe
from olmo_core_jax.train.mesh import make_mesh


@pytest.mark.slow
def test_the_anneal_follows_the_reference(tmp_path, monkeypatch):
    monkeypatch.delenv("OLMO_LAUNCH", raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    recipe, root, profile = load_recipe("laptop"), str(tmp_path / "run"), load_profile()
    native = recipe.stage1.reference.native[recipe.stage1.last_step]
    warm = job_of("warm_adam", "laptop", root, f"--from-native={native}")
    before, after = (job_of(name, "laptop", root) for name in ("build_index", "stage2_train"))
    for stage in (before, warm, after):
        run(stage, profile)

    mesh, last = make_mesh(Mesh(), jax.devices()[:1]), recipe.stage2.last_step
    ours = our_params(f"{root}/stage2_train/checkpoints", last, recipe, mesh)
    theirs = reference_params(recipe.stage2.reference.hf[last], recipe, mesh)
    gaps = weight_figures(ours, theirs, recipe.model)
    figures = read_stage(recipe, root, "stage2").figures()
    figures |= {f"stage2/{name}": value for name, value in gaps.items()}
    for verdict in checks.verdicts(
        figures, [c for c in checks.checks_of(recipe) if c.figure.startswith("stage2")]
    ):
        print(f"{verdict.check.title}: {verdict.measured} ({verdict.word})")
        assert verdict.passed, verdict
    assert figures["stage2/updates compared"] == recipe.stage2.last_step == 120
