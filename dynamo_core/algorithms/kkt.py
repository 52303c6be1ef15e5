"""Continuous allocation: min sum_i c_i / (n_i - s), sum_i q_i n_i = budget, n_low <= n_i <= n_high.

KKT: n_i = clip(s + theta sigma_i / sqrt(q_i), n_low, n_high), sigma_i = sqrt(c_i), with the shift
s = 0 (neyman) or 1 (rloo). The spent budget is piecewise linear and increasing in theta, so theta
follows from the sorted 2N breakpoints, O(N log N). Without bounds this is Neyman's
n_i = B sigma_i / sum sigma (the paper's theorem); with them the multiplier must be solved again,
clipping alone is no optimum.

Shapes: N prompts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamo_core.algorithms.checks import (
    FloatArray,
    choice,
    fail,
    non_negative_array,
    require,
    whole,
)

SHIFTS = {"neyman": 0, "rloo": 1}


class Continuous(NamedTuple):
    """A continuous plan; `theta` is None when all prompts with variance are at the cap, or none."""

    n: FloatArray  # [N]
    theta: float | None
    objective: float


def weighted_variance(variance: npt.ArrayLike, weight: npt.ArrayLike | None) -> FloatArray:
    """c [N] with sigma_i -> W_i sigma_i: W_i^2 c_i, W an explicit difficulty weight.

    Raises:
        AlgorithmError: NaN, infinite or negative entries, or shapes that do not match.
    """
    c = non_negative_array("variance", variance)
    if weight is None:
        return c
    weight_N = non_negative_array("weight", weight)
    require(weight_N.shape == c.shape, "weight", f"of shape {weight_N.shape}", f"{c.shape}")
    with np.errstate(over="ignore"):  # an overflow is reported with its index
        return non_negative_array("weight^2 * variance", weight_N**2 * c)


def cost_array(cost: npt.ArrayLike | None, size: int) -> FloatArray:
    """q [N], positive; ones when `cost` is None.

    Raises:
        AlgorithmError: a cost that is not positive and finite, or another shape.
    """
    if cost is None:
        return np.ones(size)
    q = non_negative_array("cost", cost)
    require(q.shape == (size,), "cost", f"of shape {q.shape}", f"of shape ({size},)")
    require(bool((q > 0).all()), "cost", float(q.min()), "positive")
    return q


def check_bounds(budget: float, n_low: int, n_high: int, cost: FloatArray) -> None:
    """budget within sum(cost) n_low .. sum(cost) n_high.

    Raises:
        AlgorithmError: n_low > n_high, or the budget is outside.
    """
    whole("n_low", n_low, 0)
    whole("n_high", n_high, 0)
    require(n_low <= n_high, "n_low", n_low, f"at most n_high = {n_high}")
    low, high = n_low * float(cost.sum()), n_high * float(cost.sum())
    if not low <= budget <= high:
        bound = f"in [{low:g}, {high:g}] for {cost.size} prompts of {n_low}..{n_high}"
        fail("budget", budget, bound)


def _theta(s: FloatArray, q: FloatArray, budget: float, low: float, high: float) -> float:
    """theta with sum q clip(theta s, low, high) = budget; s [N] > 0, the shift taken off before."""
    enter, leave = low / s, high / s
    theta_2N = np.concatenate([enter, leave])
    order = np.argsort(theta_2N, kind="stable")
    theta_2N = theta_2N[order]
    slope_2N = np.cumsum(np.concatenate([q * s, -q * s])[order])
    spent = low * q.sum() + np.cumsum(slope_2N[:-1] * np.diff(theta_2N))  # from the second on
    right = min(int(np.searchsorted(spent, budget)) + 1, theta_2N.size - 1)
    middle = 0.5 * (theta_2N[right - 1] + theta_2N[right])
    active = (enter < middle) & (middle < leave)
    if not active.any():
        return float(theta_2N[right])
    fixed = low * q[enter >= middle].sum() + high * q[leave <= middle].sum()
    return float((budget - fixed) / (q[active] * s[active]).sum())


def continuous(
    variance: npt.ArrayLike,
    budget: float,
    n_low: int,
    n_high: int,
    *,
    objective: str = "neyman",
    cost: npt.ArrayLike | None = None,
    weight: npt.ArrayLike | None = None,
) -> Continuous:
    """The continuous optimum (module docstring); `budget` is in units of `cost` where one is given.

    Args:
        variance: c_i = sigma_i^2, [N].
        budget: sum_i q_i n_i; q_i = 1 without `cost`.
        n_low, n_high: bounds of every n_i.
        objective: "neyman" (1/n) or "rloo" (1/(n-1), n_low >= 2).
        cost: q_i > 0, for example expected tokens of a rollout, [N].
        weight: W_i >= 0, sigma_i -> W_i sigma_i, [N].

    Raises:
        AlgorithmError: bad values or shapes, bounds or budget out of range, unknown objective.
    """
    c = weighted_variance(variance, weight)
    q = cost_array(cost, c.size)
    shift = SHIFTS[choice("objective", objective, SHIFTS)]
    check_bounds(budget, n_low, n_high, q)
    require(n_low > shift, "n_low", n_low, f"at least {shift + 1} for objective '{objective}'")
    positive = c > 0
    n = np.full(c.size, float(n_low))
    theta: float | None = None
    saturated = n_high * float(q[positive].sum()) + n_low * float(q[~positive].sum())
    if budget >= saturated:
        n[positive] = n_high
        if not positive.all():
            each = (budget - n_high * q[positive].sum()) / q[~positive].sum()
            n[~positive] = np.clip(each, n_low, n_high)
    elif budget == n_low * float(q.sum()):
        theta = 0.0
    else:
        s = np.sqrt(c[positive]) / np.sqrt(q[positive])
        rest = budget - n_low * float(q[~positive].sum()) - shift * float(q[positive].sum())
        theta = _theta(s, q[positive], rest, n_low - shift, n_high - shift)
        n[positive] = np.clip(shift + theta * s, n_low, n_high)
    return Continuous(n, theta, float((c / (n - shift)).sum()))
