"""The reinforce stage: one switch for every part of the method, so that each ablation is a recipe."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import model_validator

from dynamo_core.config.base import Frozen, NonNegativeFloat, PositiveFloat, PositiveInt, Sampling
from dynamo_core.config.method import (
    LEAST_GROUP,
    LEAST_OBJECTIVE,
    LEAST_OFFICIAL,
    Allocation,
    ClipCov,
    Critic,
    EntropyMethod,
    ForkTokens,
    Kl,
    Modulation,
    PolicyLoss,
    Statistics,
)
from dynamo_core.config.models import PretrainedModel
from dynamo_core.config.stage_base import Batching, TrainingStage


class MathAnswerReward(Frozen):
    """1 when the completion's final answer equals the prompt's own answer, else 0."""

    type: Literal["math_answer"] = "math_answer"
    format: Literal["gsm8k", "boxed"] = "gsm8k"
    """gsm8k: the number after the last ####; boxed: the last complete \\boxed{}."""


class ReinforceStage(TrainingStage):
    """Policy optimisation with allocated rollouts and modulated advantages."""

    type: Literal["reinforce"]
    preset: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "ppo", "faithful", "exact", "exact_ppo"]
    """Fills in every switch below that the recipe leaves out, while the recipe is loaded."""
    model: PretrainedModel | None = None
    """The policy to start from; leave out with `model_from`."""
    model_from: str | None = None
    data_from: str | None = None
    batching: Batching = "padded"
    """How rows stand in a micro-batch; changes memory and speed, not the result."""
    prompts_per_step: PositiveInt
    rollouts_per_prompt: PositiveInt
    """The mean; the step's budget is prompts_per_step x rollouts_per_prompt."""
    updates_per_step: PositiveInt = 1
    """Mini-batches of whole prompts made of one step's rollouts, one optimizer step each."""
    target_kl: PositiveFloat | None = None
    """The rest of a step's mini-batches is skipped once approx_kl of the last one exceeds it; null: none ever is."""
    sampling: Sampling
    reward: MathAnswerReward = MathAnswerReward()
    overlong: Literal["keep", "mask", "bootstrap"] = "keep"
    """Rollouts cut off at max_new_tokens. mask: they leave the loss, not the baselines and statistics; bootstrap: the
    critic's value of what they have so far is added to their reward."""
    truncation_penalty: NonNegativeFloat = 0.0
    """Subtracted from the reward of rollouts cut off at max_new_tokens; their correctness stays what it is."""
    estimator: Literal["grpo", "dr_grpo", "rloo", "posterior_std_grpo", "reinforce_pp", "w_reinforce", "nsr", "gae"]
    critic: Critic | None = None
    """For estimator `gae`, and only for it."""
    kl: Kl | None = None
    """Penalty towards the starting model, of which a frozen copy is kept."""
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
    entropy_method: EntropyMethod | None = None
    """A published way to steer entropy, as a baseline to modulation."""

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
        """Fewest rollouts a prompt: the bound rounded up, at least what estimator, rule and objective need."""
        return max(math.ceil(round(self.allocation.low * self.rollouts_per_prompt, 9)), self._least)

    @property
    def _least(self) -> int:
        rule = self.allocation.rule
        if rule == "official":
            return LEAST_OFFICIAL
        if rule == "optimal":
            return max(LEAST_GROUP[self.estimator], LEAST_OBJECTIVE[self.allocation.objective])
        return LEAST_GROUP[self.estimator]

    @property
    def n_high(self) -> int:
        """Most rollouts a prompt."""
        return math.floor(round(self.allocation.high * self.rollouts_per_prompt, 9))

    @model_validator(mode="after")
    def _feasible(self) -> Self:
        if not self.n_low <= self.rollouts_per_prompt <= self.n_high:
            raise ValueError(
                f"rollouts_per_prompt ({self.rollouts_per_prompt}) must lie within the bounds"
                f" {self.n_low}..{self.n_high} that allocation and the estimator '{self.estimator}' give:"
                f" the budget {self.budget} is outside"
                f" {self.prompts_per_step}x{self.n_low}..{self.prompts_per_step}x{self.n_high}"
            )
        masks_tokens = isinstance(self.entropy_method, ClipCov | ForkTokens)
        if self.loss.type == "gspo" and masks_tokens:
            raise ValueError("loss.type 'gspo' needs whole rows: entropy_method may not drop tokens of them")
        if (self.estimator == "gae") != (self.critic is not None):
            raise ValueError(f"estimator '{self.estimator}' and critic do not fit: 'gae' has one, the others have none")
        if self.overlong == "bootstrap" and self.critic is None:
            raise ValueError("overlong 'bootstrap' needs the critic of estimator 'gae'")
        if self.critic is not None and self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps ({self.critic.warmup_steps}) must be below steps ({self.steps}):"
                " the policy would never learn"
            )
        if self.prompts_per_step % self.updates_per_step:
            raise ValueError(
                f"updates_per_step ({self.updates_per_step}) must divide prompts_per_step ({self.prompts_per_step})"
            )
        return self
