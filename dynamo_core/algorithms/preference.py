"""Direct preference optimisation: learn from pairs which of two answers is better.

With summed log-probs of chosen (c) and rejected (r) answer under policy pi and frozen reference,
    reward_y = beta (log pi(y) - log ref(y)),       margin h = reward_c - reward_r,
    l = -(1 - s) log sigmoid(h) - s log sigmoid(-h).
s is the probability that a label is the wrong way round; s = 0 is the plain loss.
dl/dh = s - sigmoid(-h): with s > 0 it vanishes at h = log((1 - s)/s) instead of infinity.
Sources: DPO, arXiv 2305.18290; conservative DPO, ericmitchell.ai/cdpo.pdf.

A pair is trained where its weight is not zero; whatever lies elsewhere, NaN too, reaches neither
value nor gradient. With the weight 1/pairs of the mini-batch over all ranks, losses and metrics of
micro-batches and ranks simply add.

Shapes: B pairs.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import logsigmoid

from dynamo_core.algorithms.checks import (
    at_least_float32,
    require,
    same_shape,
    vector,
    zero_outside,
)
from dynamo_core.algorithms.surrogate import weighted_sum


def implicit_reward(
    policy: torch.Tensor, reference: torch.Tensor, weights: torch.Tensor, *, beta: float
) -> torch.Tensor:
    """beta (log pi - log ref) of one answer of each pair, [B], 0 where a pair has no weight.

    Args:
        policy, reference: log-probs summed over the answer's tokens, [B]; only the policy's gets a
            gradient.
        weights: of pairs, [B].

    Raises:
        AlgorithmError: shapes that do not match, beta not positive.
    """
    require(0 < beta < math.inf, "beta", beta, "positive and finite")
    vector("weights", weights, weights.numel())
    same_shape(weights=weights, policy=policy, reference=reference)
    trained = weights != 0
    ours = zero_outside(trained, at_least_float32(policy))
    return beta * (ours - zero_outside(trained, at_least_float32(reference.detach())))


def dpo_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    weights: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """sum w l, scalar, of the implicit rewards [B] of chosen and rejected answers.

    Raises:
        AlgorithmError: shapes that do not match, label_smoothing not in [0, 0.5).
    """
    bound = "in [0, 0.5): at 0.5 nothing is preferred"
    require(0 <= label_smoothing < 0.5, "label_smoothing", label_smoothing, bound)
    same_shape(weights=weights, chosen=chosen, rejected=rejected)
    margin = chosen - rejected
    loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return weighted_sum(weights, loss)


def dpo_metrics(
    chosen: torch.Tensor, rejected: torch.Tensor, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Weighted sums, scalars: margin, accuracy (margin above 0), chosen_reward, rejected_reward.

    Args:
        chosen, rejected: implicit rewards, [B].

    Raises:
        AlgorithmError: shapes that do not match.
    """
    same_shape(weights=weights, chosen=chosen, rejected=rejected)
    chosen, rejected = chosen.detach(), rejected.detach()
    pairs = {
        "margin": chosen - rejected,
        "accuracy": (chosen > rejected).to(chosen.dtype),
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    return {name: weighted_sum(weights, value) for name, value in pairs.items()}
