"""Prompts with success rates drawn from mixtures of Beta laws, their drift over visits, and the variance ratio.

Shapes: N prompts, V visits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamo_core.algorithms.allocation import objective_value
from dynamo_core.algorithms.checks import FloatArray, IntArray

MEAN = 16  # rollouts per prompt: the budget is MEAN N, a visit has MEAN rollouts
_LOGIT_MARGIN = 1e-6


class Component(NamedTuple):
    """A share of the prompts with p ~ Beta(alpha, beta); alpha = 0 means p = 0, beta = 0 means p = 1."""

    share: float
    alpha: float
    beta: float


Mixture = tuple[Component, ...]
MID: Mixture = (Component(0.3, 0.25, 6), Component(0.3, 2, 2), Component(0.4, 8, 0.5))
MIXTURES: dict[str, Mixture] = {
    "early (hard)": (Component(0.5, 0.3, 6), Component(0.35, 1.5, 2), Component(0.15, 6, 0.6)),
    "mid (bimodal)": MID,
    "late (easy)": (Component(0.2, 0.2, 8), Component(0.15, 2, 2), Component(0.65, 15, 0.4)),
    "60 % exactly dead": (Component(0.25, 0, 1), Component(0.35, 1, 0), Component(0.4, 1, 1)),
    "Beta(1,1)": (Component(1, 1, 1),),
    "Beta(4,4)": (Component(1, 4, 4),),
}


class History(NamedTuple):
    """`p_N` after the last visit's drift; `successes_VN` of MEAN rollouts each, oldest visit first."""

    p_N: FloatArray
    successes_VN: IntArray


def draw(mixture: Mixture, size: int, rng: np.random.Generator) -> FloatArray:
    """Success rates p [N], independent draws from the mixture."""
    share, alpha, beta = np.array(mixture).T
    component_N = rng.choice(len(mixture), size=size, p=share)
    alpha_N, beta_N = alpha[component_N], beta[component_N]
    inner_N = rng.beta(np.where(alpha_N > 0, alpha_N, 1), np.where(beta_N > 0, beta_N, 1))
    return np.where(alpha_N == 0, 0.0, np.where(beta_N == 0, 1.0, inner_N))


def visited(p_N: FloatArray, visits: int, drift_sd: float, rng: np.random.Generator) -> History:
    """MEAN rollouts per visit; after each, the logit of p moves by .25 + drift_sd times a standard normal."""
    p_N = np.clip(p_N, _LOGIT_MARGIN, 1 - _LOGIT_MARGIN)
    logit_N = np.log(p_N) - np.log1p(-p_N)
    successes_VN = np.zeros((visits, p_N.size), dtype=np.int64)
    for successes_N in successes_VN:
        successes_N[:] = rng.binomial(MEAN, p_N)
        logit_N = logit_N + 0.25 + drift_sd * rng.standard_normal(p_N.size)
        p_N = 1 / (1 + np.exp(-logit_N))
    return History(p_N, successes_VN)


def ratio(c_N: FloatArray, n_N: npt.ArrayLike, objective: str = "neyman") -> float:
    """sum c h(n) of a plan over that of the uniform plan with the same budget, h(n) = 1/n ("rloo": 1/(n-1))."""
    n_N = np.asarray(n_N, dtype=np.float64)
    uniform_N = np.full(n_N.shape, n_N.mean())
    return objective_value(c_N, n_N, objective) / objective_value(c_N, uniform_N, objective)


def unbounded_ratio(c_N: FloatArray) -> float:
    """The least ratio of any plan, n ~ sqrt(c) without bounds or rounding: (sum sigma)^2 / (N sum sigma^2)."""
    return float(np.sqrt(c_N).sum() ** 2 / (c_N.size * c_N.sum()))
