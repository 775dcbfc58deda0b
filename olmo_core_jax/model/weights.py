"""The model's weights, one row each: axes, decay, use, and their names in other checkpoints.

Shapes, shardings, parameter counts, FLOPs and conversions all follow from these rows. Every matrix
is (out, in) here, in Hugging Face's checkpoints and in OLMo-core's, so converting only moves bytes.
The layers at one place of the pattern are stacked: slice c of place j is layer c*P + j, P the
pattern's length. Imports no JAX.
"""

import math
from dataclasses import dataclass

from olmo_core_jax.model.tree import put
from olmo_core_jax.recipes.schema import Model


@dataclass(frozen=True)
class Weight:
    """A row of the table.

    name: dotted path in our tree, inside a layer or at the top.
    axes: logical names, from which its shape (axis_sizes) and sharding (train/mesh.py) follow;
    two axes make a matrix, one a norm's gain.
    hf, olmo_core: what it is called there, without the layer's prefix and ".weight".
    decay: the field of the recipe's optimizer section that says how much it decays.
    lookup: a matrix of which rows are taken, so that no token is multiplied with it.
    """

    name: str
    axes: tuple[str, ...]
    hf: str
    olmo_core: str
    decay: str = "weight_decay"
    lookup: bool = False

    @property
    def is_matmul(self) -> bool:
        """Whether every token is multiplied with it, which is what FLOPs count."""
        return len(self.axes) == 2 and not self.lookup


TOP = (
    Weight(
        "embed.weight",
        ("vocab", "embed"),
        "model.embed_tokens",
        "embeddings",
        decay="embedding_weight_decay",
        lookup=True,
    ),
    Weight("final_norm.weight", ("norm",), "model.norm", "lm_head.norm"),
    Weight("lm_head.weight", ("vocab", "embed"), "lm_head", "lm_head.w_out"),
)
LAYER = (
    Weight("attn.q", ("heads", "embed"), "self_attn.q_proj", "attention.w_q"),
    Weight("attn.k", ("kv_heads", "embed"), "self_attn.k_proj", "attention.w_k"),
    Weight("attn.v", ("kv_heads", "embed"), "self_attn.v_proj", "attention.w_v"),
    Weight("attn.out", ("embed", "heads"), "self_attn.o_proj", "attention.w_out"),
    Weight("attn.q_norm", ("heads",), "self_attn.q_norm", "attention.q_norm"),
    Weight("attn.k_norm", ("kv_heads",), "self_attn.k_norm", "attention.k_norm"),
    Weight("attn_norm", ("norm",), "post_attention_layernorm", "attention_norm"),
    Weight("mlp.gate", ("mlp", "embed"), "mlp.gate_proj", "feed_forward.w1"),
    Weight("mlp.up", ("mlp", "embed"), "mlp.up_proj", "feed_forward.w3"),
    Weight("mlp.down", ("embed", "mlp"), "mlp.down_proj", "feed_forward.w2"),
    Weight("mlp_norm", ("norm",), "post_feedforward_layernorm", "feed_forward_norm"),
)
BY_NAME = {weight.name: weight for weight in (*TOP, *LAYER)}


def axis_sizes(cfg: Model) -> dict[str, int]:
    """The length of every logical axis of a weight."""
    return {
        "cycle": cfg.n_cycles,
        "vocab": cfg.padded_vocab_size,
        "embed": cfg.d_model,
        "norm": cfg.d_model,
        "heads": cfg.n_heads * cfg.head_dim,
        "kv_heads": cfg.n_kv_heads * cfg.head_dim,
        "mlp": cfg.mlp_hidden,
    }


def shape(weight: Weight, cfg: Model) -> tuple[int, ...]:
    """Of one layer's weight, the vocabulary padded."""
    sizes = axis_sizes(cfg)
    return tuple(sizes[axis] for axis in weight.axes)


@dataclass(frozen=True)
class Leaf:
    """One array of our parameter tree and the tensors that it is made of.

    tensor_shape: of each tensor on the other sides (the vocabulary padded).
    hf, olmo_core: one name a cycle where the array is stacked, else one name.
    """

    path: tuple[str, ...]
    weight: Weight
    tensor_shape: tuple[int, ...]
    hf: tuple[str, ...]
    olmo_core: tuple[str, ...]
    stacked: bool

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array here; the leading axis counts cycles where it is stacked."""
        return (len(self.hf), *self.tensor_shape) if self.stacked else self.tensor_shape

    @property
    def axes(self) -> tuple[str, ...]:
        """The logical name of every axis of the array here."""
        return ("cycle", *self.weight.axes) if self.stacked else self.weight.axes

    @property
    def vocabulary(self) -> bool:
        """Whether rows are token ids, so that padded and released checkpoints differ in them."""
        return self.weight.axes[0] == "vocab"


def leaves(cfg: Model) -> list[Leaf]:
    """Every array of the parameter tree: embedding, final norm, head, then the layers by their
    place in the pattern.
    """

    def leaf(prefix: tuple[str, ...], weight: Weight, layers: list[int]) -> Leaf:
        hf = [f"model.layers.{i}.{weight.hf}" for i in layers] or [weight.hf]
        native = [f"blocks.{i}.{weight.olmo_core}" for i in layers] or [weight.olmo_core]
        return Leaf(
            (*prefix, *weight.name.split(".")),
            weight,
            shape(weight, cfg),
            tuple(f"{name}.weight" for name in hf),
            tuple(f"{name}.weight" for name in native),
            stacked=bool(layers),
        )

    places = len(cfg.pattern)
    return [leaf((), weight, []) for weight in TOP] + [
        leaf(("cycles", f"layer_{j}"), weight, list(range(j, cfg.n_layers, places)))
        for j in range(places)
        for weight in LAYER
    ]


def logical_axes(cfg: Model) -> dict:
    """The parameter tree with every array's axes in its place (tuples of names)."""
    tree: dict = {}
    for leaf in leaves(cfg):
        put(tree, leaf.path, leaf.axes)
    return tree


def n_params(cfg: Model) -> int:
    """Trainable numbers, padded vocabulary rows included, as OLMo-core counts them."""
    return sum(math.prod(leaf.shape) for leaf in leaves(cfg))


def n_matmul_params(cfg: Model) -> int:
    """Weights that a token is multiplied with: all matrices but the embedding table."""
    return sum(math.prod(leaf.shape) for leaf in leaves(cfg) if leaf.weight.is_matmul)
