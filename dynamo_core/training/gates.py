"""What must hold before a step of reinforce trains: finite numbers always, and three identities at the first step.

Sampler, scorer, reference and critic start from one model. Where they disagree at the first step, something is wrong
that no later metric would show: a stale cache, another temperature, another precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from dynamo_core.algorithms import kl
from dynamo_core.errors import NumericalFailure
from dynamo_core.training.guard import named

if TYPE_CHECKING:
    from dynamo_core.training.critic import Values
    from dynamo_core.training.policy_update import PolicyBatch


@dataclass(frozen=True)
class Gate:
    """A number that is 0 but for rounding, its bound by precision, and what to do about a miss."""

    name: str
    what: str
    bounds: dict[str, float]
    remedy: str

    def check(self, measured: float, precision: str, step: int) -> dict[str, float]:
        """The metric.

        Raises:
            NumericalFailure: the bound is missed.
        """
        bound = self.bounds[precision]
        if not measured <= bound:
            raise NumericalFailure(
                f"gate/{self.name}: {self.what} is {measured:.3g} before the first update, in {precision} it must be at"
                f" most {bound:g}",
                self.remedy,
                step,
            )
        return {f"gate/{self.name}": measured}


_SAMPLER: Final = "sampler and trainer disagree: use engine.precision float32, and sampling.temperature for both"
_RATIO_BOUNDS: Final = {"float32": 1e-4, "bfloat16": 5e-2}
RATIO: Final = Gate("ratio", "the mean |ratio - 1| of the sampled tokens", _RATIO_BOUNDS, _SAMPLER)
LOG_RATIO: Final = Gate("log_ratio", "the mean |log ratio| of the sampled tokens", _RATIO_BOUNDS, _SAMPLER)
# Of second order in the log ratio: float32 errors of 1e-4 give 1e-8, those of bfloat16 some 1e-3.
REFERENCE_KL: Final = Gate(
    "reference_kl", "the KL to the reference", {"float32": 1e-6, "bfloat16": 1e-2},
    "the reference is not the model that the stage starts from: check model and model_from",
)  # fmt: skip
CRITIC_VALUE: Final = Gate(
    "critic_value", "the largest |value| of the critic", {"float32": 0.0, "bfloat16": 0.0},
    "its value head must start at zero",
)  # fmt: skip
GATES: Final = (RATIO, LOG_RATIO, REFERENCE_KL, CRITIC_VALUE)


def ratio_gates(ratio: float, log_ratio: float, precision: str, *, step: int) -> dict[str, float]:
    """Of the first mini-batch that the policy learns from.

    Means, not maxima: a fault in one token of a thousand still shows, a single badly rounded token does not.

    Args:
        ratio: mean |ratio - 1|.
        log_ratio: mean |log ratio|.
    """
    return {**RATIO.check(ratio, precision, step), **LOG_RATIO.check(log_ratio, precision, step)}


def start_gates(
    batch: PolicyBatch, values: Values | None, reference_BL: torch.Tensor | None, precision: str
) -> dict[str, float]:
    """Of critic and reference, in the first step of a stage."""
    found: dict[str, float] = {}
    if reference_BL is not None:
        estimate_BL = kl.estimate(batch.old_log_prob_BL, reference_BL, "k3")
        found.update(REFERENCE_KL.check(float(estimate_BL[batch.mask_BL].mean()), precision, 1))
    if values is not None:
        found.update(CRITIC_VALUE.check(float(values.values_BL.abs().max()), precision, 1))
    return found


def check_finite(
    step: int, batch: PolicyBatch, values: Values | None = None, reference_BL: torch.Tensor | None = None
) -> None:
    """Of everything that is known of a step's rollouts before it trains.

    Raises:
        NumericalFailure: on all ranks alike, as all hold the whole step.
    """
    numbers = {
        "reward": (batch.rewards_B, "the reward function must give a number, or None where it cannot judge"),
        "log-prob of the sampler": (batch.old_log_prob_BL, "the starting model or engine.precision is broken"),
        "entropy of the sampler": (batch.entropy_BL, "the starting model or engine.precision is broken"),
        "entropy bracket of the sampler": (batch.bracket_BL, "the starting model or engine.precision is broken"),
    }
    if values is not None:
        numbers["critic's value"] = (values.values_BL, "lower critic.optimizer.lr")
    if reference_BL is not None:
        numbers["log-prob of the reference"] = (reference_BL, "the starting model or engine.precision is broken")
    for name, (found, remedy) in numbers.items():
        bad = ~found.isfinite()
        if bad.any():
            rows = np.flatnonzero(bad.reshape(len(bad), -1).any(-1).numpy())
            raise NumericalFailure(
                f"the {name} is {float(found[bad][0])} at step {step}, in {len(rows)} rollouts of"
                f" {named(batch.prompts_of(rows))}",
                remedy,
                step,
            )
