"""config.json of an Olmo 3 checkpoint <-> the recipe's model section, in every form that
transformers has had.
"""

import math
from collections.abc import Mapping
from typing import Any

from olmo_core_jax.errors import UserError
from olmo_core_jax.recipes.schema import Model, RopeScaling

FULL, SLIDING = "full_attention", "sliding_attention"
DEFAULT_THETA = 500_000.0
COMPARED = (
    "n_layers",
    "d_model",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "mlp_hidden",
    "rope_theta",
    "rope_scaling",
    "norm_eps",
)


def model_from_config(config: Mapping[str, Any], where: str) -> Model:
    """The model that a config.json describes; its vocabulary is the embedding's rows.

    Raises UserError where it is no Olmo 3, or has something that Olmo 3 never has.
    """
    if config.get("model_type") != "olmo3":
        raise UserError(
            f"{where} is of type {config.get('model_type')!r}; only Olmo 3 ('olmo3') is converted"
        )
    for field, only in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("tie_word_embeddings", False),
    ):
        if config.get(field, only) != only:
            raise UserError(f"{where}: {field} is {config[field]!r}; Olmo 3 has {only!r}")
    try:
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
        types = config.get("layer_types") or [
            FULL if i % 4 == 3 else SLIDING for i in range(layers)
        ]
        windows = [_window(kind, config, where) for kind in types]
        if len(windows) != layers:
            raise UserError(f"{where}: layer_types has {len(windows)} entries for {layers} layers")
        theta, scaling = _rope(config, where)
        return Model(
            n_layers=layers,
            d_model=config["hidden_size"],
            n_heads=heads,
            n_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            mlp_hidden=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            padded_vocab_size=config["vocab_size"],
            pattern=_shortest_period(windows),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            init_std=float(config.get("initializer_range", 0.02)),
        )
    except KeyError as e:
        raise UserError(f"{where} has no {e.args[0]}") from None


def check_config(config: Mapping[str, Any], cfg: Model, where: str) -> None:
    """Raises UserError that names the first field in which a checkpoint's config differs from the
    recipe's model.
    """
    found = model_from_config(config, where)
    for field in COMPARED:
        there, here = getattr(found, field), getattr(cfg, field)
        if there != here:
            raise UserError(f"{where} says {field} = {there}, the recipe's model {here}")
    if layer_windows(found) != layer_windows(cfg):
        raise UserError(
            f"{where} has windows {found.pattern} by layer, the recipe's model {cfg.pattern}"
        )
    if not cfg.vocab_size <= found.vocab_size <= cfg.padded_vocab_size:
        raise UserError(
            f"{where} has a vocabulary of {found.vocab_size} rows; the recipe's tokenizer needs "
            f"{cfg.vocab_size}, its model pads to {cfg.padded_vocab_size}"
        )


def config_from_model(
    cfg: Model, *, rows: int, context: int, eos_id: int, pad_id: int, bos_id: int | None, dtype: str
) -> dict:
    """config.json that transformers loads as it is; rows: of embedding and head; context: longest
    sequence.

    Rotary settings are written in the nested form and in the older flat one; readers of either
    find theirs.
    """
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    flat = None
    if cfg.rope_scaling is not None:
        flat = _yarn_entry(cfg.rope_scaling)
        full |= flat
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "vocab_size": rows,
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.mlp_hidden,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "initializer_range": cfg.init_std,
        "rms_norm_eps": cfg.norm_eps,
        "use_cache": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": next((w for w in cfg.pattern if w > 0), None),
        "layer_types": [SLIDING if w > 0 else FULL for w in layer_windows(cfg)],
        "rope_parameters": {
            FULL: full,
            SLIDING: {"rope_type": "default", "rope_theta": cfg.rope_theta},
        },
        "rope_theta": cfg.rope_theta,
        "rope_scaling": flat,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "bos_token_id": bos_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def layer_windows(cfg: Model) -> list[int]:
    """The window of every layer, -1 for full attention."""
    return list(cfg.pattern) * cfg.n_cycles


def _window(kind: str, config: Mapping, where: str) -> int:
    if kind == FULL:
        return -1
    if kind != SLIDING:
        raise UserError(f"{where}: layer_types has {kind!r}, which Olmo 3 does not")
    return config.get("sliding_window") or 4096


def _shortest_period(windows: list[int]) -> list[int]:
    """The shortest pattern that repeats to the whole list."""
    for n in range(1, len(windows) + 1):
        if len(windows) % n == 0 and windows == windows[:n] * (len(windows) // n):
            return windows[:n]
    return windows


def _rope(config: Mapping, where: str) -> tuple[float, RopeScaling | None]:
    """(theta, YaRN of the full-attention layers) from either form."""
    nested = config.get("rope_parameters") or {}
    if FULL in nested or SLIDING in nested:
        full, sliding = nested.get(FULL) or {}, nested.get(SLIDING) or {}
    else:
        full, sliding = {**nested, **(config.get("rope_scaling") or {})}, {}
    default = config.get("rope_theta") or nested.get("rope_theta") or DEFAULT_THETA
    thetas = {float(part.get("rope_theta", default)) for part in (full, sliding)}
    if len(thetas) != 1:
        raise UserError(
            f"{where}: rope_theta differs between sliding and full attention: {sorted(thetas)}"
        )
    if sliding.get("rope_type", "default") != "default":
        raise UserError(f"{where}: rotary scaling on sliding layers ({sliding}) is not Olmo 3's")
    return thetas.pop(), _yarn(full, where)


def _yarn(full: Mapping, where: str) -> RopeScaling | None:
    kind = full.get("rope_type", full.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise UserError(f"{where}: rotary scaling of type {kind!r}; Olmo 3 has 'yarn' or none")
    try:
        scaling = RopeScaling(
            factor=float(full["factor"]),
            beta_fast=float(full.get("beta_fast") or 32),
            beta_slow=float(full.get("beta_slow") or 1),
            original_length=int(full["original_max_position_embeddings"]),
        )
    except KeyError as e:
        raise UserError(f"{where}: rotary scaling has no {e.args[0]}") from None
    said, ours = full.get("attention_factor"), attention_factor(scaling)
    if said is not None and abs(said - ours) > 1e-9:
        raise UserError(
            f"{where}: attention_factor is {said}; YaRN with factor {scaling.factor} has {ours}"
        )
    return scaling


def attention_factor(scaling: RopeScaling) -> float:
    """What cosines and sines are multiplied by: 0.1 ln(factor) + 1 (YaRN paper, section 3.4)."""
    return 0.1 * math.log(scaling.factor) + 1.0


def _yarn_entry(scaling: RopeScaling) -> dict:
    return {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "original_max_position_embeddings": scaling.original_length,
        "attention_factor": attention_factor(scaling),
    }
