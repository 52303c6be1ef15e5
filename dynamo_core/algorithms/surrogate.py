"""The clipped surrogate's parts, shared by the policy losses.

Shapes: B rows, T response tokens.
"""

from __future__ import annotations

from typing import Final

import torch

from dynamo_core.algorithms.checks import at_least_float32, fail, number, zero_outside

LOG_RATIO_MAX: Final = 20.0


def weighted_sum(weights: torch.Tensor, token_loss: torch.Tensor) -> torch.Tensor:
    """sum w l, scalar, in the loss's own precision."""
    return (weights.to(token_loss.dtype) * token_loss).sum()


def log_ratio(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """log r [B, T] within +-20, 0 where not chosen."""
    new = zero_outside(chosen, at_least_float32(log_prob))
    old = zero_outside(chosen, at_least_float32(old_log_prob))
    return (new - old).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def check_clip(eps_low: float, eps_high: float, dual_clip: float | None) -> None:
    """Raises AlgorithmError for a clip value out of range."""
    number("eps_low", eps_low, 0, 1)
    number("eps_high", eps_high, 0)
    if dual_clip is not None and not dual_clip > 1:
        fail("dual_clip", dual_clip, "above 1, or None")


def surrogate(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
) -> torch.Tensor:
    """The clipped surrogate of every token, [B, T]."""
    ratio = log_ratio.exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - eps_low, 1 + eps_high))
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)
