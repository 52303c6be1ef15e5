"""Fields that several stages share."""

from __future__ import annotations

from dynamo_core.config.base import Engine, Frozen, Optimizer, PositiveInt, Resources


class BaseStage(Frozen):
    """A stage of a recipe."""

    resources: Resources | None = None
    """Overrides the recipe's resources for this stage."""


class TrainingStage(BaseStage):
    """A stage that trains a model with DeepSpeed."""

    steps: PositiveInt
    """sft, distill: optimizer steps. reinforce: rollout steps of `updates_per_step` optimizer steps."""
    micro_batch_size: PositiveInt
    """Rows a rank computes at once; changes memory and speed, not the result."""
    optimizer: Optimizer
    engine: Engine = Engine()
