"""The switches of the method, one class each: allocation, statistics, modulation, loss, entropy methods."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from dynamo_core.config.base import (
    Frozen,
    NonNegativeFloat,
    NonNegativeInt,
    Optimizer,
    PositiveFloat,
    PositiveInt,
    Share,
)

PositiveShare = Annotated[float, Field(gt=0, le=1)]

LEAST_GROUP: Final = {
    "grpo": 2,
    "dr_grpo": 2,
    "rloo": 2,
    "posterior_std_grpo": 2,
    "reinforce_pp": 1,
    "w_reinforce": 1,
    "nsr": 1,
    "gae": 1,
}
"""Fewest rollouts a prompt that an estimator works with: those that compare siblings need two."""
LEAST_OBJECTIVE: Final = {"neyman": 1, "rloo": 2, "drgrpo": 3}
"""Fewest rollouts from which on the objective is convex."""
LEAST_OFFICIAL: Final = 4
"""The official rank ignores prompts with fewer rollouts."""


class Allocation(Frozen):
    """How the rollouts of a step are spread over its prompts."""

    rule: Literal["uniform", "optimal", "waterfall_variance", "waterfall_std", "official"]
    """official: the release's, its rank from lifetime counts, then waterfall_variance."""
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
    """What is minimised, as a sum of token terms."""

    type: Literal["ppo", "gspo", "cispo"] = "ppo"
    """ppo: the clipped surrogate; gspo: its ratio is the sequence's; cispo: the ratio is clipped, its gradient kept."""
    eps_low: Annotated[float, Field(gt=0, le=1)]
    eps_high: PositiveFloat
    dual_clip: Annotated[float, Field(gt=1)] | None
    """Bound on the loss of negative advantages, in multiples of |A|. Only for ppo."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Entropy bonus of each token, weighed like its loss."""

    @model_validator(mode="after")
    def _dual_clip_is_of_ppo(self) -> Self:
        if self.type != "ppo" and self.dual_clip is not None:
            raise ValueError(f"dual_clip ({self.dual_clip:g}) belongs to type 'ppo': set it to null for '{self.type}'")
        return self


class ClipCov(Frozen):
    """Some tokens whose log-prob and advantage have a large covariance give no gradient (arXiv 2505.22617)."""

    type: Literal["clip_cov"]
    share: PositiveShare = 2e-4
    low: float = 1.0
    high: float = 5.0

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) must not exceed high ({self.high:g})")
        return self


class KlCov(Frozen):
    """The tokens of largest covariance pay for leaving the sampling policy (arXiv 2505.22617)."""

    type: Literal["kl_cov"]
    share: PositiveShare = 2e-4
    coefficient: PositiveFloat = 1.0


class EntropyAdvantage(Frozen):
    """A + min(alpha H, |A| / kappa) (arXiv 2506.14758)."""

    type: Literal["entropy_advantage"]
    alpha: PositiveFloat = 0.4
    kappa: Annotated[float, Field(gt=1)] = 2.0


class ForkTokens(Frozen):
    """Only the tokens of highest entropy give gradient (arXiv 2506.01939)."""

    type: Literal["fork_tokens"]
    share: PositiveShare = 0.2


EntropyMethod = Annotated[ClipCov | KlCov | EntropyAdvantage | ForkTokens, Field(discriminator="type")]


class Critic(Frozen):
    """A value model of its own: for estimator `gae`, and as a prior for prompts that were never tried."""

    optimizer: Optimizer
    warmup_steps: NonNegativeInt = 0
    """First rollout steps in which the critic learns and the policy waits."""
    value_clip: PositiveFloat | None = None
    """Largest change of a value that its loss rewards within a step."""
    gamma: Share = 1.0
    lam: Share = 1.0
    """GAE's lambda; below 1 the critic's bias enters the advantages."""
    whiten: Literal["none", "tokens", "prompts"] = "none"
    """Advantages to mean 0 and std 1 over the step: every token alike, or every prompt alike."""
    prior_strength: PositiveFloat | None = None
    """Pseudo-rollouts that the value of an untried prompt counts for in allocation; null: the Beta prior alone."""


class Kl(Frozen):
    """A penalty for leaving the model that the stage started from."""

    place: Literal["reward", "loss"]
    kind: Literal["k1", "k2", "k3"]
    coefficient: PositiveFloat
    target: PositiveFloat | None = None
    """Mean KL a token to steer the coefficient to (Ziegler et al. 2019); null: it stays."""
    horizon: PositiveInt = 10000
    """Rollouts in which the coefficient may double."""
