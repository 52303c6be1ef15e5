"""First-order change of a token's entropy under one step of the clipped surrogate on its logits.

    dH = -w xi (p_a Lambda_a - E_{k~p}[p_k Lambda_k]),  xi = I_clip r A,  Lambda_k = log p_k + H
per unit of step size: dH/dz_k = -p_k Lambda_k, and the surrogate moves the logits by xi (e_a - p).
`expectation` says how E is taken: "vocabulary" is exact, "sequence" the release's mean over the row
(dp_actor.py:367).

Shapes: B rows, T response tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import torch

from dynamo_core.algorithms.checks import choice, fail, matrix, number, same_shape, zero_outside
from dynamo_core.algorithms.logit_statistics import logit_statistics

EXPECTATIONS: Final = ("vocabulary", "sequence")
_LOG_RATIO_MAX: Final = 20.0


def entropy_change(
    logits: torch.Tensor,
    actions: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
    expectation: str,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """dH [B, T] = -w xi (p_a Lambda_a - E), zero outside the mask.

    Args:
        logits: [B, T, V], divided by the rollout temperature.
        actions, old_log_prob, advantages, mask: [B, T].
        eps_low, eps_high: clip range; a token whose gradient is clipped away changes nothing.
        expectation: "vocabulary": E = sum_k p_k^2 Lambda_k; "sequence": E = mean of p_a Lambda_a
            over the row's masked tokens.
        weight: [B, T], the aggregation weight w_it where aggregation is not token-mean, relative to
            it: w M, M the tokens of the whole mini-batch. (Raw weights make dH so small that the
            1e-8 of the stabilisation's denominator would count.)

    Raises:
        AlgorithmError: unknown expectation, shapes that do not match, negative clip range.
    """
    choice("expectation", expectation, EXPECTATIONS)
    same_shape(mask=mask, actions=actions)
    if logits.shape[:-1] != mask.shape:
        fail("logits", f"of shape {tuple(logits.shape)}", f"{tuple(mask.shape)} + (V,)")
    chosen = mask != 0
    inside = zero_outside(chosen.unsqueeze(-1), logits)
    token = logit_statistics(inside, torch.where(chosen, actions, torch.zeros_like(actions)))
    bracket = token.bracket
    if expectation == "sequence":
        bracket = sequence_bracket(token.pi_lambda, mask)
    return entropy_change_from_bracket(
        bracket, token.log_prob, old_log_prob, advantages, mask,
        eps_low=eps_low, eps_high=eps_high, weight=weight,
    )  # fmt: skip


def sequence_bracket(pi_lambda: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """p_a Lambda_a minus its mean over the row's masked tokens, [B, T]: the release's bracket.

    Raises:
        AlgorithmError: shapes that do not match.
    """
    matrix("pi_lambda", pi_lambda)
    same_shape(pi_lambda=pi_lambda, mask=mask)
    chosen = mask != 0
    inside = zero_outside(chosen, pi_lambda)
    mean = inside.sum(-1, keepdim=True) / chosen.sum(-1, keepdim=True).clamp(min=1)
    return zero_outside(chosen, inside - mean)


def entropy_change_from_bracket(
    bracket: torch.Tensor,
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    eps_low: float,
    eps_high: float,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """dH [B, T] = -w xi bracket, zero outside the mask; all tensors [B, T].

    xi = I r A, r = exp(log_prob - old_log_prob), I = 1 where the clipped surrogate has a gradient:
    A > 0 and r <= 1 + eps_high, or A < 0 and r >= 1 - eps_low. `weight` as in `entropy_change`.

    Raises:
        AlgorithmError: shapes that do not match, negative clip range.
    """
    same_shape(mask=mask, bracket=bracket, log_prob=log_prob, old_log_prob=old_log_prob,
               advantages=advantages)  # fmt: skip
    number("eps_low", eps_low, 0, 1)
    number("eps_high", eps_high, 0)
    chosen = mask != 0
    advantage = zero_outside(chosen, advantages)
    log_ratio = zero_outside(chosen, log_prob - old_log_prob)
    ratio = log_ratio.clamp(-_LOG_RATIO_MAX, _LOG_RATIO_MAX).exp()
    raises = (advantage > 0) & (ratio <= 1 + eps_high)
    lowers = (advantage < 0) & (ratio >= 1 - eps_low)
    xi = zero_outside(raises | lowers, ratio * advantage)
    if weight is not None:
        same_shape(mask=mask, weight=weight)
        xi = xi * zero_outside(chosen, weight).to(xi.dtype)
    return -xi * zero_outside(chosen, bracket)
