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


def dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    weights: torch.Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """sum w l, scalar; log-probs are summed over each answer's tokens, everything is [B].

    Only the policy gets a gradient.

    Raises:
        AlgorithmError: shapes that do not match, beta not positive, label_smoothing not below 0.5.
    """
    bound = "in [0, 0.5): at 0.5 nothing is preferred"
    require(0 <= label_smoothing < 0.5, "label_smoothing", label_smoothing, bound)
    chosen, rejected = _rewards(
        policy_chosen, policy_rejected, reference_chosen, reference_rejected, weights, beta=beta
    )
    margin = chosen - rejected
    loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return weighted_sum(weights, loss)


def dpo_metrics(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    weights: torch.Tensor,
    *,
    beta: float,
) -> dict[str, torch.Tensor]:
    """Weighted sums, scalars: margin, accuracy (margin above 0), chosen_reward, rejected_reward.

    Raises:
        AlgorithmError: shapes that do not match, beta not positive.
    """
    with torch.no_grad():
        chosen, rejected = _rewards(
            policy_chosen, policy_rejected, reference_chosen, reference_rejected, weights, beta=beta
        )
        pairs = {
            "margin": chosen - rejected,
            "accuracy": (chosen > rejected).to(chosen.dtype),
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        return {name: weighted_sum(weights, value) for name, value in pairs.items()}


def _rewards(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    reference_chosen: torch.Tensor,
    reference_rejected: torch.Tensor,
    weights: torch.Tensor,
    *,
    beta: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Implicit rewards of chosen and rejected, [B] each, 0 where a pair has no weight."""
    require(0 < beta < math.inf, "beta", beta, "positive and finite")
    vector("weights", weights, weights.numel())
    same_shape(
        weights=weights,
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        reference_chosen=reference_chosen,
        reference_rejected=reference_rejected,
    )
    trained = weights != 0

    def reward(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        ours = zero_outside(trained, at_least_float32(policy))
        return beta * (ours - zero_outside(trained, at_least_float32(reference.detach())))

    return reward(policy_chosen, reference_chosen), reward(policy_rejected, reference_rejected)
