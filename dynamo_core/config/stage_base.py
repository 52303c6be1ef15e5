"""Fields that several stages share."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dynamo_core.config.base import Engine, Frozen, Optimizer, PositiveFloat, PositiveInt, Resources
from dynamo_core.config.models import Lora

Batching = Literal["padded", "packed"]
"""padded: one row a line, pads behind it; packed: several rows a line, which do not see each other."""


class KeepBest(Frozen):
    """Save the model of the best checkpoint instead of the last one's."""

    metric: Annotated[str, Field(min_length=1)]
    """A metric of the stage, such as reward/mean or train/loss; its mean since the checkpoint before counts."""
    mode: Literal["max", "min"] = "max"


class Checkpoints(Frozen):
    """When a training stage saves its whole state, so that an interrupted run goes on.

    Not part of the cache key, but for `keep_best` and the `every` that it then depends on.
    """

    every: PositiveInt = 50
    """Steps between checkpoints."""
    minutes: PositiveFloat = 10.0
    """A checkpoint is also saved when the last one is this old."""
    keep_last: PositiveInt = 2
    keep_best: KeepBest | None = None
    """null: the model after the last step is saved."""
    max_minutes: PositiveFloat | None = None
    """The stage saves a checkpoint and stops before it runs longer (a job's time limit); the next run goes on."""


class BaseStage(Frozen):
    """A stage of a recipe."""

    resources: Resources | None = None
    """What differs from the recipe's resources; loading a recipe fills in the rest."""


class TrainingStage(BaseStage):
    """A stage that trains a model with DeepSpeed."""

    steps: PositiveInt
    """sft, distill, dpo: optimizer steps. reinforce: rollout steps of `updates_per_step` optimizer steps."""
    micro_batch_size: PositiveInt
    """Rows (dpo: pairs) a rank computes at once; changes memory and speed, not the result."""
    lora: Lora | None = None
    """Train adapters instead of all weights."""
    optimizer: Optimizer
    engine: Engine = Engine()
    checkpoints: Checkpoints = Checkpoints()

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole stage."""
        return self.steps

    @model_validator(mode="after")
    def _trainable(self) -> Self:
        if self.optimizer.warmup_steps >= self.optimizer_steps:
            raise ValueError(
                f"optimizer.warmup_steps ({self.optimizer.warmup_steps}) must be below the stage's"
                f" {self.optimizer_steps} optimizer steps"
            )
        if self.engine.precision == "bfloat16" and self.engine.zero_stage == 0:
            raise ValueError("engine.precision bfloat16 needs engine.zero_stage 1 to 3, which keep float32 masters")
        if self.lora is not None and self.engine.zero_stage == 3:
            raise ValueError("lora needs engine.zero_stage 0 to 2: frozen weights are not sharded")
        if self.engine.offload != "none" and self.engine.zero_stage == 0:
            raise ValueError("engine.offload needs engine.zero_stage 1 to 3: stage 0 has no sharded states to move")
        return self
