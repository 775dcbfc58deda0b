"""Small checkpoints made by the other frameworks themselves: transformers and OLMo-core."""

import json
import shutil
from pathlib import Path

import numpy as np

from olmo_core_jax.checkpoint.formats import hf
from olmo_core_jax.checkpoint.formats.orbax_write import write_step
from olmo_core_jax.model.weights import leaves
from olmo_core_jax.recipes.schema import Model, RopeScaling, Tokenizer


def tiny(
    *,
    width: int = 64,
    kv_heads: int = 4,
    vocab: int = 200,
    padded: int = 256,
    window: int = 12,
    layers: int = 8,
    yarn: bool = False,
) -> Model:
    """An Olmo 3 of 4 heads: its pattern, its norms, a window shorter than the test sequences."""
    return Model(
        n_layers=layers,
        d_model=width,
        n_heads=4,
        n_kv_heads=kv_heads,
        head_dim=width // 4,
        mlp_hidden=width * 5 // 2,
        vocab_size=vocab,
        padded_vocab_size=padded,
        pattern=[window, window, window, -1],
        rope_scaling=RopeScaling(original_length=64) if yarn else None,
    )


def tokens(cfg: Model, batch: int = 2, length: int = 48, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, cfg.vocab_size, (batch, length))


def hf_model(
    cfg: Model, rows: int | None = None, seed: int = 0, dtype: str = "float32", leads: bool = False
):
    """transformers' model with random weights; norm gains are not ones, logits not flat."""
    import torch
    from transformers import Olmo3Config, Olmo3ForCausalLM

    rope = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    full = dict(rope)
    if cfg.rope_scaling is not None:
        s = cfg.rope_scaling
        full |= {
            "rope_type": "yarn",
            "factor": s.factor,
            "beta_fast": s.beta_fast,
            "beta_slow": s.beta_slow,
            "original_max_position_embeddings": s.original_length,
        }
    config = Olmo3Config(
        vocab_size=rows or cfg.padded_vocab_size,
        hidden_size=cfg.d_model,
        intermediate_size=cfg.mlp_hidden,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_kv_heads,
        max_position_embeddings=512,
        rms_norm_eps=cfg.norm_eps,
        sliding_window=cfg.pattern[0],
        rope_parameters={"full_attention": full, "sliding_attention": rope},
        eos_token_id=cfg.vocab_size - 2,
        pad_token_id=cfg.vocab_size - 1,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    model = Olmo3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        model.lm_head.weight.mul_(2)
        if leads:
            let_best_tokens_lead(model.model.embed_tokens.weight, model.lm_head.weight)
    return model.to(getattr(torch, dtype)).eval()


def let_best_tokens_lead(embedding, head) -> None:
    """Gives each token a random direction, which the head knows as its successor's.

    The head of independent random numbers ranks tokens by next to nothing, and rounding decides which is
    the best. Trained heads do not: here as there most positions have a token that leads, and which one it is
    depends on every layer (on 3 of 10 positions it is another than the successor).
    """
    width = embedding.shape[1]
    direction = embedding / embedding.std()
    embedding.copy_(direction * 20 * width**-0.5)
    head.copy_(2 * width**-0.5 * direction.roll(1, 0))


def save_hf(model, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def olmo_core_model(cfg: Model, seed: int = 0, leads: bool = False):
    """OLMo-core's own model of the same shape, with random weights and gains."""
    import torch
    from olmo_core.config import DType
    from olmo_core.nn.attention import AttentionBackendName, SlidingWindowAttentionConfig
    from olmo_core.nn.rope import YaRNRoPEScalingConfig
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig

    config = TransformerConfig.llama_like(
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
        sliding_window=SlidingWindowAttentionConfig(
            force_full_attention_on_first_layer=False,
            force_full_attention_on_last_layer=True,
            pattern=cfg.pattern,
        ),
        attn_backend=AttentionBackendName.torch,
        dtype=DType.float32,
    )
    config.block.feed_forward.hidden_size = cfg.mlp_hidden
    if cfg.rope_scaling is not None:
        s = cfg.rope_scaling
        scaling = YaRNRoPEScalingConfig(
            factor=s.factor,
            beta_fast=s.beta_fast,
            beta_slow=s.beta_slow,
            old_context_len=s.original_length,
        )
        config = config.with_rope_scaling(scaling)
    torch.manual_seed(seed)
    model = config.build(init_device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.02 * torch.randn_like(parameter))
        model.lm_head.w_out.weight.mul_(2)
        if leads:
            let_best_tokens_lead(model.embeddings.weight, model.lm_head.w_out.weight)
    return model.eval(), config


def save_native(
    cfg: Model, folder: Path, updates: int = 3, seed: int = 0, leads: bool = False
) -> dict:
    """A native checkpoint of a model that took some updates; its tensors by name."""
    import torch
    from olmo_core.distributed.checkpoint import save_model_and_optim_state
    from olmo_core.optim import OptimGroupOverride, SkipStepAdamWConfig

    shutil.rmtree(folder, ignore_errors=True)
    model, config = olmo_core_model(cfg, seed, leads)
    override = OptimGroupOverride(params=["embeddings.weight"], opts={"weight_decay": 0.0})
    optim = SkipStepAdamWConfig(lr=1e-3, weight_decay=0.1, group_overrides=[override]).build(model)
    generator = torch.Generator().manual_seed(seed + 1)
    for _ in range(updates):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optim.latest_loss, optim.latest_grad_norm = torch.tensor(1.0), torch.tensor(1.0)
        optim.step()
        optim.zero_grad(set_to_none=True)
    save_model_and_optim_state(str(folder / "model_and_optim"), model, optim)
    train = {
        "global_step": updates,
        "global_train_tokens_seen": updates * 1024,
        "epoch": 1,
        "data_loader": {
            "dataset_fingerprint": "f00d",
            "seed": 7,
            "epoch": 1,
            "batches_processed": updates,
        },
        "rng": {"numpy": np.random.get_state(), "torch": torch.random.get_rng_state()},
        "callbacks": {},
    }
    (folder / "train").mkdir()
    torch.save(train, folder / "train" / "rank0.pt")
    (folder / "config.json").write_text(json.dumps({"model": config.as_config_dict()}))
    (folder / ".metadata.json").write_text(json.dumps({"ephemeral": False, "version": "3.0.0"}))
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach().numpy().copy()
        for key in ("exp_avg", "exp_avg_sq", "step"):
            tensors[f"optim.state.{name}.{key}"] = optim.state[parameter][key].numpy().copy()
    return tensors


def random_params(cfg: Model, seed: int = 0) -> dict[str, np.ndarray]:
    """Random fp32 tensors of the whole model by Hugging Face name, made without any framework."""
    rng = np.random.default_rng(seed)
    made = {}
    for leaf in leaves(cfg):
        for name in leaf.hf:
            shape = leaf.tensor_shape
            values = rng.standard_normal(shape, np.float32)
            made[name] = 0.02 * values if len(shape) == 2 else 1 + 0.3 * values
    return made


def write_hf(
    cfg: Model, folder: Path, tensors: dict | None = None, shards: int = 1, **config
) -> Path:
    """An HF folder written by the safetensors package; config: fields to change."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    tensors = random_params(cfg) if tensors is None else tensors
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        where = {}
        for k in range(shards):
            part, file = names[k::shards], f"model-{k + 1:05d}-of-{shards:05d}.safetensors"
            save_file({n: tensors[n] for n in part}, folder / file)
            where |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    plain = {
        "model_type": "olmo3",
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": cfg.d_model,
        "intermediate_size": cfg.mlp_hidden,
        "num_hidden_layers": cfg.n_layers,
        "num_attention_heads": cfg.n_heads,
        "num_key_value_heads": cfg.n_kv_heads,
        "sliding_window": cfg.pattern[0],
        "rope_theta": cfg.rope_theta,
        "rms_norm_eps": cfg.norm_eps,
    }
    (folder / "config.json").write_text(json.dumps(plain | config))
    return folder


def raw_bytes(folder: Path) -> dict[str, tuple[str, list, bytes]]:
    """name -> (dtype, shape, bytes) of every tensor of a folder, by the safetensors package."""
    from safetensors import deserialize

    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, entry in deserialize(file.read_bytes()):
            found[name] = (entry["dtype"], list(entry["shape"]), bytes(entry["data"]))
    return found


def to_ours(cfg: Model, source: Path, folder: Path, dtype: str = "float32") -> str:
    """Converts an HF folder and returns the path of our step 0."""
    found = hf.open_hf(str(source), cfg)
    meta = {"model": cfg.model_dump(mode="json")}
    return write_step(str(folder), 0, {"params": hf.params_from_hf(found, dtype)}, meta)


TOKENIZER = Tokenizer(name="tiny", eos_id=198, pad_id=199)
