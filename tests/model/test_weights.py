"""A weight of the model is named once, in model/weights.py: what else needs to know it asks there."""

import shutil
from pathlib import Path

import jax
import pytest
from helpers import tiny_model
from processes import run_python

import olmo_core_jax
from olmo_core_jax import recipes
from olmo_core_jax.model.olmo3 import abstract_params
from olmo_core_jax.model.tree import flatten
from olmo_core_jax.model.weights import leaves

ROW = (
    '    Weight("attn.blend", ("heads", "embed"), "self_attn.blend_proj", "attention.w_blend"),\n'
    '    Weight("mlp_norm"'
)
DECLARED = 'self.out = parameter("attn.out", cfg, rngs)'
USED = "return save(linear(a_BSHK.reshape(*q.shape)"
FOLLOWS = """
import jax, numpy as np
from jax.sharding import PartitionSpec
from pathlib import Path
from olmo_core_jax.checkpoint.formats import hf
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
from olmo_core_jax.checkpoint.formats.orbax_write import write_step
from olmo_core_jax.hardware.flops import n_matmul_params
from olmo_core_jax.hardware.topology import Mesh
from olmo_core_jax.model.olmo3 import init_params, logits
from olmo_core_jax.model.options import ModelOptions
from olmo_core_jax.model.tree import flatten
from olmo_core_jax.model.weights import n_params
from olmo_core_jax.recipes.schema import Model, Tokenizer
from olmo_core_jax.train.mesh import make_mesh, param_shardings

cfg = Model(n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, head_dim=8, mlp_hidden=24, vocab_size=60,
            padded_vocab_size=64, pattern=[8, -1])
params = init_params(cfg, 0)
blend = params["cycles"]["layer_0"]["attn"]["blend"]
assert blend.shape == (1, 32, 16) and float(abs(blend).max()) > 0
assert n_params(cfg) == sum(x.size for x in jax.tree.leaves(params))
plain = 2 * (2 * 16 * (32 + 16) + 3 * 16 * 24) + 64 * 16
assert n_matmul_params(cfg) == plain + 2 * 32 * 16

shardings = param_shardings(make_mesh(Mesh(fsdp=2, tensor=2)), cfg)
assert shardings["cycles"]["layer_1"]["attn"]["blend"].spec == PartitionSpec(None, "tensor", "fsdp")

tokens = np.arange(12, dtype=np.int32)[None]
slopes = jax.grad(lambda p: logits(p, tokens, cfg, ModelOptions()).var())(params)
assert float(abs(slopes["cycles"]["layer_1"]["attn"]["blend"]).max()) > 0

arrays = jax.tree.map(np.asarray, params)
write_step(str(Path("ours").resolve()), 0, {"params": arrays}, {"model": cfg.model_dump(mode="json")})
hf.export_hf(OrbaxStep(str(Path("ours/0").resolve())), cfg, Tokenizer(name="t", eos_id=1, pad_id=0), "hf", context=64)
found = hf.open_hf(str(Path("hf").resolve()), cfg)
assert "model.layers.1.self_attn.blend_proj.weight" in found.tensors.specs()
for path, lazy in flatten(hf.params_from_hf(found, "float32")):
    expected = arrays
    for key in path:
        expected = expected[key]
    assert np.array_equal(np.asarray(lazy), expected), path
"""


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def test_a_new_weight_touches_two_files(tmp_path, monkeypatch):
    package = tmp_path / "olmo_core_jax"
    ignored = shutil.ignore_patterns("laptop", "__pycache__")
    shutil.copytree(Path(olmo_core_jax.__file__).parent, package, ignore=ignored)
    edit(package / "model/weights.py", '    Weight("mlp_norm"', ROW)
    blend = DECLARED.replace("out", "blend")
    edit(package / "model/olmo3.py", DECLARED, f"{DECLARED}\n        {blend}")
    edit(
        package / "model/olmo3.py",
        USED,
        f"a_BSHK *= jax.nn.sigmoid(linear(x_BSD, self.blend[...])).reshape(a_BSHK.shape)\n        {USED}",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_python(
        "import olmo_core_jax, pathlib; assert pathlib.Path.cwd() in "
        "pathlib.Path(olmo_core_jax.__file__).parents" + FOLLOWS,
        devices=4,
    )


@pytest.mark.parametrize("name", ["laptop", "olmo3_7b", None])
def test_the_table_is_the_modules_parameters(name):
    model = recipes.load_recipe(name).model if name else tiny_model(n_kv_heads=1)
    built = {path: leaf.shape for path, leaf in flatten(abstract_params(model))}
    assert built == {leaf.path: leaf.shape for leaf in leaves(model)}
    assert len(jax.tree.leaves(abstract_params(model))) == len(leaves(model))
