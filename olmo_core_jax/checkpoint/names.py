"""One table: what every weight is called here, in Hugging Face checkpoints and in OLMo-core's
own.

Every matrix is (out, in) on all three sides, so converting only moves bytes. Here the layers of
one place of the pattern are stacked: slice c of place j is layer c*P + j, P the pattern's length.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from olmo_core_jax.recipes.schema import Model

# place in our tree -> (Hugging Face, OLMo-core); {i} is the layer
TOP: dict[tuple[str, ...], tuple[str, str]] = {
    ("embed", "weight"): ("model.embed_tokens.weight", "embeddings.weight"),
    ("final_norm", "weight"): ("model.norm.weight", "lm_head.norm.weight"),
    ("lm_head", "weight"): ("lm_head.weight", "lm_head.w_out.weight"),
}
LAYER: dict[tuple[str, ...], tuple[str, str]] = {
    ("attn", "q"): ("self_attn.q_proj", "attention.w_q"),
    ("attn", "k"): ("self_attn.k_proj", "attention.w_k"),
    ("attn", "v"): ("self_attn.v_proj", "attention.w_v"),
    ("attn", "out"): ("self_attn.o_proj", "attention.w_out"),
    ("attn", "q_norm"): ("self_attn.q_norm", "attention.q_norm"),
    ("attn", "k_norm"): ("self_attn.k_norm", "attention.k_norm"),
    ("attn_norm",): ("post_attention_layernorm", "attention_norm"),
    ("mlp", "gate"): ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp", "up"): ("mlp.up_proj", "feed_forward.w3"),
    ("mlp", "down"): ("mlp.down_proj", "feed_forward.w2"),
    ("mlp_norm",): ("post_feedforward_layernorm", "feed_forward_norm"),
}
VOCABULARY = (("embed", "weight"), ("lm_head", "weight"))


@dataclass(frozen=True)
class Leaf:
    """One array of our parameter tree and the tensors it is made of.

    shape: of the array here; the leading axis counts cycles where `stacked`. hf, olmo_core: one
    name a cycle, or one name. vocabulary: the tensor's rows are token ids, so that padded and
    released checkpoints differ in them.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    stacked: bool
    hf: tuple[str, ...]
    olmo_core: tuple[str, ...]
    vocabulary: bool = False

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of each tensor on the other sides (the vocabulary padded)."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def name(self) -> str:
        return ".".join(self.path)


def leaves(cfg: Model) -> list[Leaf]:
    """Every array of the model's parameter tree: embedding, layers by place in the pattern, final
    norm, head.
    """
    wide, narrow = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    d, f, places = cfg.d_model, cfg.mlp_hidden, len(cfg.pattern)
    shapes: dict[tuple[str, ...], tuple[int, ...]] = {
        ("attn", "q"): (wide, d),
        ("attn", "k"): (narrow, d),
        ("attn", "v"): (narrow, d),
        ("attn", "out"): (d, wide),
        ("attn", "q_norm"): (wide,),
        ("attn", "k_norm"): (narrow,),
        ("attn_norm",): (d,),
        ("mlp", "gate"): (f, d),
        ("mlp", "up"): (f, d),
        ("mlp", "down"): (d, f),
        ("mlp_norm",): (d,),
    }
    table = []
    for path, (hf, native) in TOP.items():
        rows = (cfg.padded_vocab_size,) if path in VOCABULARY else ()
        table.append(Leaf(path, (*rows, d), False, (hf,), (native,), path in VOCABULARY))
    for j in range(places):
        layers = [c * places + j for c in range(cfg.n_cycles)]
        for path, (hf, native) in LAYER.items():
            table.append(
                Leaf(
                    ("cycles", f"layer_{j}", *path),
                    (cfg.n_cycles, *shapes[path]),
                    True,
                    tuple(f"model.layers.{i}.{hf}.weight" for i in layers),
                    tuple(f"blocks.{i}.{native}.weight" for i in layers),
                )
            )
    return table


def put(tree: dict, path: tuple[str, ...], value: Any) -> None:
    """Sets a value at a path of nested dicts, making the dicts on the way."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def get(tree: Mapping, path: tuple[str, ...]) -> Any:
    """The value at a path of nested dicts. Raises KeyError."""
    for key in path:
        tree = tree[key]
    return tree


def flatten(tree: Mapping, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of every leaf of nested dicts, in order."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, (*path, key))
        else:
            yield (*path, key), value
