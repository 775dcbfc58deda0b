"""config.json of an OLMo-core run -> the recipe's model section."""

from collections.abc import Mapping
from typing import Any

from olmo_core_jax.errors import UserError
from olmo_core_jax.recipes.schema import Model, RopeScaling

BLOCK = "reordered_norm"


def model_from_config(config: Mapping[str, Any], where: str) -> Model:
    """The model of a run's config.json. Raises UserError where it is no Olmo 3 or lacks a field.

    Releases up to 2.5 call a block's `sequence_mixer` its `attention`.
    """
    try:
        model = config["model"]
        block = model["block"]
        attention = block.get("sequence_mixer") or block["attention"]
        window = attention.get("sliding_window") or {}
        if block["name"] != BLOCK or not attention.get("qk_norm"):
            raise UserError(f"{where}: blocks of kind {block['name']!r} are not Olmo 3's")
        heads, width = attention["n_heads"], model["d_model"]
        tokenizer = (config.get("dataset") or {}).get("tokenizer") or {}
        return Model(
            n_layers=model["n_layers"],
            d_model=width,
            n_heads=heads,
            n_kv_heads=attention.get("n_kv_heads") or heads,
            head_dim=attention.get("head_dim") or width // heads,
            mlp_hidden=block["feed_forward"]["hidden_size"],
            vocab_size=tokenizer.get("vocab_size") or model["vocab_size"],
            padded_vocab_size=model["vocab_size"],
            pattern=list(window.get("pattern") or [-1]),
            rope_theta=float(attention["rope"]["theta"]),
            rope_scaling=_scaling(model, where),
            norm_eps=float(block["layer_norm"]["eps"]),
        )
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{where} is not the config of an OLMo-core run ({e!r})") from None


def _scaling(model: Mapping, where: str) -> RopeScaling | None:
    """YaRN of the full-attention layers, which OLMo-core keeps as overrides of their blocks."""
    found = {}
    for layer, block in (model.get("block_overrides") or {}).items():
        attention = block.get("sequence_mixer") or block["attention"]
        scaling = (attention.get("rope") or {}).get("scaling")
        if scaling is not None:
            found[layer] = RopeScaling(
                factor=float(scaling["factor"]),
                beta_fast=float(scaling["beta_fast"]),
                beta_slow=float(scaling["beta_slow"]),
                original_length=int(scaling["old_context_len"]),
            )
    kinds = list(found.values())
    if any(kind != kinds[0] for kind in kinds):
        raise UserError(f"{where}: layers {', '.join(found)} have different rotary scalings")
    return kinds[0] if kinds else None


COMPARED = (
    "n_layers",
    "d_model",
    "padded_vocab_size",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "mlp_hidden",
    "rope_theta",
    "rope_scaling",
    "norm_eps",
)


def check_config(config: Mapping, cfg: Model, where: str) -> None:
    """Raises UserError that names the first field in which a run is not the recipe's model."""
    found = model_from_config(config, where)
    for name in COMPARED:
        there, here = getattr(found, name), getattr(cfg, name)
        if there != here:
            raise UserError(f"{where} says {name} = {there}, the recipe's model {here}")
    if found.pattern * found.n_cycles != cfg.pattern * cfg.n_cycles:
        raise UserError(f"{where} has windows {found.pattern}, the recipe's model {cfg.pattern}")
