"""The three things that can be compared: our checkpoint, Hugging Face's through transformers,
OLMo-core's own.

Each gives, for tokens [B, S], the output of every part under the same names (model/olmo3.py's
`trace`): embed, layers.{i}.{attn,attn_residual,mlp,out}, final_norm, logits. torch is imported
only where a side needs it.
"""

from typing import Any

import numpy as np

from olmo_core_jax import storage
from olmo_core_jax.checkpoint.contents import kind_of
from olmo_core_jax.checkpoint.formats.orbax_read import OrbaxStep, lazy_section
from olmo_core_jax.errors import UserError
from olmo_core_jax.model.tree import flatten, put
from olmo_core_jax.recipes.schema import Model

Trace = dict[str, np.ndarray]


def trace_side(path: str, tokens_BS: np.ndarray, dtype: str, kind: str | None = None) -> Trace:
    """The trace of whatever checkpoint lies at a path."""
    kind = kind or kind_of(path)
    traces = {"ours": trace_ours, "hf": trace_hf, "olmo_core": trace_olmo_core}
    return traces[kind](path, tokens_BS, dtype)


def load_params(step: OrbaxStep) -> dict:
    """The step's parameters as JAX arrays."""
    import jax.numpy as jnp

    tree: dict = {}
    for path, lazy in flatten(lazy_section(step, "params")):
        put(tree, path, jnp.asarray(np.asarray(lazy)))
    return tree


def trace_ours(path: str, tokens_BS: np.ndarray, dtype: str) -> Trace:
    """Our model on a checkpoint of ours; its `meta` says the shapes."""
    step = OrbaxStep(path)
    return trace_params(load_params(step), model_of(step), tokens_BS, dtype)


def logits_ours(path: str, tokens_BS: np.ndarray, dtype: str) -> np.ndarray:
    """Only the logits, fp32 [B, S, V], of our model on a checkpoint of ours."""
    import jax
    import jax.numpy as jnp

    from olmo_core_jax.model.olmo3 import logits
    from olmo_core_jax.model.options import ModelOptions

    step = OrbaxStep(path)
    cfg, options = model_of(step), ModelOptions(compute_dtype=dtype)
    compute = jax.jit(lambda p, t: logits(p, t, cfg, options))
    return np.asarray(compute(load_params(step), jnp.asarray(tokens_BS, jnp.int32)))


def model_of(step: OrbaxStep) -> Model:
    """The model section that a checkpoint's meta holds."""
    if "model" not in step.meta:
        raise UserError(f"{step.where}: its meta does not say which model it is")
    return Model.model_validate(step.meta["model"])


def trace_params(params: dict, cfg: Model, tokens_BS: np.ndarray, dtype: str) -> Trace:
    """Our model on a parameter tree."""
    import jax.numpy as jnp

    from olmo_core_jax.model.olmo3 import trace
    from olmo_core_jax.model.options import ModelOptions

    found = trace(params, jnp.asarray(tokens_BS, jnp.int32), cfg, ModelOptions(compute_dtype=dtype))
    order = part_names(cfg)
    return {name: np.asarray(found[name].astype(jnp.float32)) for name in order}


def part_names(cfg: Model) -> list[str]:
    """Every part of a trace, in the order of the computation."""
    layers = [
        f"layers.{i}.{part}"
        for i in range(cfg.n_layers)
        for part in ("attn", "attn_residual", "mlp", "out")
    ]
    return ["embed", *layers, "final_norm", "logits"]


def _torch(path: str) -> Any:
    try:
        import torch
    except ImportError:
        raise UserError(f"{path} needs PyTorch to be read: pip install -e '.[reference]'") from None
    return torch


def trace_hf(path: str, tokens_BS: np.ndarray, dtype: str) -> Trace:
    """transformers' model on an HF folder; every weight has to be used and no weight made up."""
    torch = _torch(path)
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="sdpa", output_loading_info=True
    )
    model, info = loaded
    left = [
        key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in info[kind]
    ]
    if left:
        raise UserError(
            f"{path}: transformers leaves tensors unused or makes them up: "
            + ", ".join(map(str, left[:3]))
        )
    return trace_hf_model(model.eval(), tokens_BS)


def trace_hf_model(model, tokens_BS: np.ndarray) -> Trace:
    """The same of a transformers model in memory."""
    return _run_hooked(model, tokens_BS, hf_hooks(model))


def hf_hooks(model) -> dict[str, tuple[Any, bool]]:
    """part -> (module, whether its input is meant rather than its output)."""
    parts = {"embed": (model.model.embed_tokens, False)}
    for i, layer in enumerate(model.model.layers):
        parts |= {
            f"layers.{i}.attn": (layer.self_attn, False),
            f"layers.{i}.attn_residual": (layer.mlp, True),
            f"layers.{i}.mlp": (layer.mlp, False),
            f"layers.{i}.out": (layer, False),
        }
    return parts | {"final_norm": (model.model.norm, False), "logits": (model.lm_head, False)}


def olmo_core_hooks(model) -> dict[str, tuple[Any, bool]]:
    """The same for OLMo-core's Transformer."""
    parts = {"embed": (model.embeddings, False)}
    for i, block in model.blocks.items():
        parts |= {
            f"layers.{i}.attn": (block.attention, False),
            f"layers.{i}.attn_residual": (block.feed_forward, True),
            f"layers.{i}.mlp": (block.feed_forward, False),
            f"layers.{i}.out": (block, False),
        }
    return parts | {
        "final_norm": (model.lm_head.norm, False),
        "logits": (model.lm_head.w_out, False),
    }


def _run_hooked(model, tokens_BS: np.ndarray, parts: dict[str, tuple[Any, bool]]) -> Trace:
    """Runs a torch model and keeps what its parts take or give."""
    torch = _torch("a traced model")
    seen: Trace = {}

    def keep(name: str, value) -> None:
        value = value[0] if isinstance(value, tuple) else value
        seen[name] = value.detach().float().numpy()

    handles = []
    for name, (module, wants_input) in parts.items():
        if wants_input:
            handles.append(
                module.register_forward_pre_hook(lambda _, args, name=name: keep(name, args))
            )
        else:
            handles.append(
                module.register_forward_hook(lambda _, args, out, name=name: keep(name, out))
            )
    with torch.no_grad():
        model(torch.as_tensor(np.asarray(tokens_BS, np.int64)))
    for handle in handles:
        handle.remove()
    return {name: seen[name] for name in parts}


def trace_olmo_core(path: str, tokens_BS: np.ndarray, dtype: str) -> Trace:
    """OLMo-core's model on a native checkpoint; the checkpoint's config.json says which model it
    is.
    """
    torch = _torch(path)
    try:
        from olmo_core.distributed.checkpoint import load_model_and_optim_state
        from olmo_core.nn.transformer import TransformerConfig
    except ImportError:
        raise UserError(
            f"{path} needs OLMo-core to be read: pip install -e '.[reference]'"
        ) from None
    config = storage.read_json(storage.join(path, "config.json"))
    model = TransformerConfig.from_dict(config["model"]).build(init_device="cpu")
    load_model_and_optim_state(storage.join(path, "model_and_optim"), model)
    return trace_olmo_core_model(model.to(getattr(torch, dtype)).eval(), tokens_BS)


def trace_olmo_core_model(model, tokens_BS: np.ndarray) -> Trace:
    """The same of an OLMo-core model in memory."""
    return _run_hooked(model, tokens_BS, olmo_core_hooks(model))
