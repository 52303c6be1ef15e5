"""What every part of a recipe shares: frozen, unknown keys refused, no silent casts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Frozen(BaseModel):
    """Base of all recipe parts. Strict: "false" is not a bool, "3" is not a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Resources(Frozen):
    """The processes a stage runs on."""

    processes: PositiveInt = 1
    """Ranks. More than one runs under torchrun."""
    threads: PositiveInt = 1
    """CPU threads a rank. processes x threads must not exceed the cores."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where a GPU is present, else the CPU."""
    timeout_minutes: PositiveFloat | None = None
    """A stage that runs longer is stopped, its whole process tree with it. Not part of the cache key."""


class Optimizer(Frozen):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm; a larger one is scaled down to it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0


Precision = Literal["float32", "bfloat16"]


class Engine(Frozen):
    """How DeepSpeed holds the model while it trains."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """0 is fastest for tiny models; 1 shards optimizer states, 2 gradients as well, 3 parameters as well."""
    offload: Literal["none", "cpu"] = "none"
    """cpu: optimizer states (under stage 3 parameters too) live in the main memory. Needs zero_stage 1 or more."""
    precision: Precision = "float32"
    """bfloat16 keeps float32 master weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""


class Sampling(Frozen):
    """How answers are drawn."""

    temperature: PositiveFloat = 1.0
    max_new_tokens: PositiveInt
    batch_tokens: PositiveInt = 65536
    """Upper bound on cached tokens (rows x longest possible row) decoded at once: bounds memory."""
