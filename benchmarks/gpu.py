"""One large GPU, unattended, under eight minutes: the 7B step at sequence 8192, and the attention kernels side by side.

    python benchmarks/gpu.py [--minutes 8] [--hardware h200]

State is fp32 (87.6 GB for the weights and both moments of 7B), compute bf16, one instance an update. First every
rematerialisation policy is compiled for the described GPU, which needs none, so that only what fits is tried; then the
surest one is measured, the kernels, and the faster policies. Each part runs in a process of its own and prints a line
of JSON as it ends. Run with the extra `cuda`.
"""

import argparse
import json
import os
import subprocess
import sys
import time

from olmo_core_jax.hardware.chips import GPU_MEMORY_SHARE

SEQUENCE = 8192
HEADS, WIDTH = 32, 128
POLICIES = ("block", "attention_context", "mlp", "selective", "none")  # by memory, least first
KERNELS = ("cudnn", "blockwise", "reference")
UPDATES = 6


def topology(remat: str) -> dict:
    return {"platform": "cuda", "attention": "cudnn", "remat": remat, "loss_chunks": 8}


def device() -> dict:
    """The GPU that is here, and what JAX may use of it."""
    import jax

    found = jax.devices("cuda")[0]
    limit = (found.memory_stats() or {}).get("bytes_limit", 0)
    return {"device": found.device_kind, "usable_gib": round(limit / 2**30, 1)}


def step(remat: str) -> dict:
    """Tokens/s and MFU of the trainer's step: the median of all updates but the first."""
    import jax
    import numpy as np

    from olmo_core_jax import recipes
    from olmo_core_jax.compile.ahead import with_batch
    from olmo_core_jax.data.batch import Batch
    from olmo_core_jax.hardware import chips
    from olmo_core_jax.hardware.flops import training_flops
    from olmo_core_jax.hardware.topology import Topology
    from olmo_core_jax.model.olmo3 import init_params
    from olmo_core_jax.train.step import init_state, make_train_step

    recipe = with_batch(recipes.load_recipe("olmo3_7b"), "stage1", 1)
    model, stage = recipe.model, recipe.stage1
    state = jax.jit(lambda: init_state(init_params(model, 0), stage, recipe.precision))()
    run = make_train_step(model, stage, recipe.precision, Topology(**topology(remat)))
    draw = np.random.default_rng(0).integers
    batch = Batch(draw(model.vocab_size, size=(1, SEQUENCE), dtype=np.int32), np.ones(1, bool))
    seconds = []
    for _ in range(UPDATES):
        began = time.perf_counter()
        state, metrics = run(state, batch, np.float32(1e-4))
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    rate = SEQUENCE / float(np.median(seconds[1:]))
    found = jax.devices()[0]
    peak = chips.peak_flops(found.device_kind)
    memory = found.memory_stats() or {}
    return {
        "remat": remat,
        "first_update_s": round(seconds[0], 1),
        "tokens_per_s": round(rate),
        "mfu": round(rate * training_flops(model, SEQUENCE) / peak, 3) if peak else "unknown",
        "peak_gib": round(memory.get("peak_bytes_in_use", 0) / 2**30, 1),
        "ce_loss": float(metrics.ce_loss),
    }


def attention(kernel: str, window: int) -> dict:
    """Milliseconds of forward and backward of one layer's attention, bf16."""
    import jax
    import jax.numpy as jnp

    from olmo_core_jax.model.attention import attend

    shape = (1, SEQUENCE, HEADS, WIDTH)
    q, k, v = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key in jax.random.split(jax.random.key(0), 3)
    )

    def loss(q, k, v):
        return jnp.sum(attend(q, k, v, window=window, kernel=kernel).astype(jnp.float32) ** 2)

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    jax.block_until_ready(run(q, k, v))
    began = time.perf_counter()
    for _ in range(10):
        out = run(q, k, v)
    jax.block_until_ready(out)
    return {"kernel": kernel, "window": window, "ms": round((time.perf_counter() - began) * 100, 2)}


PARTS = {"device": device, "step": step, "attention": attention}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--hardware", default="h200", help="the shape that it is one GPU of")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, *rest = json.loads(args.one)
        print(json.dumps(PARTS[name](*rest)))
        return
    deadline = time.monotonic() + args.minutes * 60
    here = _measure(["device"], deadline)
    fitting = [p for p in POLICIES if _fits(p, args.hardware, deadline)]
    if not here:
        sys.exit("no GPU that JAX can use: nothing was measured")
    surest, faster = fitting[:1], fitting[1:]
    for remat in surest:
        _measure(["step", remat], deadline)
    for kernel in KERNELS:
        for window in (4096, -1):
            _measure(["attention", kernel, window], deadline)
    for remat in reversed(faster):
        _measure(["step", remat], deadline)


def _fits(remat: str, hardware: str, deadline: float) -> bool:
    """Whether XLA says so. Where it cannot say, the policy is tried."""
    command = [sys.executable, "-m", "olmo_core_jax.cli", "compile", "--recipe", "olmo3_7b"]
    command += ["--hardware", hardware, "--devices", "1", "--batch-instances", "1", "--json"]
    output = _run([*command, "--topology", json.dumps(topology(remat))], remat, deadline)
    if output is None:
        return True
    report = json.loads(output)
    peak, usable = report["peak_gib"], report["hbm_gib"]
    again = report["recomputation"]
    line = {"remat": remat, "predicted_peak_gib": round(peak, 1), "of": round(usable, 1)}
    print(json.dumps(line | {"recomputation": round(again, 3)}), flush=True)
    return peak <= usable


def _measure(call: list, deadline: float) -> bool:
    """Runs one part and prints its line; False where it failed."""
    output = _run([sys.executable, __file__, "--one", json.dumps(call)], call, deadline)
    if output is not None:
        print(output.splitlines()[-1], flush=True)
    return output is not None


def _run(command: list[str], name, deadline: float) -> str | None:
    """A process's output; None, with the reason printed, where it failed: the rest goes on."""
    left = deadline - time.monotonic()
    if left < 20:
        print(f"{name}: no time left", flush=True)
        return None
    env = os.environ | {"XLA_CLIENT_MEM_FRACTION": str(GPU_MEMORY_SHARE)}
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=left, check=False, env=env
        )
    except subprocess.TimeoutExpired:
        print(f"{name}: still running when the time was over", flush=True)
        return None
    if run.returncode:
        lines = run.stderr.strip().splitlines() or ["no message"]
        print(f"{name}: failed: {lines[-1][:300]}", flush=True)
        return None
    return run.stdout


if __name__ == "__main__":
    main()
