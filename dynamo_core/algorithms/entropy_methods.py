"""Other ways to steer entropy, as options and baselines, over the whole mini-batch.

    Clip-Cov, KL-Cov    arXiv 2505.22617   act where log-prob and advantage have a large covariance
    entropy advantage   arXiv 2506.14758   A + min(alpha H, |A| / kappa)
    W-REINFORCE, NSR    arXiv 2506.01347   correct answers weigh lambda, wrong ones -1
    fork tokens         arXiv 2506.01939   gradient only on the most uncertain tokens

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
    selection,
    zero_outside,
)
from dynamo_core.algorithms.modulation import quantile

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}
"""By how much two log-probs of the same token under the same weights may differ."""


def covariance(
    log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """(log_prob - mean) (A - mean) of every token, means over the masked tokens, [B, T], 0 outside.

    Raises:
        AlgorithmError: shapes that do not match, empty mask.
    """
    same_shape(mask=mask, log_prob=log_prob, advantages=advantages)
    chosen = selection(mask)
    lp, advantage = at_least_float32(log_prob.detach()), at_least_float32(advantages)
    centred = zero_outside(chosen, lp - lp[chosen].mean())
    return centred * zero_outside(chosen, advantage - advantage[chosen].mean())


def clip_cov(
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    generator: torch.Generator,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> torch.Tensor:
    """bool [B, T]: the masked tokens that keep their gradient; multiply the loss weights by it.

    Dropped are max(1, share M) random tokens among those with low < covariance < high, fewer if
    there are fewer. The denominator stays: weights are computed before. Draws on the generator's
    device.

    Raises:
        AlgorithmError: shapes that do not match, empty mask, share outside [0, 1], low > high.
    """
    number("share", share, 0, 1)
    require(low <= high, "low", low, f"at most high = {high}")
    cov = covariance(log_prob, advantages, mask)
    keep = (mask != 0).flatten()
    candidates = ((cov > low) & (cov < high) & (mask != 0)).flatten().nonzero().squeeze(-1)
    wanted = max(int(share * int(keep.sum())), 1)
    order = torch.randperm(candidates.numel(), generator=generator, device=generator.device)
    dropped = candidates[order[:wanted].to(candidates.device)]
    return keep.index_fill(0, dropped, False).view(mask.shape)


def kl_cov(
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    share: float = 2e-4,
) -> torch.Tensor:
    """bool [B, T]: the max(1, share M) masked tokens of largest covariance.

    Ties go to the earlier token. `kl_cov_penalty` acts on the chosen ones.

    Raises:
        AlgorithmError: shapes that do not match, empty mask, share outside [0, 1].
    """
    number("share", share, 0, 1)
    cov = covariance(log_prob, advantages, mask)
    chosen = (mask != 0).flatten()
    ranked = cov.flatten().masked_fill(~chosen, -torch.inf)
    wanted = max(int(share * int(chosen.sum())), 1)
    top = ranked.argsort(descending=True, stable=True)[:wanted]
    return torch.zeros_like(chosen).index_fill(0, top, True).view(mask.shape)


def kl_cov_penalty(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    *,
    coefficient: float = 1.0,
) -> torch.Tensor:
    """coefficient sum w |log pi - log pi_old| over the chosen tokens, to be added to the loss.

    |x| has no derivative at 0, where the first update of every step stands: a distance within rounding counts as 0
    and pushes nowhere, else the last bit of a sum (micro-batches, ranks) would decide the direction.

    Raises:
        AlgorithmError: shapes that do not match, negative coefficient.
    """
    number("coefficient", coefficient, 0)
    same_shape(log_prob=log_prob, old_log_prob=old_log_prob, weights=weights, chosen=chosen)
    use = chosen & (weights != 0)
    new = zero_outside(use, at_least_float32(log_prob))
    distance = (new - zero_outside(use, at_least_float32(old_log_prob.detach()))).abs()
    distance = distance.masked_fill(distance <= ROUNDING[new.dtype], 0.0)
    return coefficient * (weights.to(new.dtype) * distance).sum()


def entropy_advantage(
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    mask: torch.Tensor,
    *,
    alpha: float = 0.4,
    kappa: float = 2.0,
) -> torch.Tensor:
    """A + min(alpha H, |A| / kappa) [B, T], zero outside the mask; kappa > 1 keeps the sign.

    H is detached: no gradient flows through it.

    Raises:
        AlgorithmError: shapes that do not match, negative alpha, kappa <= 1.
    """
    number("alpha", alpha, 0)
    require(kappa > 1, "kappa", kappa, "above 1")
    same_shape(mask=mask, advantages=advantages, entropy=entropy)
    chosen = mask != 0
    advantage = zero_outside(chosen, advantages)
    bonus = torch.minimum(alpha * zero_outside(chosen, entropy.detach()), advantage.abs() / kappa)
    return advantage + bonus


def w_reinforce(correct: torch.Tensor, *, positive: float = 0.1) -> torch.Tensor:
    """`positive` for correct rollouts, -1 for wrong ones, float64 [B]; positive = 0 is NSR.

    Raises:
        AlgorithmError: `correct` is not [B] of 0 and 1, negative `positive`.
    """
    number("positive", positive, 0)
    require(correct.ndim == 1, "correct", f"of shape {tuple(correct.shape)}", "of shape [B]")
    right = correct == 1
    other = ~right & (correct != 0)
    if bool(other.any()):
        fail("correct", float(correct[other][0]), "0 or 1 in every row")
    return right.double() * (positive + 1) - 1


def fork_tokens(
    entropy: torch.Tensor,
    mask: torch.Tensor,
    *,
    share: float = 0.2,
    threshold: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """bool [B, T]: the masked tokens whose entropy is in the top `share`.

    Multiply the loss weights by it to keep the denominator, or aggregate over it to change it.
    `threshold` is the (1 - share) quantile over all ranks; by default over these tokens.

    Raises:
        AlgorithmError: shapes that do not match, empty mask, share outside (0, 1].
    """
    require(0 < share <= 1, "share", share, "in (0, 1]")
    same_shape(mask=mask, entropy=entropy)
    if threshold is None:
        threshold = quantile(entropy, mask, 1 - share)
    chosen = mask != 0
    return chosen & (zero_outside(chosen, entropy) >= threshold)
