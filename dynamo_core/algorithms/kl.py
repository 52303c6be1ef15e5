"""KL penalty to a reference policy: estimators, as a reward, as a loss, and its coefficient.

With k1 = log pi - log ref (a ~ pi):  k2 = k1^2 / 2,  k3 = exp(-k1) - 1 + k1.
E k1 = E k3 = KL(pi||ref). As a differentiable loss the estimators are not alike: the expected
gradient of plain k1 is zero, that of plain k3 belongs to the forward KL. `loss` therefore weights
by the ratio rho = pi / pi_old,
    k1, k3:  rho k (gradient through rho)          k2:  sg(rho) k2
whose expected gradient under rollouts of pi_old is that of KL(pi||ref), on policy and off.
Estimators: joschu.net/blog/kl-approx; ratio weighting: DeepSeek-V3.2, huggingface/trl#4967.

Shapes: B rows, T response tokens; `estimate` takes any shape.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from dynamo_core.algorithms.checks import (
    at_least_float32,
    choice,
    number,
    require,
    same_shape,
    state_entry,
    zero_outside,
)

KINDS: Final = ("k1", "k2", "k3")
_LOG_RATIO_MAX: Final = 20.0


def estimate(log_prob: torch.Tensor, ref_log_prob: torch.Tensor, kind: str) -> torch.Tensor:
    """k1, k2 or k3 of every element, any shape, not clamped, differentiable as it stands.

    For a loss use `loss`: the gradient of the bare estimate is not that of the KL for k1 and k3.

    Raises:
        AlgorithmError: unknown kind, shapes that do not match.
    """
    choice("kind", kind, KINDS)
    same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob)
    k1 = at_least_float32(log_prob) - at_least_float32(ref_log_prob)
    if kind == "k1":
        return k1
    return 0.5 * k1 * k1 if kind == "k2" else torch.expm1(-k1) + k1


def reward_penalty(
    log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    mask: torch.Tensor,
    *,
    coefficient: float,
    kind: str = "k1",
) -> torch.Tensor:
    """-coefficient k [B, T], detached, zero outside the mask: to be added to the token rewards.

    With k1 the policy gradient of this reward is the exact gradient of the penalty.

    Raises:
        AlgorithmError: unknown kind, shapes that do not match, negative coefficient.
    """
    number("coefficient", coefficient, 0)
    same_shape(mask=mask, log_prob=log_prob)
    k = estimate(log_prob.detach(), ref_log_prob.detach(), kind)
    return zero_outside(mask != 0, -coefficient * k)


def loss(
    log_prob: torch.Tensor,
    ref_log_prob: torch.Tensor,
    weights: torch.Tensor,
    *,
    kind: str,
    old_log_prob: torch.Tensor | None = None,
) -> torch.Tensor:
    """sum w rho k, scalar, with the gradient of KL(pi||ref) (module docstring).

    Args:
        log_prob: with gradient, [B, T].
        ref_log_prob: of the reference, [B, T].
        weights: [B, T], zero where a token is not trained.
        old_log_prob: of the sampling policy, [B, T]; None means on policy (rho = 1).

    Raises:
        AlgorithmError: unknown kind, shapes that do not match.
    """
    same_shape(log_prob=log_prob, ref_log_prob=ref_log_prob, weights=weights)
    chosen = weights != 0
    new = zero_outside(chosen, at_least_float32(log_prob))
    ref = zero_outside(chosen, at_least_float32(ref_log_prob.detach()))
    old = new.detach()
    if old_log_prob is not None:
        same_shape(log_prob=log_prob, old_log_prob=old_log_prob)
        old = zero_outside(chosen, at_least_float32(old_log_prob.detach()))
    ratio = (new - old).clamp(-_LOG_RATIO_MAX, _LOG_RATIO_MAX).exp()
    if kind == "k2":
        ratio = ratio.detach()
    return (weights.to(new.dtype) * ratio * estimate(new, ref, kind)).sum()


class FixedController:
    """A coefficient that never moves."""

    def __init__(self, coefficient: float) -> None:
        """Raises AlgorithmError for a negative coefficient."""
        self.coefficient = number("coefficient", coefficient, 0)

    def update(self, kl: float, n: int) -> None:
        """Nothing: the coefficient is fixed."""

    def state_dict(self) -> dict[str, Any]:
        """The coefficient."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises AlgorithmError if `state` has no coefficient."""
        self.coefficient = number("coefficient", state_entry(state, "coefficient"), 0)


class AdaptiveController(FixedController):
    """beta <- beta (1 + clip(KL/target - 1, -0.2, 0.2) n / horizon). Source: arXiv 1909.08593.

    Update once per rollout phase with the KL over all ranks; the value belongs in the checkpoint.
    """

    def __init__(self, coefficient: float, *, target: float, horizon: int) -> None:
        """Raises AlgorithmError for a coefficient, target or horizon that is not positive."""
        super().__init__(coefficient)
        for name, value in (("coefficient", coefficient), ("target", target), ("horizon", horizon)):
            require(value > 0, name, value, "positive")
        self.target = number("target", target, 0)
        self.horizon = number("horizon", horizon, 0)

    def update(self, kl: float, n: int) -> None:
        """Move towards the target, given the mean KL of the last `n` rollouts.

        Raises:
            AlgorithmError: a KL that is not finite, a negative n.
        """
        number("kl", kl, -math.inf)
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coefficient *= max(1 + error * number("n", n, 0) / self.horizon, 0.0)
