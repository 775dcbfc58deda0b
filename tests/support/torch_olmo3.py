"""Small random Olmo 3 models of transformers and OLMo-core, with our parameter tree made from the same weights."""

import numpy as np
import torch

from olmo_core_jax.recipes.schema import Model


def small_model(**changes) -> Model:
    """Eight layers, windows shorter than the sequences of the tests, a padded vocabulary."""
    shape = {
        "n_layers": 8,
        "d_model": 64,
        "n_heads": 4,
        "n_kv_heads": 4,
        "head_dim": 16,
        "mlp_hidden": 96,
        "vocab_size": 250,
        "padded_vocab_size": 256,
        "pattern": [8, 8, 8, -1],
    }
    return Model.model_validate(shape | changes)


def transformers_model(cfg: Model, seed: int = 0):
    """A float32 Olmo3ForCausalLM with random weights, norm gains far from 1 included."""
    from transformers import Olmo3Config, Olmo3ForCausalLM

    scaling = None
    if cfg.rope_scaling is not None:
        s = cfg.rope_scaling
        scaling = {
            "rope_type": "yarn",
            "factor": s.factor,
            "beta_fast": s.beta_fast,
            "beta_slow": s.beta_slow,
            "original_max_position_embeddings": s.original_length,
        }
    kinds = ["full_attention" if w == -1 else "sliding_attention" for w in cfg.pattern]
    config = Olmo3Config(
        vocab_size=cfg.padded_vocab_size,
        hidden_size=cfg.d_model,
        intermediate_size=cfg.mlp_hidden,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_kv_heads,
        head_dim=cfg.head_dim,
        sliding_window=next((w for w in cfg.pattern if w != -1), 1),
        layer_types=kinds * cfg.n_cycles,
        rms_norm_eps=cfg.norm_eps,
        rope_theta=cfg.rope_theta,
        rope_scaling=scaling,
        max_position_embeddings=8192,
        attn_implementation="eager",
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = Olmo3ForCausalLM(config).eval()
    randomise(model, seed)
    return model


def in_bfloat16(model):
    """The model as from_pretrained(dtype=bfloat16) gives it. `.to(bfloat16)` alone rounds the rotary
    frequencies too: at position 8,000 the angles are then off by whole turns."""
    exact = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.bfloat16()
    for name, buffer in exact.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer)
    return model


def olmo_core_model(cfg: Model, seed: int = 0):
    """The same model as OLMo-core builds it (torch attention)."""
    from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
    from olmo_core.nn.rope import YaRNRoPEScalingConfig
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig

    window = next(w for w in cfg.pattern if w != -1)
    config = TransformerConfig.llama_like(
        d_model=cfg.d_model,
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv_heads=cfg.n_kv_heads,
        head_dim=cfg.head_dim,
        vocab_size=cfg.padded_vocab_size,
        rope_theta=int(cfg.rope_theta),
        layer_norm_eps=cfg.norm_eps,
        block_name=TransformerBlockType.reordered_norm,
        qk_norm=True,
        sliding_window=SlidingWindowAttentionConfig(
            pattern=[window if w != -1 else -1 for w in cfg.pattern],
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=True,
        ),
        attn_backend=AttentionBackendName.torch,
        hidden_size_multiple_of=cfg.mlp_hidden,
        hidden_size_multiplier=cfg.mlp_hidden / int(8 * cfg.d_model / 3) * 0.999,
    )
    if cfg.rope_scaling is not None:
        s = cfg.rope_scaling
        config = config.with_rope_scaling(
            YaRNRoPEScalingConfig(
                factor=s.factor,
                beta_fast=int(s.beta_fast),
                beta_slow=int(s.beta_slow),
                old_context_len=s.original_length,
            )
        )
    model = config.build(init_device="cpu").eval()
    randomise(model, seed)
    return model


def randomise(model, seed: int) -> None:
    """Matrices of std 0.1, gains uniform in [0.5, 1.5]: large enough that a wrong norm or window shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.uniform_(0.5, 1.5, generator=generator)
            else:
                p.normal_(0, 0.1, generator=generator)


TRANSFORMERS = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp_norm": "post_feedforward_layernorm",
    "layer": "model.layers.{}.",
    "embed": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
}
OLMO_CORE = {
    "attn.q": "attention.w_q",
    "attn.k": "attention.w_k",
    "attn.v": "attention.w_v",
    "attn.out": "attention.w_out",
    "attn.q_norm": "attention.q_norm",
    "attn.k_norm": "attention.k_norm",
    "attn_norm": "attention_norm",
    "mlp.gate": "feed_forward.w1",
    "mlp.up": "feed_forward.w3",
    "mlp.down": "feed_forward.w2",
    "mlp_norm": "feed_forward_norm",
    "layer": "blocks.{}.",
    "embed": "embeddings",
    "final_norm": "lm_head.norm",
    "lm_head": "lm_head.w_out",
}


def our_params(tensors: dict, cfg: Model, names: dict[str, str]) -> dict:
    """Our tree from named torch tensors (a state dict, or gradients by parameter name)."""

    def array(name: str) -> np.ndarray:
        return tensors[f"{name}.weight"].detach().float().numpy().copy()

    period = len(cfg.pattern)
    cycles: dict = {}
    for key in (k for k in names if k.startswith(("attn", "mlp"))):
        for j in range(period):
            at = cycles.setdefault(f"layer_{j}", {})
            *groups, leaf = key.split(".")
            for group in groups:
                at = at.setdefault(group, {})
            layers = (c * period + j for c in range(cfg.n_cycles))
            at[leaf] = np.stack([array(names["layer"].format(i) + names[key]) for i in layers])
    ends = {k: {"weight": array(names[k])} for k in ("embed", "final_norm", "lm_head")}
    return {**ends, "cycles": cycles}


def tokens_for(cfg: Model, batch: int = 2, length: int = 48, seed: int = 0) -> np.ndarray:
    """int32 [batch, length] of real token ids."""
    draw = np.random.default_rng(seed).integers(0, cfg.vocab_size, (batch, length))
    return draw.astype(np.int32)
