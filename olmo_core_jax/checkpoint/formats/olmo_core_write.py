"""Our state as a native OLMo-core checkpoint, written by OLMo-core itself, so that it can go on
from it.

Needs the extra `reference`. The whole state passes through memory.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.checkpoint.formats.hf import require_shapes
from olmo_core_jax.checkpoint.formats.olmo_core import MOMENTS
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.weights import leaves
from olmo_core_jax.recipes.schema import Model, Optimizer, Recipe

FINGERPRINT_VERSION = "v2.0"


def write_native(step: OrbaxStep, recipe: Recipe, stage: str, folder: str) -> str:
    """Writes a training checkpoint of ours as `folder` (name it step{N}, as OLMo-core does).

    Weights, both moments and the Adam step keep their bits; counters and data position go into
    the trainer's state where the checkpoint has them. Raises UserError where the folder exists or
    the state has no moments.
    """
    _require_reference()
    target = Path(storage.local_path(folder))
    if target.exists():
        raise UserError(f"{folder} exists already; choose another folder for the native checkpoint")
    require_shapes(step, leaves(recipe.model), "params")
    partial = target.with_name(f".{target.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)  # what an earlier attempt of this very export left
    partial.mkdir(parents=True)
    section = recipe.stage(stage)
    model, config = build_model(recipe.model)
    optim = _optimizer(model, section.optimizer, section.schedule)
    _fill(step, recipe.model, model, optim)
    _save(partial, model, optim)
    (partial / "config.json").write_text(json.dumps({"model": config.as_config_dict()}, indent=1))
    state = trainer_state(step.meta)
    if state is not None:
        import torch

        (partial / "train").mkdir()
        torch.save(state, partial / "train" / "rank0.pt")
    (partial / ".metadata.json").write_text(json.dumps({"ephemeral": False, "version": "3.0.0"}))
    partial.rename(target)
    return str(target)


def _require_reference() -> None:
    try:
        import olmo_core  # noqa: F401
        import torch  # noqa: F401
    except ImportError:
        raise UserError(
            "native checkpoints are written by OLMo-core: pip install -e '.[reference]'"
        ) from None


def build_model(cfg: Model) -> tuple[Any, Any]:
    """(OLMo-core's model, its config) of the recipe's shapes, on the CPU in fp32."""
    from olmo_core.config import DType
    from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
    from olmo_core.nn.rope import YaRNRoPEScalingConfig
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig

    windows = SlidingWindowAttentionConfig(
        pattern=list(cfg.pattern),
        force_full_attention_on_first_layer=False,
        force_full_attention_on_last_layer=cfg.pattern[-1] == -1,
    )
    config: Any = TransformerConfig.llama_like(
        d_model=cfg.d_model,
        vocab_size=cfg.padded_vocab_size,
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv_heads=cfg.n_kv_heads,
        head_dim=cfg.head_dim,
        rope_theta=int(cfg.rope_theta),
        layer_norm_eps=cfg.norm_eps,
        qk_norm=True,
        block_name=TransformerBlockType.reordered_norm,
        sliding_window=windows,
        attn_backend=AttentionBackendName.torch,
        dtype=DType.float32,
    )
    config.block.feed_forward.hidden_size = cfg.mlp_hidden
    if cfg.rope_scaling is not None:
        s: Any = cfg.rope_scaling  # OLMo-core calls its betas integers
        scaling = YaRNRoPEScalingConfig(
            factor=s.factor,
            beta_fast=s.beta_fast,
            beta_slow=s.beta_slow,
            old_context_len=s.original_length,
        )
        config = config.with_rope_scaling(scaling)
    return config.build(init_device="cpu"), config


def _optimizer(model, opt: Optimizer, schedule):
    from olmo_core.optim import OptimGroupOverride, SkipStepAdamWConfig

    peak = schedule.peak if hasattr(schedule, "peak") else schedule.segments[-1].schedule.peak
    skip: dict[str, Any] = {}
    if opt.skip is not None:
        skip = {"rolling_interval_length": opt.skip.window, "sigma_factor": int(opt.skip.sigma)}
    embedding = {"weight_decay": opt.embedding_weight_decay}
    return SkipStepAdamWConfig(
        lr=peak,
        betas=(opt.beta1, opt.beta2),
        eps=opt.eps,
        weight_decay=opt.weight_decay,
        group_overrides=[OptimGroupOverride(params=["embeddings.weight"], opts=embedding)],
        **skip,
    ).build(model)


def _fill(step: OrbaxStep, cfg: Model, model, optim) -> None:
    """Copies weights, moments and the Adam step, bit for bit."""
    import torch

    parameters = dict(model.named_parameters())
    count = torch.tensor(float(step.value(("count",))), dtype=torch.float32)
    for leaf in leaves(cfg):
        arrays = {part: step.value((part, *leaf.path)) for part in ("params", *MOMENTS)}
        for part, array in arrays.items():
            if array.dtype != np.float32:
                raise UserError(
                    f"{step.where}: {part} of {leaf.name} is {array.dtype}; OLMo-core keeps float32"
                )
        for c, name in enumerate(leaf.olmo_core):
            values = {
                part: torch.from_numpy(np.array(a[c] if leaf.stacked else a))
                for part, a in arrays.items()
            }
            parameter = parameters.pop(name)
            parameter.data.copy_(values["params"])
            moments = {theirs: values[ours] for ours, theirs in MOMENTS.items()}
            optim.state[parameter] = {**moments, "step": count.clone()}
    assert not parameters, (
        f"OLMo-core's model has parameters that ours has not: {sorted(parameters)}"
    )


def _save(folder: Path, model, optim) -> None:
    """As OLMo-core's trainer saves: model and flattened optimizer state in one distributed
    checkpoint.
    """
    import torch.distributed.checkpoint.state_dict as dcp
    from olmo_core.distributed.checkpoint import save_state_dict

    options = dcp.StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)
    state = {
        "model": dcp.get_model_state_dict(model, options=options),
        "optim": dcp.get_optimizer_state_dict(model, optim, options=options),
    }
    save_state_dict(str(folder / "model_and_optim"), state)


def trainer_state(meta: dict) -> dict | None:
    """What OLMo-core's trainer resumes from (load_trainer_state=True), None where our meta lacks
    it.

    world_size 0 makes it leave the random generators alone: ours has none, and training draws
    nothing.
    """
    data, step = meta.get("data") or {}, meta.get("step")
    if not step or "olmo_core_fingerprint" not in data:
        return None
    batch = data["batch_instances"] * data["sequence_length"]
    longest = data["chunk"] * data["sequence_length"]
    return {
        "global_step": step,
        "global_train_tokens_seen": meta["tokens_seen"],
        "max_steps": None,
        "data_loader": {
            "dataset_type": "fsl",
            "dataset_fingerprint_version": FINGERPRINT_VERSION,
            "dataset_fingerprint": data["olmo_core_fingerprint"],
            "batches_processed": data["batches_processed"],
            "tokens_processed": data["batches_processed"] * batch,
            "sequence_length": data["sequence_length"],
            "max_target_sequence_length": longest if data["chunk"] > 1 else None,
            "seed": data["seed"],
            "epoch": data["epoch"],
        },
        "epoch": data["epoch"],
        "world_size": 0,
        "rng": {},
        "callbacks": {},
    }
