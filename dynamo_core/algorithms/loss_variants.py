"""Policy losses other than PPO's, importance weights against another engine, and overlong answers.

Each loss is sum_it w_it l_it with the weights of `aggregation_weights`, as in losses.py.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

import torch

from dynamo_core.algorithms.checks import (
    at_least_float32,
    fail,
    number,
    require,
    same_shape,
    vector,
    zero_outside,
)
from dynamo_core.algorithms.surrogate import (
    LOG_RATIO_MAX,
    check_clip,
    log_ratio,
    surrogate,
    weighted_sum,
)


def sequence_log_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Mean of log r over each row's masked tokens, [B]: the log of GSPO's sequence ratio.

    Raises:
        AlgorithmError: shapes that do not match.
    """
    same_shape(mask=mask, log_prob=log_prob, old_log_prob=old_log_prob)
    chosen = mask != 0
    new = zero_outside(chosen, at_least_float32(log_prob))
    old = zero_outside(chosen, at_least_float32(old_log_prob))
    return (new - old).sum(-1) / chosen.sum(-1).clamp(min=1)


def gspo_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
) -> torch.Tensor:
    """The clipped surrogate with the sequence ratio s_i in place of r, scalar.

    Source: GSPO, arXiv 2507.18071.

    Token form: sg(s_i) pi / sg(pi), so that advantages may differ by token; with
    seq-mean-token-mean weights and one advantage per row its gradient is that of the paper's
    sequence objective. Rows must be whole: a row's tokens are those with a weight.

    Raises:
        AlgorithmError: shapes that do not match, a clip value out of range.
    """
    check_clip(eps_low, eps_high, None)
    same_shape(log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, weights=weights)
    chosen = weights != 0
    new = zero_outside(chosen, at_least_float32(log_prob))
    sequence = sequence_log_ratio(log_prob.detach(), old_log_prob, chosen).unsqueeze(-1)
    log_r = (sequence + new - new.detach()).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    advantage = zero_outside(chosen, advantages.to(log_r.dtype))
    return weighted_sum(weights, surrogate(log_r, advantage, eps_low, eps_high, None))


def cispo_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    *,
    eps_high: float,
    eps_low: float = 1.0,
) -> torch.Tensor:
    """sum w (-sg(clip(r, 1 - eps_low, 1 + eps_high)) A log_prob), scalar. Source: arXiv 2506.13585.

    Clipping bounds the weight of a token but never removes its gradient.

    Raises:
        AlgorithmError: shapes that do not match, a clip value out of range.
    """
    check_clip(eps_low, eps_high, None)
    same_shape(log_prob=log_prob, old_log_prob=old_log_prob, advantages=advantages, weights=weights)
    chosen = weights != 0
    ratio = log_ratio(log_prob, old_log_prob, chosen).detach().exp()
    factor = ratio.clamp(1 - eps_low, 1 + eps_high) * zero_outside(chosen, advantages)
    new = zero_outside(chosen, at_least_float32(log_prob))
    return weighted_sum(weights, -factor.to(new.dtype) * new)


def truncated_importance_weights(
    old_log_prob: torch.Tensor,
    rollout_log_prob: torch.Tensor,
    mask: torch.Tensor,
    *,
    cap: float = 2.0,
    floor: float | None = None,
) -> torch.Tensor:
    """min(pi_old / pi_rollout, cap) [B, T], detached, 0 outside the mask.

    To be multiplied into the loss weights: corrects rollouts sampled by another engine's numerics.
    With `floor` (IcePop) a ratio outside [floor, cap] is dropped (0) instead of truncated.

    Raises:
        AlgorithmError: shapes that do not match, cap not positive, floor outside [0, cap].
    """
    require(cap > 0, "cap", cap, "positive")
    same_shape(mask=mask, old_log_prob=old_log_prob, rollout_log_prob=rollout_log_prob)
    chosen = mask != 0
    ratio = log_ratio(old_log_prob.detach(), rollout_log_prob.detach(), chosen).exp()
    if floor is None:
        return zero_outside(chosen, ratio.clamp(max=cap))
    number("floor", floor, 0, cap)
    return zero_outside(chosen & (ratio >= floor) & (ratio <= cap), ratio)


def overlong_mask(mask: torch.Tensor, truncated: torch.Tensor) -> torch.Tensor:
    """The mask [B, T] without the rows that were cut off ([B] bool).

    Aggregate after it, not before: dropped rows then leave numerator and denominator.

    Raises:
        AlgorithmError: shapes that do not match.
    """
    vector("truncated", truncated, mask.shape[0])
    return zero_outside((truncated == 0).unsqueeze(-1), mask)


def soft_overlong_punishment(
    lengths: torch.Tensor, *, max_length: int, buffer: int
) -> torch.Tensor:
    """0 up to max_length - buffer tokens, falling linearly to -1 at max_length, -1 beyond, [B].

    Source: DAPO, arXiv 2503.14476, eq. 13. Add it to the reward; never to correctness.

    Raises:
        AlgorithmError: buffer not in (0, max_length].
    """
    if not 0 < buffer <= max_length:
        fail("buffer", buffer, f"in (0, max_length = {max_length}]")
    excess = at_least_float32(lengths) - (max_length - buffer)
    return -(excess / buffer).clamp(0, 1)
