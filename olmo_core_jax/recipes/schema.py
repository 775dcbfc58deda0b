"""What is run: the typed, validated recipe. It knows nothing of hardware (see hardware/topology.py for that).

A recipe is one YAML file. Every path in it is relative to the file itself, absolute, or a URI (gs://, https://).
Unknown keys and wrong types are refused with the field's name.
"""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from olmo_core_jax.errors import UserError

TRAINING_STAGES = ("stage1", "stage2")


class Strict(BaseModel):
    """Base of every section: immutable, no unknown keys, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RopeScaling(Strict):
    """YaRN, on full-attention layers only (Olmo 3 stage 3)."""

    kind: Literal["yarn"] = "yarn"
    factor: float = Field(default=8.0, gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    original_length: int = Field(default=8192, gt=0)


class Model(Strict):
    """Shapes of an Olmo 3 model. Defaults are the 7B's conventions.

    pattern: one entry a layer of the repeating block: a window in tokens *including the query's own*, or -1 for
    full attention. n_layers is a multiple of its length.
    """

    n_layers: int = Field(gt=0)
    d_model: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    n_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    mlp_hidden: int = Field(gt=0)
    vocab_size: int = Field(gt=0, description="real token ids")
    padded_vocab_size: int = Field(gt=0, description="rows of the embedding and the head")
    pattern: list[int] = Field(default=[4096, 4096, 4096, -1], min_length=1)
    rope_theta: float = Field(default=500_000.0, gt=1)
    rope_scaling: RopeScaling | None = None
    norm_eps: float = Field(default=1e-6, gt=0)
    init_std: float = Field(default=0.02, gt=0)

    @model_validator(mode="after")
    def _consistent(self):
        if self.n_layers % len(self.pattern):
            raise ValueError(
                f"n_layers {self.n_layers} is not a multiple of the pattern's length {len(self.pattern)}"
            )
        if any(w == 0 or w < -1 for w in self.pattern):
            raise ValueError(
                f"pattern {self.pattern}: windows are positive, or -1 for full attention"
            )
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even for rotary embeddings")
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}"
            )
        return self

    @property
    def n_cycles(self) -> int:
        """How many times the pattern repeats: the length of the layer scan."""
        return self.n_layers // len(self.pattern)


class Tokenizer(Strict):
    name: str = Field(description="fills {TOKENIZER} in mixes")
    path: str | None = Field(
        default=None, description="folder with tokenizer.json; needed for evaluation tasks"
    )
    eos_id: int
    pad_id: int
    bos_id: int | None = None


class Precision(Strict):
    """Anything but fp32 master weights and moments has to be said here, in words, and is reported."""

    compute: Literal["float32", "bfloat16"] = "float32"
    params: Literal["float32", "bfloat16"] = "float32"
    moments: Literal["float32", "bfloat16"] = "float32"
    i_accept_low_precision_state: bool = False

    @model_validator(mode="after")
    def _no_silent_demotion(self):
        if "bfloat16" in (self.params, self.moments) and not self.i_accept_low_precision_state:
            raise ValueError(
                "bfloat16 master weights or moments lose small updates; set i_accept_low_precision_state to insist"
            )
        return self


class Weights(Strict):
    """The step-0 weights: an HF Olmo 3 folder, `hub:OWNER/MODEL` with its revision, or none for our own initialisation."""

    hf: str | None = None
    revision: str | None = None
    parity: str | None = Field(
        default=None, description="npz with tokens [B,S] and the reference's fp32 logits [B,S,V]"
    )
    init_seed: int = Field(
        default=0, ge=0, lt=2**32, description="JAX makes its keys of 32 bits of a seed"
    )


class RepetitionFilter(Strict):
    """OLMo-core's n-gram filter: an instance with a period in [min, max] repeated max_count times is masked."""

    min_period: int = Field(default=1, gt=0)
    max_period: int = Field(default=13, gt=0)
    max_count: int = Field(default=32, gt=0)

    @model_validator(mode="after")
    def _has_a_period(self):
        if self.min_period > self.max_period:
            raise ValueError(f"min_period {self.min_period} is above max_period {self.max_period}")
        return self


class Data(Strict):
    mix: str = Field(
        description="manifest in OLMo-core's format: a file, a URI, or a name that ai2-olmo-core ships"
    )
    base: str = Field(description="folder or bucket that the manifest's paths are under")
    sequence_length: int = Field(gt=1)
    max_target_sequence_length: int | None = Field(default=None, gt=0)
    seed: int = Field(ge=0)
    dtype: Literal["uint8", "uint16", "uint32", "uint64"] | None = Field(
        default=None, description="default: smallest that holds the vocabulary"
    )
    source_permutation_seed: int | None = None
    repetition_filter: RepetitionFilter | None = None
    check_eos: bool = True


class Cosine(Strict):
    """Linear warm-up from 0, then a cosine to alpha_f * peak at update T."""

    kind: Literal["cosine"] = "cosine"
    peak: float = Field(gt=0)
    warmup: int = Field(ge=0)
    alpha_f: float = Field(default=0.1, ge=0)
    max_tokens: int | None = Field(
        default=None, gt=0, description="sets T; default: the stage's max_tokens"
    )


class HalfCosine(Strict):
    """Linear warm-up to the middle of a cosine, then its second half to alpha_f * peak at T."""

    kind: Literal["half_cosine"] = "half_cosine"
    peak: float = Field(gt=0)
    warmup: int = Field(ge=0)
    alpha_f: float = Field(default=0.1, ge=0)
    max_tokens: int | None = Field(default=None, gt=0)


class Linear(Strict):
    """Linear warm-up from 0 (none when warmup is 0), then linear to alpha_f * peak at T."""

    kind: Literal["linear"] = "linear"
    peak: float = Field(gt=0)
    warmup: int = Field(default=0, ge=0)
    alpha_f: float = Field(default=0.0, ge=0)
    max_tokens: int | None = Field(default=None, gt=0)


class WSD(Strict):
    """Warm-up, stable, linear decay to alpha_f * peak over the last `decay` updates before T."""

    kind: Literal["wsd"] = "wsd"
    peak: float = Field(gt=0)
    warmup: int = Field(ge=0)
    decay: int = Field(gt=0)
    alpha_f: float = Field(default=0.0, ge=0)
    max_tokens: int | None = Field(default=None, gt=0)


class Segment(Strict):
    until: int = Field(
        gt=0,
        description="last update that this segment's schedule rules (the last one: the stage's end)",
    )
    schedule: Annotated[Cosine | HalfCosine | Linear | WSD, Field(discriminator="kind")]


class Stitched(Strict):
    """Several schedules one after another, each a function of the same run step."""

    kind: Literal["stitched"] = "stitched"
    segments: list[Segment] = Field(min_length=2)
    allow_jump: float = Field(
        default=0.01,
        ge=0,
        allow_inf_nan=True,
        description="largest relative LR difference at a join; .inf: any",
    )


Schedule = Annotated[Cosine | HalfCosine | Linear | WSD | Stitched, Field(discriminator="kind")]


class SkipRule(Strict):
    """OLMo-core's guard: skip when loss or gradient norm exceed the window's mean by `sigma` deviations."""

    window: int = Field(default=128, ge=2)
    sigma: float = Field(default=6.0, gt=0)
    persist_window: bool = Field(
        default=False,
        description="false: a stage starts with an empty window, as in OLMo-core; true: with the last stage's. Within a "
        "stage the window is in every checkpoint.",
    )


class Optimizer(Strict):
    """SkipStepAdamW. Every parameter but the embedding decays with weight_decay, norm gains included."""

    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    embedding_weight_decay: float = Field(default=0.0, ge=0)
    clip_norm: float | None = Field(default=1.0, gt=0, description="null: no clipping")
    skip: SkipRule | None = SkipRule()
    adam_count_start: Literal[0, 1] = Field(
        default=1,
        description="1: as runs that saved a step-0 checkpoint with OLMo-core; 0: textbook",
    )


class Loss(Strict):
    z_loss: float = Field(default=1e-5, ge=0)
    mask_pad_targets: bool = False


class Checkpoints(Strict):
    every: int = Field(gt=0, description="updates between saves")
    landmarks: list[Annotated[int, Field(gt=0)]] = Field(
        default=[], description="steps that are saved and kept for ever"
    )
    keep: int = Field(
        default=2,
        gt=0,
        description="newest periodic checkpoints kept beside landmarks and the last one",
    )


class Reference(Strict):
    """What the stage is compared with. All optional but the curve."""

    curve: str = Field(description="CSV, a row an update, with OLMo-core's metric names")
    band: str | None = Field(
        default=None, description="the reference's second run of itself: its own noise"
    )
    batches: str | None = Field(
        default=None, description="CSV of step, sha256 of the update's token ids (uint32 LE)"
    )
    hf: dict[int, str] = Field(default={}, description="HF checkpoints by step")
    native: dict[int, str] = Field(default={}, description="native OLMo-core checkpoints by step")
    heldout: str | None = Field(
        default=None, description="JSON: the reference's own held-out loss by step and domain"
    )
    lm_eval: str | None = Field(
        default=None, description="JSON: lm-evaluation-harness results of its hf backend"
    )


class Stage(Strict):
    data: Data
    batch_tokens: int = Field(gt=0, description="tokens an update, all devices together")
    max_tokens: int = Field(gt=0, description="T = ceil(max_tokens / batch_tokens) updates")
    stop_at: int | None = Field(default=None, gt=0, description="hard stop before T")
    epochs: int = Field(default=1, gt=0, description="how often the data may be gone through")
    schedule: Schedule
    optimizer: Optimizer = Optimizer()
    loss: Loss = Loss()
    checkpoints: Checkpoints
    reference: Reference | None = None

    @model_validator(mode="after")
    def _divides(self):
        if self.batch_tokens % self.data.sequence_length:
            raise ValueError(
                f"batch_tokens {self.batch_tokens} is not a multiple of sequence_length {self.data.sequence_length}"
            )
        late = [s for s in self.checkpoints.landmarks if s > self.last_step]
        if late:
            raise ValueError(
                f"checkpoints.landmarks {late} lie after the last update {self.last_step}"
            )
        if self.stop_at and self.stop_at > self.total_steps:
            raise ValueError(
                f"stop_at {self.stop_at} is after T = {self.total_steps}: the LR schedule would be over"
            )
        return self

    @property
    def batch_instances(self) -> int:
        return self.batch_tokens // self.data.sequence_length

    @property
    def total_steps(self) -> int:
        """T, the length of the LR schedule: ceil(max_tokens / batch_tokens) (OLMo-core's trainer.max_steps)."""
        return math.ceil(self.max_tokens / self.batch_tokens)

    @property
    def last_step(self) -> int:
        return self.stop_at or self.total_steps


class Evaluation(Strict):
    heldout: dict[str, str] = Field(default={}, description="domain -> headerless raw token file")
    tasks_path: str | None = Field(
        default=None, description="folder of lm-evaluation-harness task YAML files"
    )
    tasks: list[str] = []
    limit: int | None = Field(default=None, gt=0)
    batch_size: int = Field(default=8, gt=0)


class Recipe(Strict):
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    description: str = ""
    model: Model
    tokenizer: Tokenizer
    precision: Precision = Precision()
    weights: Weights = Weights()
    stage1: Stage
    stage2: Stage | None = None
    evaluation: Evaluation = Evaluation()

    def stages(self) -> list[str]:
        """The training stages that this recipe has, in order."""
        return [name for name in TRAINING_STAGES if getattr(self, name) is not None]

    def stage(self, name: str) -> Stage:
        """The training section `stage1` or `stage2`. Raises UserError where the recipe has none of this name."""
        if name not in self.stages():
            raise UserError(
                f"recipe {self.name} has no training stage {name!r}, only {', '.join(self.stages())}"
            )
        return getattr(self, name)

    def landmarks(self) -> list[int]:
        """Stage-1 steps whose checkpoints are kept and evaluated: the recipe's landmarks, and the last update."""
        return sorted({*self.stage1.checkpoints.landmarks, self.stage1.last_step})

    @model_validator(mode="after")
    def _ids_fit(self):
        t = self.tokenizer
        for field, value in (("eos_id", t.eos_id), ("pad_id", t.pad_id), ("bos_id", t.bos_id)):
            if value is not None and not 0 <= value < self.model.vocab_size:
                raise ValueError(
                    f"tokenizer.{field} {value} is outside the vocabulary of {self.model.vocab_size}"
                )
        return self
