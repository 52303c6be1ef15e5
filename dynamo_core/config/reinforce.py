"""The reinforce stage: one switch for every part of the method, so that each ablation is a recipe."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dynamo_core.config.base import Frozen, NonNegativeFloat, PositiveFloat, PositiveInt, Sampling, Share
from dynamo_core.config.models import PretrainedModel
from dynamo_core.config.stage_base import TrainingStage


class Allocation(Frozen):
    """How the rollouts of a step are spread over its prompts."""

    rule: Literal["uniform", "optimal", "waterfall_variance", "waterfall_std"]
    objective: Literal["neyman", "rloo", "drgrpo"]
    """The variance that `optimal` minimises: sum c/n, c/(n-1) or c(n-1)/n^2."""
    low: PositiveFloat
    """Fewest rollouts a prompt, as a multiple of the mean."""
    high: PositiveFloat
    """Most rollouts a prompt, as a multiple of the mean."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) must not exceed high ({self.high:g})")
        if self.low > 1 or self.high < 1:
            raise ValueError(
                f"low ({self.low:g}) must be at most 1 and high ({self.high:g}) at least 1: the mean lies between"
            )
        return self


class Statistics(Frozen):
    """The Beta posterior over each prompt's success rate."""

    prior: tuple[PositiveFloat, PositiveFloat]
    discount: Share
    """Weight of a visit after the next one; 1 counts for ever."""


class Modulation(Frozen):
    """Token-level factors on the advantages (compensation, stabilisation), each with its own switch."""

    compensation: bool
    alpha: NonNegativeFloat
    """Largest relative boost of a positive advantage, at the lowest entropy."""
    stabilisation: bool
    lambda_min: Share
    gamma: PositiveFloat
    tau: PositiveFloat
    expectation: Literal["vocabulary", "sequence"]
    """vocabulary: exact entropy change; sequence: the release's estimate."""
    normaliser: Literal["max"] | Annotated[float, Field(gt=0, lt=1)]
    """What |entropy change| is divided by: its maximum or a quantile over all of a step's rollouts."""


class PolicyLoss(Frozen):
    """The clipped surrogate."""

    eps_low: Annotated[float, Field(gt=0, lt=1)]
    eps_high: PositiveFloat
    dual_clip: Annotated[float, Field(gt=1)] | None


class MathAnswerReward(Frozen):
    """1 when the completion's final answer equals the prompt's own answer, else 0."""

    type: Literal["math_answer"] = "math_answer"
    format: Literal["gsm8k", "boxed"] = "gsm8k"
    """gsm8k: the number after the last ####; boxed: the last complete \\boxed{}."""


class ReinforceStage(TrainingStage):
    """Policy optimisation with allocated rollouts and modulated advantages."""

    type: Literal["reinforce"]
    preset: Literal["grpo", "rloo", "exact"]
    """Fills in every switch below that the recipe leaves out, while the recipe is loaded."""
    model: PretrainedModel | None = None
    """The policy to start from; leave out with `model_from`."""
    model_from: str | None = None
    data_from: str | None = None
    prompts_per_step: PositiveInt
    rollouts_per_prompt: PositiveInt
    """The mean; the step's budget is prompts_per_step x rollouts_per_prompt."""
    updates_per_step: PositiveInt = 1
    """Mini-batches of whole prompts made of one step's rollouts, one optimizer step each."""
    sampling: Sampling
    reward: MathAnswerReward = MathAnswerReward()
    estimator: Literal["grpo", "rloo"]
    allocation: Allocation
    statistics: Statistics
    aggregation: Literal[
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
        "prompt-mean-seq-mean-token-mean",
        "prompt-mean-token-mean",
        "prompt-mean-token-sum-norm",
    ]
    modulation: Modulation
    loss: PolicyLoss

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole stage."""
        return self.steps * self.updates_per_step

    @property
    def budget(self) -> int:
        """Rollouts of one step."""
        return self.prompts_per_step * self.rollouts_per_prompt

    @property
    def n_low(self) -> int:
        """Fewest rollouts a prompt: the bound rounded up, at least 2: every estimator here compares siblings."""
        return max(math.ceil(round(self.allocation.low * self.rollouts_per_prompt, 9)), 2)

    @property
    def n_high(self) -> int:
        """Most rollouts a prompt."""
        return math.floor(round(self.allocation.high * self.rollouts_per_prompt, 9))

    @model_validator(mode="after")
    def _feasible(self) -> Self:
        if not self.n_low <= self.rollouts_per_prompt <= self.n_high:
            raise ValueError(
                f"rollouts_per_prompt ({self.rollouts_per_prompt}) must lie within the bounds"
                f" {self.n_low}..{self.n_high} that allocation.low/high and the estimator '{self.estimator}' give:"
                f" the budget {self.budget} is outside"
                f" {self.prompts_per_step}x{self.n_low}..{self.prompts_per_step}x{self.n_high}"
            )
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError(
                f"updates_per_step ({self.updates_per_step}) must divide prompts_per_step ({self.prompts_per_step})"
            )
        return self
