import time

import jax
import pytest
from processes import run_python

from olmo_core_jax import recipes
from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.topology import Mesh, Topology
from olmo_core_jax.recipes import schema
from olmo_core_jax.train import mesh as meshes

LAYOUT = """
import jax, numpy as np, sys
from olmo_core_jax import recipes
from olmo_core_jax.hardware.topology import Mesh, Topology
from olmo_core_jax.train import mesh as meshes
from olmo_core_jax.data.batch import Batch
"""


def stage(instances: int, sequence: int = 512) -> schema.Stage:
    return schema.Stage(
        data=schema.Data(mix="m", base="b", sequence_length=sequence, seed=0),
        batch_tokens=instances * sequence,
        max_tokens=10 * instances * sequence,
        schedule=schema.Linear(peak=1.0),
        checkpoints=schema.Checkpoints(every=5),
    )


class FakeMesh:
    """plan_batch looks at nothing but the sizes."""

    def __init__(self, **sizes):
        self.shape = {axis: sizes.get(axis, 1) for axis in meshes.AXES}


def plan(instances, topology=None, **sizes):
    return meshes.plan_batch(stage(instances), topology or Topology(), FakeMesh(**sizes))


@pytest.mark.parametrize(
    "wanted, devices, sizes",
    [
        (Mesh(), 1, (1, 1, 1, 1)),
        (Mesh(), 128, (1, 128, 1, 1)),
        (Mesh(replica=2, tensor=4), 512, (2, 64, 4, 1)),
        (Mesh(replica=-1, fsdp=4, context=2), 16, (2, 4, 1, 2)),
    ],
)
def test_sizes(wanted, devices, sizes):
    assert meshes.mesh_sizes(wanted, devices) == sizes


@pytest.mark.parametrize("wanted", [Mesh(fsdp=3), Mesh(tensor=3), Mesh(replica=2, fsdp=2)])
def test_sizes_that_do_not_fit_are_refused_with_both_numbers(wanted):
    with pytest.raises(UserError, match="does not make the 8 devices"):
        meshes.mesh_sizes(wanted, 8)


@pytest.mark.parametrize(
    "topology, accumulation, per_device",
    [
        (Topology(), 1, 8),
        (Topology(accumulation=2), 2, 4),
        (Topology(per_device_batch=2), 4, 2),
        (Topology(accumulation=8, per_device_batch=1), 8, 1),
    ],
)
def test_the_global_batch_is_the_recipes_whatever_the_mesh(topology, accumulation, per_device):
    p = plan(512, topology, replica=2, fsdp=32, tensor=2, context=2)
    assert (p.ways, p.accumulation, p.per_device) == (64, accumulation, per_device)
    assert p.ways * p.accumulation * p.per_device == p.instances == 512


@pytest.mark.parametrize(
    "instances, devices, accumulation, per_device",
    [(512, 128, 1, 4), (512, 512, 1, 1), (256, 128, 1, 2), (1024, 128, 2, 4), (768, 128, 2, 3)],
)
def test_a_limit_of_memory_is_kept_by_any_batch_on_any_mesh(
    instances, devices, accumulation, per_device
):
    p = plan(instances, Topology(max_per_device_batch=4), fsdp=devices)
    assert (p.accumulation, p.per_device) == (accumulation, per_device)


def test_a_batch_that_cannot_be_shared_names_the_nearest_choices():
    with pytest.raises(UserError) as error:
        plan(12, fsdp=8)
    text = str(error.value)
    assert "12 instances (6144 tokens)" in text and "8 data-parallel devices" in text
    assert "use 6 of them" in text and "batch_tokens 4096 or 8192" in text
    with pytest.raises(UserError, match=r"use 4 or 6 of them"):
        plan(12, fsdp=5, tensor=2)  # 10 devices: 6 rows at a time could be had
    with pytest.raises(UserError, match=r"accumulation 5 does not divide the 8 .* use 4 or 8"):
        plan(64, Topology(accumulation=5), fsdp=8)
    with pytest.raises(UserError, match=r"per_device_batch 3 does not divide the 8 .* use 2 or 4"):
        plan(64, Topology(per_device_batch=3), fsdp=8)
    with pytest.raises(UserError, match="accumulation 2 x per_device_batch 2 is not the 8"):
        plan(64, Topology(accumulation=2, per_device_batch=2), fsdp=8)


def test_a_huge_batch_is_planned_at_once():
    began = time.monotonic()
    p = plan(100_000_000_000, Topology(max_per_device_batch=6), fsdp=8)
    assert (p.accumulation, p.per_device) == (2_500_000_000, 5)
    assert time.monotonic() - began < 5
    for total in (1, 2, 12, 36, 97):
        assert meshes._divisors(total) == [d for d in range(1, total + 1) if total % d == 0]


def test_one_device_is_a_mesh_like_any_other():
    mesh = meshes.make_mesh(Mesh(), jax.devices()[:1])
    model = recipes.load_recipe("laptop").model
    shardings = jax.tree.leaves(meshes.state_shardings(mesh, model))
    assert all(s.mesh == mesh and s.is_fully_replicated for s in shardings)
    assert meshes.local_rows(mesh, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_moments_lie_where_parameters_lie_and_take_an_equal_share():
    code = (
        LAYOUT
        + """
model = recipes.load_recipe("olmo3_7b").model
mesh = meshes.make_mesh(Mesh(replica=2, fsdp=2, context=2))
state = meshes.state_shardings(mesh, model)
assert state.opt.mu == state.params == state.opt.nu
shapes = meshes.abstract_params(model)
share = jax.tree.map(lambda s, x: np.prod(s.shard_shape(x.shape)) / x.size, state.params, shapes)
matrices = [s for s, x in zip(jax.tree.leaves(share), jax.tree.leaves(shapes)) if x.size > 10**6]
assert set(matrices) == {1 / 4}, matrices
mesh = meshes.make_mesh(Mesh(fsdp=2, tensor=4))
share = jax.tree.map(
    lambda s, x: np.prod(s.shard_shape(x.shape)) / x.size,
    meshes.param_shardings(mesh, model), shapes)
matrices = [s for s, x in zip(jax.tree.leaves(share), jax.tree.leaves(shapes)) if x.size > 10**6]
assert set(matrices) == {1 / 8}, matrices
"""
    )
    run_python(code, devices=8)


def test_rows_reach_their_devices():
    code = (
        LAYOUT
        + """
for sizes in (Mesh(), Mesh(replica=2), Mesh(tensor=2), Mesh(fsdp=2, context=4)):
    mesh = meshes.make_mesh(sizes)
    rows = meshes.local_rows(mesh, 16)
    tokens = np.arange(16 * 4, dtype=np.int32).reshape(16, 4)
    mask = np.arange(16) % 3 == 0
    batch = meshes.global_batch(mesh, 16, rows, Batch(tokens[rows], mask[rows]))
    assert (np.asarray(batch.tokens) == tokens).all()
    assert (np.asarray(batch.instance_mask) == mask).all()
    ways = mesh.shape["replica"] * mesh.shape["fsdp"]
    assert batch.tokens.sharding.shard_shape((16, 4)) == (16 // ways, 4)
"""
    )
    run_python(code, devices=8)


def test_a_dimension_that_does_not_divide_stays_whole():
    code = (
        LAYOUT
        + """
model = recipes.load_recipe("laptop").model.model_copy(update={"d_model": 20})
mesh = meshes.make_mesh(Mesh(fsdp=8))
assert meshes.param_shardings(mesh, model)["embed"]["weight"].is_fully_replicated
"""
    )
    assert "'embed' of 20 is split over (), not ('fsdp', 'context')" in run_python(code, devices=8)
