"""Olmo 3 as Flax NNX modules, written for one device and one layer; the cycles are stacked and scanned.

B batch, S sequence, D model width, H query heads, G key/value heads, K head width, F MLP width, V vocabulary,
C cycles (repetitions of the layer pattern). Matrices are (out, in), as in PyTorch, so converting copies bytes.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from olmo_core_jax.model import weights
from olmo_core_jax.model.attention import attend
from olmo_core_jax.model.linear import linear
from olmo_core_jax.model.masks import FULL
from olmo_core_jax.model.norm import rms_norm
from olmo_core_jax.model.options import ModelOptions
from olmo_core_jax.model.remat import rematerialise, save
from olmo_core_jax.model.rope import Rope, apply_rope, rope_tables
from olmo_core_jax.recipes.schema import Model

DEFAULT = ModelOptions()
CUT = 3.0  # initial weights lie within this many standard deviations


def parameter(name: str, cfg: Model, rngs: nnx.Rngs) -> nnx.Param:
    """A fresh weight of the table, fp32: a gain is ones, a matrix a normal of init_std cut at 3 deviations."""
    shape = weights.shape(weights.BY_NAME[name], cfg)
    if len(shape) == 1:
        return nnx.Param(jnp.ones(shape, jnp.float32))
    draw = jax.random.truncated_normal(rngs.params(), -CUT, CUT, shape, jnp.float32)
    return nnx.Param(cfg.init_std * draw)


def norm(x: jax.Array, weight: nnx.Param, eps: float) -> jax.Array:
    """RMS norm with the gain that a mixed-precision run sees: the master's copy in the compute dtype."""
    return rms_norm(x, weight[...].astype(x.dtype), eps)


def scanned(cfg: Model, opts: ModelOptions) -> bool:
    """Whether cycles run in a loop: one alone does not."""
    return opts.scan_layers and cfg.n_cycles > 1


class Attention(nnx.Module):
    """Projections, QK-norm over the whole projected vector, rotary embedding, attention, output projection."""

    def __init__(self, cfg: Model, window: int, opts: ModelOptions, *, rngs: nnx.Rngs):
        self.q = parameter("attn.q", cfg, rngs)
        self.k = parameter("attn.k", cfg, rngs)
        self.v = parameter("attn.v", cfg, rngs)
        self.out = parameter("attn.out", cfg, rngs)
        self.q_norm = parameter("attn.q_norm", cfg, rngs)
        self.k_norm = parameter("attn.k_norm", cfg, rngs)
        self.window, self.head_dim, self.eps, self.opts = window, cfg.head_dim, cfg.norm_eps, opts

    def __call__(self, x_BSD: jax.Array, rope: Rope) -> jax.Array:
        q = norm(save(linear(x_BSD, self.q[...]), "q"), self.q_norm, self.eps)
        k = norm(save(linear(x_BSD, self.k[...]), "k"), self.k_norm, self.eps)
        v = save(linear(x_BSD, self.v[...]), "v")
        a_BSHK = attend(
            apply_rope(self._heads(q), rope),
            apply_rope(self._heads(k), rope),
            self._heads(v),
            window=self.window,
            kernel=self.opts.attention,
            shard=self.opts.shard,
        )
        return save(linear(a_BSHK.reshape(*q.shape), self.out[...]), "attention_out")

    def _heads(self, x: jax.Array) -> jax.Array:
        x_BSNK = x.reshape(*x.shape[:2], -1, self.head_dim)
        return self.opts.constrain(x_BSNK, "batch", "sequence", "act_heads", None)


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, cfg: Model, opts: ModelOptions, *, rngs: nnx.Rngs):
        self.gate = parameter("mlp.gate", cfg, rngs)
        self.up = parameter("mlp.up", cfg, rngs)
        self.down = parameter("mlp.down", cfg, rngs)
        self.opts = opts

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        gate_BSF = save(linear(x_BSD, self.gate[...]), "gate")
        up_BSF = save(linear(x_BSD, self.up[...]), "up")
        h_BSF = self.opts.constrain(jax.nn.silu(gate_BSF) * up_BSF, "batch", "sequence", "act_mlp")
        return save(linear(h_BSF, self.down[...]), "down")


class Layer(nnx.Module):
    """x + norm(attention(x)), then h + norm(mlp(h)): the norms follow the branches and the stream is never normed."""

    def __init__(self, cfg: Model, window: int, opts: ModelOptions, *, rngs: nnx.Rngs):
        self.attn = Attention(cfg, window, opts, rngs=rngs)
        self.attn_norm = parameter("attn_norm", cfg, rngs)
        self.mlp = MLP(cfg, opts, rngs=rngs)
        self.mlp_norm = parameter("mlp_norm", cfg, rngs)
        self.eps, self.opts = cfg.norm_eps, opts

    def __call__(self, x_BSD: jax.Array, rope: Rope) -> jax.Array:
        return self.parts(x_BSD, rope)["out"]

    def parts(self, x_BSD: jax.Array, rope: Rope) -> dict[str, jax.Array]:
        """What the layer computes on the way, and `out`, its output; attn and mlp are before their norms."""
        x_BSD = save(x_BSD, "layer_input")
        attn = self.attn(x_BSD, rope)
        h_BSD = x_BSD + norm(attn, self.attn_norm, self.eps)
        mlp = self.mlp(h_BSD)
        out_BSD = h_BSD + norm(mlp, self.mlp_norm, self.eps)
        out_BSD = self.opts.constrain(out_BSD, "batch", "sequence", "act_embed")
        return {"attn": attn, "attn_residual": h_BSD, "mlp": mlp, "out": out_BSD}


class Cycle(nnx.Module):
    """One repetition of the layer pattern: layer_0 .. layer_{P-1}."""

    def __init__(self, cfg: Model, opts: ModelOptions, *, rngs: nnx.Rngs):
        self.pattern, self.opts, self.scanned = tuple(cfg.pattern), opts, scanned(cfg, opts)
        for j, window in enumerate(self.pattern):
            setattr(self, f"layer_{j}", Layer(cfg, window, opts, rngs=rngs))

    def __call__(self, x_BSD: jax.Array, ropes: dict[bool, Rope]) -> jax.Array:
        opts = self.opts
        run = rematerialise(
            Layer.__call__, opts.remat, scanned=self.scanned, platform=opts.platform
        )
        for j, window in enumerate(self.pattern):
            x_BSD = run(getattr(self, f"layer_{j}"), x_BSD, ropes[window == FULL])
        return x_BSD


class Weight(nnx.Module):
    """A module that is nothing but its weight: embedding table, final gain, head."""

    def __init__(self, weight: nnx.Param):
        self.weight = weight


class Olmo3(nnx.Module):
    """The whole model. `cycles` holds one Cycle whose parameters carry a leading axis of n_cycles."""

    def __init__(self, cfg: Model, opts: ModelOptions = DEFAULT, *, rngs: nnx.Rngs):
        self.cfg, self.opts = cfg, opts
        self.embed = Weight(parameter("embed.weight", cfg, rngs))
        make = nnx.vmap(lambda keys: Cycle(cfg, opts, rngs=keys))
        self.cycles = nnx.split_rngs(splits=cfg.n_cycles)(make)(rngs)
        self.final_norm = Weight(parameter("final_norm.weight", cfg, rngs))
        self.lm_head = Weight(parameter("lm_head.weight", cfg, rngs))

    def embedded(self, tokens_BS: jax.Array) -> jax.Array:
        """The first layer's input, [B, S, D] in the compute dtype."""
        x_BSD = jnp.asarray(self.embed.weight[...])[tokens_BS].astype(self.opts.compute_dtype)
        return self.opts.constrain(x_BSD, "batch", "sequence", "act_embed")

    def hidden_states(self, tokens_BS: jax.Array) -> jax.Array:
        """The head's input: [B, S, D] in the compute dtype, after the final norm."""
        x_BSD = self.embedded(tokens_BS)
        ropes = rope_tables(self.cfg, tokens_BS.shape[1])
        if scanned(self.cfg, self.opts):
            x_BSD, _ = jax.lax.scan(lambda x, cycle: (cycle(x, ropes), None), x_BSD, self.cycles)
        else:
            for c in range(self.cfg.n_cycles):
                x_BSD = self.cycle(c)(x_BSD, ropes)
        return norm(x_BSD, self.final_norm.weight, self.cfg.norm_eps)

    def cycle(self, c: int) -> Cycle:
        """The c-th cycle, with its own slice of the stacked parameters."""
        return jax.tree.map(lambda leaf: leaf[c], self.cycles)

    def logits(self, h_BSD: jax.Array) -> jax.Array:
        """fp32 [B, S, V] of hidden states, the padded vocabulary included; products of compute-dtype values."""
        head = self.lm_head.weight[...].astype(h_BSD.dtype)
        return jnp.einsum("bsd,vd->bsv", h_BSD, head, preferred_element_type=jnp.float32)


def init_params(cfg: Model, seed: int) -> dict:
    """A fresh parameter tree (plain nested dict, fp32). Pure: under jit with out_shardings it is born sharded."""
    return nnx.to_pure_dict(nnx.state(Olmo3(cfg, rngs=nnx.Rngs(params=seed)), nnx.Param))


def abstract_params(cfg: Model) -> dict:
    """The same tree of ShapeDtypeStructs; nothing is allocated."""
    return jax.eval_shape(lambda: init_params(cfg, 0))


def bind(params: dict, cfg: Model, opts: ModelOptions) -> Olmo3:
    """The module with these parameters in it."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: Olmo3(cfg, opts, rngs=nnx.Rngs(params=0))))
    return nnx.merge(graph, params)


def hidden_states(params: dict, tokens_BS: jax.Array, cfg: Model, opts: ModelOptions) -> jax.Array:
    """[B, S, D] in the compute dtype, after the final norm: what the loss takes."""
    with opts.exact_matmuls():
        return bind(params, cfg, opts).hidden_states(tokens_BS)


def logits(params: dict, tokens_BS: jax.Array, cfg: Model, opts: ModelOptions) -> jax.Array:
    """fp32 [B, S, V], V the padded vocabulary."""
    with opts.exact_matmuls():
        model = bind(params, cfg, opts)
        return model.logits(model.hidden_states(tokens_BS))


def trace(
    params: dict, tokens_BS: jax.Array, cfg: Model, opts: ModelOptions
) -> dict[str, jax.Array]:
    """Outputs of every part, for parity: embed, layers.{i}.{attn,attn_residual,mlp,out}, final_norm, logits.

    Not to be jitted as a whole: layer after layer runs the one program that its kind (sliding or full) compiles to.
    """
    run = jax.jit(Layer.parts)
    with opts.exact_matmuls():
        model, ropes = bind(params, cfg, opts), rope_tables(cfg, tokens_BS.shape[1])
        seen = {"embed": (x_BSD := model.embedded(tokens_BS))}
        for c in range(cfg.n_cycles):
            cycle = model.cycle(c)  # copies its parameters: once a cycle, not once a layer
            for j, window in enumerate(cfg.pattern):
                parts = run(getattr(cycle, f"layer_{j}"), x_BSD, ropes[window == FULL])
                i = c * len(cfg.pattern) + j
                seen |= {f"layers.{i}.{name}": part for name, part in parts.items()}
                x_BSD = parts["out"]
        seen["final_norm"] = norm(x_BSD, model.final_norm.weight, cfg.norm_eps)
        seen["logits"] = model.logits(seen["final_norm"])
    return seen
