"""Speed of one update on this CPU, ours beside OLMo-core's, alternating in one run.

    python benchmarks/train_step.py [--olmo-core PYTHON] [--maxtext-seconds S] [--rounds 3]

A small Olmo 3: 4 layers, width 256, MLP 688, 4 heads of 64, vocabulary 100278 (padded 100352), 4 instances of 512
tokens, fp32. Each side runs in a process of its own, round after round; medians over all updates but the first. A
matrix product of the machine stands beside them as a yardstick: what the arithmetic could reach at most.
`--olmo-core` names a Python that has ai2-olmo-core (default: this one).
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

LAYERS, WIDTH, MLP, HEADS, HEAD = 4, 256, 688, 4, 64
VOCAB, PADDED, SEQUENCE, BATCH = 100_278, 100_352, 512, 4
TOKENS = SEQUENCE * BATCH
WINDOW = 4096
UPDATES = 5


def ours() -> list[float]:
    """Seconds of each update of the trainer's own step."""
    import jax
    import numpy as np

    from olmo_core_jax.data.batch import Batch
    from olmo_core_jax.model.olmo3 import init_params
    from olmo_core_jax.recipes import schema
    from olmo_core_jax.topology import Topology
    from olmo_core_jax.train.step import init_state, make_train_step

    model = schema.Model(
        n_layers=LAYERS,
        d_model=WIDTH,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        head_dim=HEAD,
        mlp_hidden=MLP,
        vocab_size=VOCAB,
        padded_vocab_size=PADDED,
        pattern=[WINDOW] * 3 + [-1],
    )
    stage = schema.Stage(
        data=schema.Data(mix="-", base="-", sequence_length=SEQUENCE, seed=1),
        batch_tokens=TOKENS,
        max_tokens=TOKENS * 1000,
        schedule=schema.Linear(peak=1e-3),
        checkpoints=schema.Checkpoints(every=1000),
    )
    state = jax.jit(lambda: init_state(init_params(model, 0), stage))()
    step = make_train_step(model, stage, topology=Topology(platform="cpu", loss_chunks=4))
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, SEQUENCE), dtype=np.int32)
    batch = Batch(tokens, np.ones(BATCH, bool))
    seconds = []
    for _ in range(UPDATES + 1):
        began = time.perf_counter()
        state, metrics = step(state, batch, np.float32(1e-4))
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - began)
    return seconds


def olmo_core() -> list[float]:
    """Seconds of each update of OLMo-core's train module: batch, backward, clip, skip-step AdamW."""
    import tempfile

    import torch
    from olmo_core.config import DType
    from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig
    from olmo_core.optim import OptimGroupOverride, SkipStepAdamWConfig
    from olmo_core.train.train_module import TransformerTrainModuleConfig

    torch.set_num_threads(2)
    config = TransformerConfig.llama_like(
        d_model=WIDTH,
        vocab_size=PADDED,
        n_layers=LAYERS,
        n_heads=HEADS,
        head_dim=HEAD,
        rope_theta=500_000,
        layer_norm_eps=1e-6,
        qk_norm=True,
        block_name=TransformerBlockType.reordered_norm,
        sliding_window=SlidingWindowAttentionConfig(
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=True,
            pattern=[WINDOW] * 3 + [-1],
        ),
        attn_backend=AttentionBackendName.torch,
        dtype=DType.float32,
    )
    config.block.feed_forward.hidden_size = MLP
    overrides = [OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})]
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=TOKENS,
        max_sequence_length=SEQUENCE,
        optim=SkipStepAdamWConfig(
            lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), group_overrides=overrides
        ),
        z_loss_multiplier=1e-5,
        max_grad_norm=1.0,
    ).build(config.build(init_device="cpu"), device=torch.device("cpu"))

    class Trainer:  # what the module asks of its trainer in these two calls
        global_step = 1
        max_steps = 1000
        save_folder = tempfile.gettempdir()
        callbacks: dict = {}

        def record_metric(self, *args, **kwargs): ...
        def record_ce_loss(self, *args, **kwargs): ...

    module._trainer = Trainer()
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(UPDATES + 1):
        began = time.perf_counter()
        module.zero_grads()
        module.train_batch({"input_ids": ids.clone()})
        module.optim_step()
        seconds.append(time.perf_counter() - began)
    return seconds


def matrix_product() -> float:
    """FLOP/s of a plain fp32 product in the same JAX."""
    import jax
    import jax.numpy as jnp

    n = 2048
    a = jnp.ones((n, n), jnp.float32)
    f = jax.jit(lambda x: x @ x)
    f(a).block_until_ready()
    best = min(_timed(lambda: f(a).block_until_ready()) for _ in range(10))
    return 2 * n**3 / best


def _timed(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


SIDES = {"ours": ours, "olmo_core": olmo_core}


def one(side: str) -> None:
    """A side's figures as one JSON line; run in a process of its own."""
    seconds = SIDES[side]()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"first": seconds[0], "rest": seconds[1:], "rss_gb": usage.ru_maxrss / 1e6}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--olmo-core", default=sys.executable, help="Python that has ai2-olmo-core")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one)
        return
    pythons = {"ours": sys.executable, "olmo_core": args.olmo_core}
    found: dict[str, list[dict]] = {side: [] for side in SIDES}
    for number in range(args.rounds):
        for side, python in pythons.items():
            run = subprocess.run(
                [python, __file__, "--one", side], capture_output=True, text=True, check=False
            )
            if run.returncode:
                sys.exit(f"{side} failed: {run.stderr.strip().splitlines()[-1]}")
            found[side].append(json.loads(run.stdout.splitlines()[-1]))
            rate = TOKENS / statistics.median(found[side][-1]["rest"])
            print(f"round {number + 1} {side:10s} {rate:7.0f} tokens/s", flush=True)
    peak = matrix_product()
    # 2 FLOPs a weight and token, three times (forward, and twice that backward); attention is 2% here and left out
    weights = LAYERS * (4 * WIDTH * HEADS * HEAD + 3 * WIDTH * MLP) + PADDED * WIDTH
    rates = {}
    for side, runs in found.items():
        rates[side] = TOKENS / statistics.median([s for r in runs for s in r["rest"]])
        share = 6 * weights * rates[side] / peak
        first = statistics.median(r["first"] for r in runs)
        rss = max(r["rss_gb"] for r in runs)
        print(
            f"{side:10s} {rates[side]:7.0f} tokens/s, {share:4.0%} of a matrix product's {peak / 1e9:.0f} GFLOP/s, "
            f"first update {first:.1f} s, peak memory {rss:.2f} GB"
        )
    print(f"ratio      {rates['ours'] / rates['olmo_core']:.2f}")


if __name__ == "__main__":
    main()
