"""The real training step compiled for a described TPU topology or GPU, on a machine that has none.

The compiler is libtpu, or XLA's CUDA plugin. What comes out is what it decided: memory a device, matrix FLOPs with
recomputation, bytes that collectives move.
"""

import math
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from olmo_core_jax.compile import hlo
from olmo_core_jax.compile.gpu_target import target_of
from olmo_core_jax.errors import UserError
from olmo_core_jax.hardware.chips import GPU_MEMORY_SHARE, Chip
from olmo_core_jax.hardware.flops import attention_flops
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.model.weights import n_matmul_params
from olmo_core_jax.recipes.schema import Checkpoints, Linear, Recipe

GIB = 2**30


@dataclass(frozen=True)
class CompileReport:
    """Of one update on one device, unless a name says otherwise. Bytes in GiB, FLOPs as counts.

    temporaries are before XLA reuses them; peak is what the device needs; hbm what it has.
    recomputation: matrix FLOPs of the program over the model's own (attention kernels left out on both sides).
    intensity: all of the model's FLOPs per byte of peak memory touched once.
    """

    recipe: str
    stage: str
    devices: int
    device_kind: str
    instances: int
    accumulation: int
    arguments_gib: float
    outputs_gib: float
    temporaries_gib: float
    peak_gib: float
    hbm_gib: float
    matrix_flops: float
    model_matrix_flops: float
    model_attention_flops: float
    recomputation: float
    intensity: float
    collective_gib: dict[str, float]
    unknown_loops: int
    kernels: dict[str, int] = field(default_factory=dict)
    compile_seconds: float = 0.0

    @property
    def fits(self) -> bool:
        return self.peak_gib <= self.hbm_gib


def prepare(topology: Topology, dump: str) -> None:
    """The environment of a machine that compiles for accelerators but has none. Call it before JAX is imported.

    dump: an empty folder. XLA writes the optimised program there: `compiled.as_text()` fails on the asynchronous
    operations of large TPU programs (libtpu 0.0.52).
    """
    flags = [f"--xla_dump_to={dump}", "--xla_dump_hlo_as_text", *topology.xla_flags]
    if topology.platform == "cuda":
        # Where no device says what it has, XLA takes four fifths of its memory for all there is, and computes again
        # what it believes not to fit.
        flags.append(f"--xla_gpu_memory_limit_slop_factor={GPU_MEMORY_SHARE / 0.8:.0%}".rstrip("%"))
    os.environ.update(
        XLA_FLAGS=" ".join(flags),
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5p-8",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        LIBTPU_INIT_ARGS=" ".join(topology.libtpu_flags),
    )


def with_batch(recipe: Recipe, stage_name: str, instances: int) -> Recipe:
    """The recipe with another batch. Its schedule, which counts in batches, makes way for a constant: the program has no
    schedule in it."""
    section = recipe.stage(stage_name)
    batch = instances * section.data.sequence_length
    changes = {
        "batch_tokens": batch,
        "max_tokens": batch * 1000,
        "stop_at": None,
        "schedule": Linear(peak=1e-4, alpha_f=1.0),
        "checkpoints": Checkpoints(every=1000),
    }
    return recipe.model_copy(update={stage_name: section.model_copy(update=changes)})


def describe_devices(chip: Chip, platform: str | None, where: str):
    """Descriptions of a TPU topology's devices (`v5p:4x4x8`) or of GPUs (`1x1x8`: slices, nodes, GPUs a node).

    Raises UserError where the compiler is missing or refuses.
    """
    from jax.experimental import topologies

    if platform == "cuda":
        extra, options = "cuda", {"target_config": target_of(chip).text(), "topology": where}
    else:
        extra, options = "tpu", {"topology_name": where}
    try:
        return topologies.get_topology_desc(platform=extra, **options).devices
    except Exception as e:
        raise UserError(
            f"no compiler for {chip.name} {where} ({str(e).splitlines()[0]}); is it installed? "
            f"pip install -e '.[{extra}]'"
        ) from None


def usable_gib(chip: Chip, platform: str | None) -> float:
    """Memory that JAX has on one device, GiB: all of a TPU's, a share of a GPU's."""
    if platform == "cuda":
        return target_of(chip).memory * GPU_MEMORY_SHARE / GIB
    return chip.memory_per_device_gib


def compile_for(
    recipe: Recipe, stage: str, topology: Topology, chip: Chip, where: str
) -> CompileReport:
    """compile_stage on devices that are only described (`describe_devices`), environment included: for a process that has
    not used JAX yet."""
    with tempfile.TemporaryDirectory(prefix="olmo-compile-") as dump:
        prepare(topology, dump)
        devices = describe_devices(chip, topology.platform, where)
        hbm_gib = usable_gib(chip, topology.platform)
        return compile_stage(recipe, stage, topology, devices, hbm_gib, dump)


def compile_stage(
    recipe: Recipe, stage_name: str, topology: Topology, devices, hbm_gib: float, dump: str
) -> CompileReport:
    """Lowers and compiles one stage's update over `devices`. Raises UserError where the batch does not fit the mesh."""
    import jax

    from olmo_core_jax.train.mesh import make_mesh, plan_batch

    stage = recipe.stage(stage_name)
    mesh = make_mesh(topology.mesh, devices)
    batch = plan_batch(stage, topology, mesh)
    began = time.monotonic()
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        compiled = _lower(recipe, stage, topology, mesh, batch.accumulation).compile()
    seconds = time.monotonic() - began
    memory, counts = compiled.memory_analysis(), hlo.count(_program(dump))
    length = stage.data.sequence_length
    tokens = stage.batch_tokens / math.prod(mesh.shape.values())
    model_matrix = 6 * n_matmul_params(recipe.model) * tokens
    attention = 3 * attention_flops(recipe.model, length) * tokens
    assert memory is not None, "this compiler does not tell what memory it needs"
    peak = memory.peak_memory_in_bytes
    return CompileReport(
        recipe=recipe.name,
        stage=stage_name,
        devices=len(devices),
        device_kind=devices[0].device_kind,
        instances=batch.per_device,
        accumulation=batch.accumulation,
        arguments_gib=memory.argument_size_in_bytes / GIB,
        outputs_gib=memory.output_size_in_bytes / GIB,
        temporaries_gib=memory.temp_size_in_bytes / GIB,
        peak_gib=peak / GIB,
        hbm_gib=hbm_gib,
        matrix_flops=counts.matrix_flops,
        model_matrix_flops=model_matrix,
        model_attention_flops=attention,
        recomputation=counts.matrix_flops / model_matrix,
        intensity=(model_matrix + attention) / peak,
        collective_gib={k: v / GIB for k, v in sorted(counts.collective_bytes.items())},
        unknown_loops=counts.unknown_loops,
        kernels=dict(counts.kernels),
        compile_seconds=seconds,
    )


def _program(dump: str) -> str:
    """The optimised program's text, of the step and not of a helper that was compiled beside it."""
    texts = sorted(Path(dump).glob("*train_step*[._]after_optimizations.txt"))
    if not texts:
        raise UserError(f"XLA left no optimised program in {dump}: this version dumps differently")
    return texts[-1].read_text()


def _lower(recipe: Recipe, stage, topology: Topology, mesh, accumulation: int):
    """The step that the trainer runs, on arrays that are only described."""
    import jax
    import jax.numpy as jnp

    from olmo_core_jax.data.batch import Batch
    from olmo_core_jax.model.olmo3 import abstract_params
    from olmo_core_jax.train.mesh import named_sharding, replicated, state_shardings
    from olmo_core_jax.train.step import init_state, make_train_step

    state = jax.eval_shape(
        lambda p: init_state(p, stage, recipe.precision), abstract_params(recipe.model)
    )
    state = jax.tree.map(_placed, state, state_shardings(mesh, recipe.model))
    rows, length = stage.batch_instances, stage.data.sequence_length
    by_rows = named_sharding(mesh, ("batch",))
    batch = Batch(
        jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=by_rows),
        jax.ShapeDtypeStruct((rows,), jnp.bool_, sharding=by_rows),
    )
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated(mesh))
    step = make_train_step(
        recipe.model,
        stage,
        recipe.precision,
        topology,
        mesh,
        pad_id=recipe.tokenizer.pad_id,
        accumulation=accumulation,
    )
    return step.lower(state, batch, rate)


def _placed(x, sharding):
    import jax

    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def describe(r: CompileReport) -> str:
    """The report as text."""
    room = r.hbm_gib - r.peak_gib
    verdict = (
        f"fits, {room:.1f} GiB to spare" if r.fits else f"does NOT fit: {-room:.1f} GiB too much"
    )
    moved = ", ".join(f"{k} {v:.2f}" for k, v in r.collective_gib.items()) or "none"
    lines = [
        f"{r.recipe} {r.stage} on {r.devices} x {r.device_kind}: {r.instances} instances a device, "
        f"{r.accumulation} micro-batches an update",
        f"  memory a device: arguments {r.arguments_gib:.2f} GiB, temporaries {r.temporaries_gib:.2f} GiB before reuse, "
        f"peak {r.peak_gib:.2f} of {r.hbm_gib:.0f} GiB: {verdict}",
        f"  an update: model {r.model_matrix_flops:.3e} matrix + {r.model_attention_flops:.3e} attention FLOPs; "
        f"program {r.matrix_flops:.3e} matrix FLOPs, {r.recomputation:.3f} times the model's",
        f"  arithmetic intensity {r.intensity:.0f} FLOPs a byte of peak memory; collectives, GiB received: {moved}",
        f"  compiled in {r.compile_seconds:.0f} s",
    ]
    if r.unknown_loops:
        lines.append(
            f"  {r.unknown_loops} loops of unknown length were counted once: FLOPs and bytes are lower bounds"
        )
    return "\n".join(lines)
