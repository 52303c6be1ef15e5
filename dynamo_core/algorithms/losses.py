"""Policy and value losses. Each is sum_it w_it l_it with the weights of `aggregation_weights`.

With r = exp(log_prob - old_log_prob), the clipped surrogate of PPO, arXiv 1707.06347, with separate
bounds (Clip-Higher, arXiv 2503.14476) and the dual clip of arXiv 1912.09729:
    l = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)),   and l <= -A c where A < 0.

A token is trained where its weight is not zero; whatever lies elsewhere, NaN too, reaches neither
the value nor the gradient. Since weights are global, losses of micro-batches and ranks simply add.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

import torch

from dynamo_core.algorithms.aggregation import AGGREGATIONS, aggregation_weights
from dynamo_core.algorithms.checks import (
    at_least_float32,
    number,
    require,
    same_shape,
    selection,
    zero_outside,
)
from dynamo_core.algorithms.loss_variants import (
    cispo_loss,
    gspo_loss,
    overlong_mask,
    sequence_log_ratio,
    soft_overlong_punishment,
    truncated_importance_weights,
)
from dynamo_core.algorithms.surrogate import check_clip, log_ratio, surrogate, weighted_sum

__all__ = [
    "AGGREGATIONS",
    "aggregation_weights",
    "cispo_loss",
    "clip_metrics",
    "entropy_bonus",
    "explained_variance",
    "gspo_loss",
    "overlong_mask",
    "policy_loss",
    "sequence_log_ratio",
    "soft_overlong_punishment",
    "truncated_importance_weights",
    "value_loss",
]


def policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """sum w l, scalar, l the clipped surrogate (module docstring).

    Args:
        log_prob: with gradient, [B, T].
        old_log_prob, advantages: [B, T].
        weights: [B, T], of `aggregation_weights`, times importance weights where there are any.
        eps_low, eps_high: clip range of the ratio.
        dual_clip: c > 1, or None.

    Raises:
        AlgorithmError: shapes that do not match, a clip value out of range.
    """
    check_clip(eps_low, eps_high, dual_clip)
    same_shape(log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, weights=weights)
    chosen = weights != 0
    log_r = log_ratio(log_prob, old_log_prob, chosen)
    advantage = zero_outside(chosen, advantages.to(log_r.dtype))
    return weighted_sum(weights, surrogate(log_r, advantage, eps_low, eps_high, dual_clip))


def clip_metrics(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
) -> dict[str, torch.Tensor]:
    """Weighted sums, scalars: clipfrac, dual_clipfrac, ratio and two estimates of KL(old||new).

    ppo_kl is E[-log r], approx_kl E[r - 1 - log r].
    With the global token-mean weights they are token means, and add over micro-batches and ranks.

    Raises:
        AlgorithmError: shapes that do not match, a clip value out of range.
    """
    check_clip(eps_low, eps_high, dual_clip)
    same_shape(log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, weights=weights)
    with torch.no_grad():
        chosen = weights != 0
        log_r = log_ratio(log_prob, old_log_prob, chosen)
        advantage = zero_outside(chosen, advantages.to(log_r.dtype))
        ratio = log_r.exp()
        plain = -advantage * ratio
        clipped = -advantage * ratio.clamp(1 - eps_low, 1 + eps_high)
        dual = torch.zeros_like(chosen)
        if dual_clip is not None:
            dual = (advantage < 0) & (torch.maximum(plain, clipped) > -advantage * dual_clip)
        tokens = {
            "clipfrac": (clipped > plain).to(ratio.dtype),
            "dual_clipfrac": dual.to(ratio.dtype),
            "ppo_kl": -log_r,
            "approx_kl": torch.expm1(log_r) - log_r,
            "ratio": ratio,
        }
        return {name: weighted_sum(weights, value) for name, value in tokens.items()}


def value_loss(
    values: torch.Tensor,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    weights: torch.Tensor,
    *,
    clip: float | None = None,
) -> torch.Tensor:
    """1/2 sum w max((V - R)^2, (clip(V, V_old - e, V_old + e) - R)^2), scalar.

    With `clip` (e) None the second term is left out. All tensors [B, T].

    Raises:
        AlgorithmError: shapes that do not match, clip not positive.
    """
    same_shape(values=values, old_values=old_values, returns=returns, weights=weights)
    chosen = weights != 0
    value = zero_outside(chosen, at_least_float32(values))
    old = zero_outside(chosen, old_values.to(value.dtype))
    target = zero_outside(chosen, returns.to(value.dtype))
    error = (value - target) ** 2
    if clip is not None:
        require(clip > 0, "clip", clip, "positive, or None")
        near = torch.minimum(torch.maximum(value, old - clip), old + clip)
        error = torch.maximum(error, (near - target) ** 2)
    return 0.5 * weighted_sum(weights, error)


def explained_variance(
    values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """1 - Var(R - V) / Var(R) over the masked tokens, scalar; NaN where the returns do not vary.

    Raises:
        AlgorithmError: shapes that do not match, empty mask.
    """
    same_shape(mask=mask, values=values, returns=returns)
    chosen = selection(mask)
    total = returns[chosen].var(correction=0)
    left = (returns - values)[chosen].var(correction=0)
    return torch.where(total > 0, 1 - left / total, torch.nan)


def entropy_bonus(
    entropy: torch.Tensor, weights: torch.Tensor, *, coefficient: float
) -> torch.Tensor:
    """-coefficient sum w H, scalar, to be added to the loss.

    `entropy` [B, T] must carry its gradient: computed under no_grad it does nothing.

    Raises:
        AlgorithmError: shapes that do not match, a coefficient that is not finite or negative.
    """
    number("coefficient", coefficient, 0)
    same_shape(entropy=entropy, weights=weights)
    inside = zero_outside(weights != 0, at_least_float32(entropy))
    return -coefficient * weighted_sum(weights, inside)
