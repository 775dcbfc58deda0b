"""Speed of one update on this CPU, ours beside OLMo-core's and MaxText's, alternating in one run.

    python benchmarks/train_step.py [--olmo-core PYTHON] [--maxtext PYTHON] [--rounds 3]

A small Olmo 3: 4 layers, width 256, MLP 688, 4 heads of 64, vocabulary 100278 (padded 100352), 4 instances of 512
tokens, fp32. Each side runs in a process of its own, round after round; medians over all updates but the first. A
matrix product of the machine stands beside them as a yardstick: what the arithmetic could reach at most.
`--olmo-core` names a Python that has ai2-olmo-core (default: this one), `--maxtext` one that has maxtext 0.2.5, which needs
Python 3.12 and other versions of JAX than ours (left out by default).
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
    from olmo_core_jax.hardware.topology import Topology
    from olmo_core_jax.model.olmo3 import init_params
    from olmo_core_jax.recipes import schema
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


MAXTEXT = f"""model_name=olmo3-7b-pt override_model_config=True run_name=bench enable_checkpointing=False
base_num_decoder_layers={LAYERS} base_emb_dim={WIDTH} base_mlp_dim={MLP} base_num_query_heads={HEADS}
base_num_kv_heads={HEADS} head_dim={HEAD} vocab_size={VOCAB} max_target_length={SEQUENCE}
per_device_batch_size={BATCH} hardware=cpu skip_jax_distributed_system=True dataset_type=synthetic
dtype=float32 weight_dtype=float32 attention=dot_product z_loss_multiplier=1.0e-5 cast_logits_to_fp32=True
logits_dot_in_fp32=True skip_step_on_spikes=True gradient_clipping_threshold=1.0
adamw_mask=["token_embedder/embedding"] use_iota_embed=False log_config=False steps={UPDATES + 3}""".split()
FROM_ITS_FOLDER = """import importlib.util, os, runpy, sys
base = importlib.util.find_spec("maxtext").submodule_search_locations[0] + "/configs/base.yml"
sys.argv = ["train", base, *sys.argv[1:]]
runpy.run_module("maxtext.trainers.pre_train.train", run_name="__main__")"""


def maxtext(python: str) -> dict:
    """Its own trainer on synthetic tokens. Its first two lines give the time of a dispatch, not of an update."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        call = [python, "-c", FROM_ITS_FOLDER, *MAXTEXT, f"base_output_directory={folder}"]
        began = time.perf_counter()
        log = Path(folder, "log")
        with log.open("w") as out:
            process = subprocess.Popen(call, stdout=out, stderr=out, cwd=folder, env=env)
            _, status, usage = os.wait4(process.pid, 0)
        text = log.read_text()
    seconds = [float(s) for s in re.findall(r"completed step: \d+, seconds: ([\d.]+)", text)][2:]
    if status or not seconds:
        sys.exit(f"maxtext failed: {text.strip().splitlines()[-1]}")
    # Imports included: its log does not tell them apart.
    first = time.perf_counter() - began - sum(seconds)
    return {"first": first, "rest": seconds, "rss_gb": usage.ru_maxrss / 1e6}


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


def measure(side: str, python: str) -> dict:
    """One round of one side, in a process of its own."""
    if side == "maxtext":
        return maxtext(python)
    call = [python, __file__, "--one", side]
    run = subprocess.run(call, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{side} failed: {run.stderr.strip().splitlines()[-1]}")
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--olmo-core", default=sys.executable, help="Python that has ai2-olmo-core")
    parser.add_argument("--maxtext", help="Python that has maxtext")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one)
        return
    pythons = {"ours": sys.executable, "olmo_core": args.olmo_core, "maxtext": args.maxtext}
    pythons = {side: python for side, python in pythons.items() if python}
    found: dict[str, list[dict]] = {side: [] for side in pythons}
    for number in range(args.rounds):
        for side, python in pythons.items():
            found[side].append(measure(side, python))
            rate = TOKENS / statistics.median(found[side][-1]["rest"])
            print(f"round {number + 1} {side:10s} {rate:7.0f} tokens/s", flush=True)
    report(found)


def report(found: dict[str, list[dict]]) -> None:
    """A line a side, and how many times as fast as the others we are."""
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
    for side in rates.keys() - {"ours"}:
        print(f"ours / {side:10s} {rates['ours'] / rates[side]:.2f}")


if __name__ == "__main__":
    main()
