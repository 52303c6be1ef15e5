"""How much each prompt really weighs: the estimator's kappa times the weight of its rollouts.

For binary rewards, on policy, and any advantage that depends only on the prompt's rewards,
    E[(1/n) sum_j A_j s_j] = kappa grad p,
    kappa = sum_k Binomial(k; n, p) [ (k/n) A_right(k) / p - ((n-k)/n) A_wrong(k) / (1-p) ],
since E[s | right] = grad p / p and E[s | wrong] = -grad p / (1-p). So a prompt's direction is
always right and all bias is re-weighting, W_i = N sum_j w_ij kappa_i. RLOO: kappa = 1 for every n.

Shapes: P success rates or prompts, k successes of n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from dynamo_core.algorithms.advantages import dr_grpo, grpo, rloo
from dynamo_core.algorithms.checks import choice, fail, same_shape, whole

Estimator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
BANDS: Final = ((0.0, 0.05), (0.05, 0.2), (0.2, 0.8), (0.8, 0.95), (0.95, 1.0))
WEIGHTINGS: Final = ("prompt-mean", "rollout-mean")
_GROUP: Final[dict[str, Estimator]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def _outcome_table(estimator: Estimator, n: int) -> torch.Tensor:
    """Advantages [n+1, n] of n rollouts of which the first k are correct, k = 0..n."""
    right = torch.arange(n) < torch.arange(n + 1).unsqueeze(-1)
    group = torch.arange(n + 1).repeat_interleave(n)
    return estimator(right.double().flatten(), group).view(n + 1, n)


def kappa(p: torch.Tensor, n: int, estimator: str | Estimator) -> torch.Tensor:
    """kappa [P], float64, by the exact binomial sum (module docstring).

    Args:
        p: success rates in (0, 1), [P].
        n: rollouts of the prompt.
        estimator: "grpo", "dr_grpo", "rloo", or a function (rewards, group) -> advantages.

    Raises:
        AlgorithmError: p outside (0, 1), n < 1, unknown estimator.
    """
    whole("n", n, 1)
    p = torch.as_tensor(p, dtype=torch.float64)
    outside = ~((p > 0) & (p < 1))
    if bool(outside.any()):
        fail("p", float(p[outside][0]), "in (0, 1)")
    if isinstance(estimator, str):
        estimator = _GROUP[choice("estimator", estimator, _GROUP)]
    table = _outcome_table(estimator, n)
    right = torch.arange(n) < torch.arange(n + 1).unsqueeze(-1)
    k = torch.arange(n + 1, dtype=torch.float64)
    gained = torch.where(right, table, 0.0).sum(-1) / n
    lost = torch.where(right, 0.0, table).sum(-1) / n
    size = torch.tensor(float(n), dtype=torch.float64)
    log_choose = torch.lgamma(size + 1) - torch.lgamma(k + 1) - torch.lgamma(size - k + 1)
    q = p.unsqueeze(-1)
    probability = (log_choose + k * q.log() + (n - k) * torch.log1p(-q)).exp()
    return (probability * (gained / q - lost / (1 - q))).sum(-1)


def effective_weights(
    p: torch.Tensor, n: torch.Tensor, *, estimator: str | Estimator, weighting: str
) -> dict[str, float]:
    """Mean W_i of the prompts in each band of success rate ("0-0.05", ...), empty bands left out.

    W_i = kappa(p_i, n_i) under "prompt-mean" weights, kappa(p_i, n_i) n_i N / sum n under
    "rollout-mean" (token-mean with equal lengths). 1 everywhere means an unbiased gradient.

    Args:
        p: success rates (posterior means), [P].
        n: rollouts, [P].

    Raises:
        AlgorithmError: shapes that do not match, p outside (0, 1), unknown names.
    """
    choice("weighting", weighting, WEIGHTINGS)
    p = torch.as_tensor(p, dtype=torch.float64)
    same_shape(p=p, n=n)
    weight = torch.zeros_like(p)
    for size in sorted(set(n.tolist())):
        here = n == size
        weight[here] = kappa(p[here], size, estimator)
    if weighting == "rollout-mean":
        weight = weight * n * (n.numel() / n.sum())
    return by_band(p, weight)


def by_band(p: torch.Tensor, values: torch.Tensor) -> dict[str, float]:
    """Mean of `values` [P] over the prompts in each band of success rate p [P]; empty bands left out.

    Raises:
        AlgorithmError: shapes that do not match.
    """
    same_shape(p=p, values=values)
    means = {}
    for low, high in BANDS:
        inside = (p >= low) & ((p < high) if high < 1 else (p <= high))
        if bool(inside.any()):
            means[f"{low:g}-{high:g}"] = float(values[inside].mean())
    return means
