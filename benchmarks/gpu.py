"""One large GPU, unattended, under eight minutes: the 7B step at sequence 8192, and the attention kernels side by side.

    python benchmarks/gpu.py [--minutes 8] [--layers 32]

Each part runs in a process of its own and prints as it ends, so that a part which does not fit costs nothing else. State is
fp32 (88 GB for weights and both moments of 7B), compute bf16. Run with the extra `cuda`.
"""

import argparse
import json
import subprocess
import sys
import time

SEQUENCE = 8192
# What is tried for the step, in order of speed; the first that fits is measured.
STEP_TRIES = (("selective", 1), ("attention_context", 1), ("block", 1))


def step(layers: int, remat: str, rows: int) -> dict:
    """Tokens/s and MFU of the trainer's step."""
    import jax
    import numpy as np

    from olmo_core_jax import chips, recipes
    from olmo_core_jax.data.batch import Batch
    from olmo_core_jax.model.olmo3 import init_params
    from olmo_core_jax.topology import Topology
    from olmo_core_jax.train.flops import training_flops
    from olmo_core_jax.train.step import init_state, make_train_step

    recipe = recipes.load_recipe("olmo3_7b")
    model = recipe.model.model_copy(update={"n_layers": layers})
    stage = recipe.stage1.model_copy(update={"batch_tokens": rows * SEQUENCE})
    topology = Topology(platform="cuda", attention="cudnn", remat=remat, loss_chunks=8)
    state = jax.jit(lambda: init_state(init_params(model, 0), stage, recipe.precision))()
    run = make_train_step(model, stage, recipe.precision, topology)
    tokens = np.random.default_rng(0).integers(
        0, model.vocab_size, (rows, SEQUENCE), dtype=np.int32
    )
    batch = Batch(tokens, np.ones(rows, bool))
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        state, metrics = run(state, batch, np.float32(1e-4))
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    rate = rows * SEQUENCE / sorted(seconds[1:])[len(seconds) // 2 - 1]
    kind = jax.devices()[0].device_kind
    peak = chips.peak_flops(kind)
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "device": kind,
        "layers": layers,
        "remat": remat,
        "first_step_s": round(seconds[0], 1),
        "tokens_per_s": round(rate),
        "mfu": round(rate * training_flops(model, SEQUENCE) / peak, 3) if peak else "unknown",
        "peak_memory_gib": round(memory.get("peak_bytes_in_use", 0) / 2**30, 1),
        "ce_loss": float(metrics.ce_loss),
    }


def attention(kernel: str, window: int) -> dict:
    """Milliseconds of forward and backward of one layer's attention, bf16, 32 heads of 128."""
    import jax
    import jax.numpy as jnp

    from olmo_core_jax.model.attention import attend

    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, SEQUENCE, 32, 128), jnp.bfloat16) for key in keys)

    def loss(q, k, v):
        return jnp.sum(attend(q, k, v, window=window, kernel=kernel).astype(jnp.float32) ** 2)

    run = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    jax.block_until_ready(run(q, k, v))
    began = time.perf_counter()
    for _ in range(10):
        out = run(q, k, v)
    jax.block_until_ready(out)
    return {"kernel": kernel, "window": window, "ms": round((time.perf_counter() - began) * 100, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, *rest = json.loads(args.one)
        print(json.dumps({"step": step, "attention": attention}[name](*rest)))
        return
    deadline = time.monotonic() + args.minutes * 60
    for kernel in ("cudnn", "reference"):
        for window in (4096, -1):
            _part(["attention", kernel, window], deadline)
    for remat, rows in STEP_TRIES:
        if _part(["step", args.layers, remat, rows], deadline):
            break


def _part(call: list, deadline: float) -> bool:
    """Runs one measurement; says why it failed instead of failing the rest."""
    left = deadline - time.monotonic()
    if left < 20:
        print(f"{call}: no time left", flush=True)
        return False
    try:
        run = subprocess.run(
            [sys.executable, __file__, "--one", json.dumps(call)],
            capture_output=True,
            text=True,
            timeout=left,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"{call}: still running when the time was over", flush=True)
        return False
    if run.returncode:
        lines = run.stderr.strip().splitlines() or ["no message"]
        print(f"{call}: failed: {lines[-1][:300]}", flush=True)
        return False
    print(run.stdout.splitlines()[-1], flush=True)
    return True


if __name__ == "__main__":
    main()
