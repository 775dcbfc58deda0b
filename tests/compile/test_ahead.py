"""Compiling for a device that is not there. What needs libtpu or XLA's CUDA plugin runs where that is installed."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from olmo_core_jax.compile.gpu_target import TARGETS, target_of
from olmo_core_jax.errors import USER_ERROR, UserError
from olmo_core_jax.hardware.chips import CHIPS, GPU_MEMORY_SHARE, chip_named
from olmo_core_jax.hardware.shapes import all_shapes
from olmo_core_jax.hardware.topology import Topology
from olmo_core_jax.hardware.tuning import default_topology
from olmo_core_jax.jobs import common

HAS = {
    "h200": importlib.util.find_spec("jax_cuda13_plugin") is not None,
    "v5p-8": importlib.util.find_spec("libtpu") is not None,
}
needs_cuda = pytest.mark.skipif(not HAS["h200"], reason="needs the extra `cuda`")
GPUS = [s.name for s in all_shapes() if s.platform == "cuda" and s.chip.name in TARGETS]


def compile_ahead(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "olmo_core_jax.cli", "compile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def report(*arguments) -> dict:
    done = compile_ahead(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", TARGETS)
def test_a_described_gpu_is_the_chip_of_the_table(name):
    chip, target = chip_named(name), TARGETS[name]
    assert target.kind in chip.kinds  # so that its peak is known
    assert chip.memory_gib == pytest.approx(target.memory / 2**30, rel=0.02)
    assert target.text().count("{") == target.text().count("}")


def test_a_gpu_without_a_description_is_refused():
    other = next(chip for chip in CHIPS if chip.name not in TARGETS)
    with pytest.raises(UserError, match="there are A100"):
        target_of(other)


@pytest.mark.parametrize(("hardware", "extra"), [("h200", "cuda"), ("v5p-8", "tpu")])
def test_a_missing_compiler_is_named_with_its_extra(hardware, extra):
    if HAS[hardware]:
        pytest.skip("it is installed here")
    done = compile_ahead("--recipe", "olmo3_7b", "--hardware", hardware)
    assert done.returncode == USER_ERROR
    assert f"pip install -e '.[{extra}]'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("set_before", "expected"),
    [
        ({}, {"XLA_CLIENT_MEM_FRACTION": str(GPU_MEMORY_SHARE)}),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}),
    ],
)
def test_a_job_takes_the_share_that_was_compiled_for(monkeypatch, set_before, expected):
    """JAX refuses both names at once, and takes three quarters where neither is set."""
    monkeypatch.setattr(os, "environ", dict(set_before))
    common._prepare_backend(Topology(platform="cuda"))
    assert os.environ == {"JAX_PLATFORMS": "cuda"} | expected


def test_flags_from_outside_are_kept(monkeypatch):
    monkeypatch.setattr(os, "environ", {"LIBTPU_INIT_ARGS": "--a=1", "XLA_FLAGS": "--b=2"})
    common._prepare_backend(Topology(libtpu_flags=["--c=3"], xla_flags=["--d=4"]))
    assert os.environ == {"LIBTPU_INIT_ARGS": "--a=1 --c=3", "XLA_FLAGS": "--b=2 --d=4"}


@pytest.mark.parametrize("name", [s.name for s in all_shapes() if s.chip])
def test_every_accelerator_has_a_choice_that_bounds_its_micro_batch(name):
    chosen = default_topology(name)
    assert chosen.max_per_device_batch and chosen.platform in ("tpu", "cuda")
    assert (chosen.attention, bool(chosen.libtpu_flags)) == (
        ("splash", True) if chosen.platform == "tpu" else ("auto", False)
    )


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("name", GPUS)
def test_the_7b_fits_every_gpu_node_by_default(name):
    found = report("--recipe", "olmo3_7b", "--hardware", name)
    assert found["peak_gib"] < found["hbm_gib"]
    assert found["kernels"]["__cudnn$fmhaSoftmaxBackward"] == 32 * found["accumulation"]
    assert found["unknown_loops"] == 0
    recomputed = 1.313 if name == "a100-40" else 1.0
    assert found["recomputation"] == pytest.approx(recomputed, abs=1e-3)


@needs_cuda
@pytest.mark.slow
def test_one_gpu_runs_the_attention_kernel_again_only_where_the_policy_says_so():
    arguments = ("--recipe", "olmo3_190m", "--hardware", "h100", "--devices", "1")
    arguments = (*arguments, "--batch-instances", "1", "--topology")
    kept = report(*arguments, '{"remat": "none"}')["kernels"]
    again = report(*arguments, '{"remat": "block"}')["kernels"]
    assert kept["__cudnn$fmhaSoftmax"] == 12 and again["__cudnn$fmhaSoftmax"] == 24
