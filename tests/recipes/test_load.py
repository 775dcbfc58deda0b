"""Recipes: what is refused, with which words, and what a digest depends on."""

import math
import re
import shutil

import pytest
import yaml

from olmo_core_jax import recipes
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.weights import n_params
from olmo_core_jax.recipes.load import SHIPPED


@pytest.fixture
def laptop():
    return yaml.safe_load((SHIPPED / "laptop.yaml").read_text())


def write(folder, content):
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


@pytest.mark.parametrize("name", recipes.shipped_recipes())
def test_shipped_recipes_load(name):
    assert recipes.load_recipe(name).name == name


def test_unknown_recipe_lists_the_known_ones():
    with pytest.raises(UserError, match=r"unknown recipe 'nope'.*laptop"):
        recipes.load_recipe("nope")


def test_a_stage_that_a_recipe_lacks_is_the_users_mistake():
    recipe = recipes.load_recipe("olmo3_7b_stage3")
    assert recipe.stages() == ["stage1"]
    for name in ("stage2", "stage9", "name"):
        with pytest.raises(UserError, match=f"no training stage '{name}', only stage1"):
            recipe.stage(name)


@pytest.mark.parametrize("name", recipes.shipped_recipes())
def test_what_shipped_recipes_name_is_there(name):
    assert recipes.missing_files(recipes.load_recipe(name)) == []


def set_in(content, dotted, value):
    *path, last = dotted.split(".")
    for key in path:
        content = content[key]
    content[last] = value


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("stage1.batch_tokns", 5, "unknown key stage1.batch_tokns"),
        ("stage1.batch_tokens", "many", "stage1.batch_tokens: Input should be a valid integer"),
        ("stage1.batch_tokens", 1000, "batch_tokens 1000 is not a multiple of sequence_length 128"),
        ("model.n_layers", 9, "n_layers 9 is not a multiple of the pattern's length 4"),
        ("model.pattern", [32, 0, 32, -1], "windows are positive, or -1"),
        ("model.head_dim", 15, "head_dim 15 must be even"),
        ("tokenizer.eos_id", 5000, "tokenizer.eos_id 5000 is outside the vocabulary"),
        ("stage1.checkpoints.landmarks", [500], "lie after the last update 400"),
        ("stage1.stop_at", 600, "stop_at 600 is after T = 489"),
        ("stage1.schedule", {"kind": "triangle"}, "stage1.schedule: .*'triangle'"),
        ("precision", {"moments": "bfloat16"}, "set i_accept_low_precision_state"),
    ],
)
def test_bad_fields_are_named(tmp_path, laptop, field, value, said):
    set_in(laptop, field, value)
    with pytest.raises(UserError, match=said) as e:
        recipes.load_recipe(write(tmp_path, laptop))
    assert "mine.yaml" in str(e.value)


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("model.pattern", [[]]),
        ("model.rope_theta", [0.0, -1.0, 1.0, math.inf]),
        ("model.norm_eps", [0.0, math.nan]),
        ("model.init_std", [0.0, -0.02, math.inf]),
        ("model.rope_scaling.factor", [0.0, -8.0]),
        ("model.rope_scaling.beta_fast", [0.0]),
        ("model.rope_scaling.beta_slow", [0.0]),
        ("model.rope_scaling.original_length", [0]),
        ("weights.init_seed", [-1, 2**32, 2**64]),
        ("stage1.data.seed", [-1]),
        ("stage1.data.max_target_sequence_length", [0, -128]),
        ("stage1.data.repetition_filter.min_period", [0]),
        ("stage1.data.repetition_filter.max_period", [0]),
        ("stage1.data.repetition_filter.max_count", [0]),
        ("stage1.schedule.peak", [0.0, math.inf, math.nan]),
        ("stage1.schedule.alpha_f", [-0.1, math.inf]),
        ("stage1.schedule.max_tokens", [0, -5]),
        ("stage1.optimizer.beta1", [-0.1, 1.0]),
        ("stage1.optimizer.beta2", [-0.1, 1.0]),
        ("stage1.optimizer.eps", [-1e-8, math.nan]),
        ("stage1.optimizer.weight_decay", [-0.1]),
        ("stage1.optimizer.embedding_weight_decay", [-0.1]),
        ("stage1.optimizer.clip_norm", [0.0, -1.0, math.inf]),
        ("stage1.checkpoints.landmarks", [[0], [100, -1]]),
        ("evaluation.limit", [0, -1]),
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path, laptop, field, values):
    laptop["model"]["rope_scaling"] = {}
    laptop["stage1"]["data"]["repetition_filter"] = {}
    laptop["stage1"].setdefault("optimizer", {})
    recipes.load_recipe(write(tmp_path, laptop))
    for value in values:
        set_in(laptop, field, value)
        with pytest.raises(UserError) as e:
            recipes.load_recipe(write(tmp_path, laptop))
        section, name = map(re.escape, field.rpartition(".")[::2])
        # A schedule's field is named with its kind, too: stage1.schedule.cosine.peak.
        said = rf"mine\.yaml: {section}(\.\w+)?\.{name}(\.\d)?: (Input|List) should"
        assert re.search(said, str(e.value)), str(e.value)


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        ("cosine", 0),
        ("half_cosine", 0),
        ("linear", -1),
        ("wsd", 0),
        ("stitched", -0.01),
        ("stitched", math.nan),
    ],
)
def test_every_kind_of_schedule_refuses_what_cannot_be(tmp_path, laptop, kind, bad):
    laptop["stage1"]["schedule"] = one = {"kind": kind, "peak": 0.1, "warmup": 2}
    if kind == "wsd":
        one["decay"] = 5
    if kind == "stitched":
        parts = [one | {"kind": "linear"} for _ in range(2)]
        segments = [{"until": n, "schedule": p} for n, p in zip((200, 400), parts, strict=True)]
        laptop["stage1"]["schedule"] = {"kind": kind, "segments": segments}
        for any_jump in (0.01, math.inf):
            laptop["stage1"]["schedule"]["allow_jump"] = any_jump
            recipes.load_recipe(write(tmp_path, laptop))
        laptop["stage1"]["schedule"]["allow_jump"] = bad
    else:
        recipes.load_recipe(write(tmp_path, laptop))
        one["max_tokens"] = int(bad)
    with pytest.raises(UserError, match=r"stage1\.schedule.*(max_tokens|allow_jump): Input"):
        recipes.load_recipe(write(tmp_path, laptop))


def test_a_filter_needs_a_period(tmp_path, laptop):
    laptop["stage1"]["data"]["repetition_filter"] = {"min_period": 14}
    with pytest.raises(UserError, match="repetition_filter: min_period 14 is above max_period 13"):
        recipes.load_recipe(write(tmp_path, laptop))


@pytest.mark.parametrize("text", ["- a\n- b", "a: [", "", "\x00"])
def test_files_that_are_no_recipe(tmp_path, text):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=r"x\.yaml"):
        recipes.load_recipe(str(tmp_path / "x.yaml"))


def test_a_key_given_twice_is_refused_with_its_line(tmp_path):
    path, text = tmp_path / "x.yaml", (SHIPPED / "laptop.yaml").read_text()
    path.write_text(text + "name: other\n")
    line = text.count("\n") + 1
    with pytest.raises(
        UserError, match=rf"x\.yaml .*line {line}, column 1: key 'name' is given twice"
    ):
        recipes.load_recipe(str(path))
    merged = "extends: laptop\nname: x\nstage1: &a {epochs: 1}\nstage2: {<<: *a, epochs: 2}\n"
    path.write_text(merged)  # what a merge brings along may be said again
    assert recipes.load_recipe(str(path)).stage2.epochs == 2
    for bad in ("a: 2024-99-99", "a: [" * 5000):
        path.write_text(bad)
        with pytest.raises(UserError, match=r"x\.yaml is not valid YAML: [^\n]*$"):
            recipes.load_recipe(str(path))


def test_paths_are_relative_to_the_file_and_names_stay_names(tmp_path, laptop):
    laptop["weights"]["hf"] = "hub:allenai/Olmo-3-1025-7B"
    laptop["stage1"]["data"]["mix"] = "OLMo-mix-0625-official"
    laptop["stage2"]["data"]["base"] = "gs://bucket/data"
    recipe = recipes.load_recipe(write(tmp_path, laptop))
    assert recipe.weights.hf == "hub:allenai/Olmo-3-1025-7B"
    assert recipe.stage1.data.mix == "OLMo-mix-0625-official"
    assert recipe.stage2.data.base == "gs://bucket/data"
    assert recipe.stage2.data.mix == str(tmp_path / "laptop/mixes/stage2.txt")


def test_digest_ignores_where_the_checkout_is_but_not_what_is_said(tmp_path, laptop):
    original = recipes.digest(recipes.load_recipe("laptop"))
    shutil.copy(SHIPPED / "laptop.yaml", tmp_path / "laptop.yaml")
    assert recipes.digest(recipes.load_recipe(str(tmp_path / "laptop.yaml"))) == original
    laptop["stage1"]["data"]["seed"] += 1
    assert recipes.digest(recipes.load_recipe(write(tmp_path, laptop))) != original


def test_a_dumped_recipe_is_the_same_recipe(tmp_path):
    recipe = recipes.load_recipe("laptop")
    (tmp_path / "copy.yaml").write_text(recipes.dump_recipe(recipe))
    assert recipes.load_recipe(str(tmp_path / "copy.yaml")) == recipe


def test_published_step_counts():
    """G6: tokens do not divide by the batch, so the last update is a started one."""
    seven = recipes.load_recipe("olmo3_7b")
    assert (seven.stage1.total_steps, seven.stage1.last_step) == (1_668_931, 1_413_814)
    assert seven.stage2.total_steps == 47_684


def test_extended_recipes_change_only_what_they_say(tmp_path, laptop):
    write(tmp_path, laptop)
    (tmp_path / "child.yaml").write_text(
        "extends: mine\nname: child\nstage1: {data: {seed: 7}, schedule: {kind: linear, peak: 0.5}}\n"
    )
    child, parent = (recipes.load_recipe(str(tmp_path / f"{n}.yaml")) for n in ("child", "mine"))
    assert child.stage1.data == parent.stage1.data.model_copy(update={"seed": 7})
    assert (child.stage1.schedule.kind, child.stage1.schedule.peak) == ("linear", 0.5)
    assert child.stage2 == parent.stage2


OLMO_CORE = {
    "olmo3_190m": "olmo3_190M",
    "olmo3_1b": "olmo3_1B",
    "olmo3_7b": "olmo3_7B",
    "olmo3_32b": "olmo3_32B",
}


@pytest.mark.reference
@pytest.mark.parametrize("name", OLMO_CORE)
def test_shapes_have_olmo_cores_parameter_counts(name):
    config = pytest.importorskip("olmo_core.nn.transformer").TransformerConfig
    model = recipes.load_recipe(name).model
    theirs = getattr(config, OLMO_CORE[name])(vocab_size=model.padded_vocab_size)
    assert n_params(model) == theirs.num_params


def test_parameters_of_7b():
    assert n_params(recipes.load_recipe("olmo3_7b").model) == 7_298_617_344


def test_a_recipe_extends_a_shipped_one_from_any_folder(tmp_path, laptop):
    (tmp_path / "mine.yaml").write_text(
        "extends: laptop\nname: mine\nevaluation: {heldout: {code: my/code.npy}}\n"
    )
    mine, shipped = recipes.load_recipe(str(tmp_path / "mine.yaml")), recipes.load_recipe("laptop")
    assert mine.stage1 == shipped.stage1, "its paths stay relative to its own folder"
    own = {"code": str(tmp_path.resolve() / "my/code.npy")}
    assert mine.evaluation.heldout == shipped.evaluation.heldout | own
    laptop["stage1"]["data"]["seed"] = 5
    (tmp_path / "laptop.yaml").write_text(yaml.safe_dump(laptop))
    beside = recipes.load_recipe(str(tmp_path / "mine.yaml"))
    assert beside.stage1.data.seed == 5, "one in the same folder comes first"


def test_a_recipe_that_extends_itself_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: b\nname: a\n")
    (tmp_path / "b.yaml").write_text("extends: a\nname: b\n")
    with pytest.raises(UserError, match=r"extends itself: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        recipes.load_recipe(str(tmp_path / "a.yaml"))
