"""How many rollouts each prompt gets: n [N] with sum n = budget and n_low <= n_i <= n_high.

A prompt's gradient noise is c_i h(n_i), c_i = sigma_i^2 its variance per rollout, h by estimator:
    neyman  1/n          a critic or a known baseline
    rloo    1/(n-1)      leave-one-out baseline
    drgrpo  (n-1)/n^2    group mean subtracted
`optimal` minimises sum_i c_i h(n_i) exactly over the integers. `waterfall_variance` is the
release's shape (floor, then proportional to its rank, capped); `waterfall_std` the same with
sqrt(c).

Shapes: N prompts.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dynamo_core.algorithms.checks import (
    FloatArray,
    IntArray,
    choice,
    fail,
    non_negative_array,
    require,
    whole,
)
from dynamo_core.algorithms.integer_optimum import (
    OBJECTIVES,
    cost_aware_greedy,
    integer_optimum,
    marginal_gain,
)
from dynamo_core.algorithms.kkt import (
    Continuous,
    check_bounds,
    continuous,
    cost_array,
    weighted_variance,
)
from dynamo_core.algorithms.two_stage import pooled_weights_biased, stage_weights, top_up_bounds

__all__ = [
    "RULES",
    "Continuous",
    "allocate",
    "continuous",
    "largest_remainder",
    "marginal_gain",
    "objective_value",
    "pooled_weights_biased",
    "stage_weights",
    "top_up_bounds",
]

RULES = ("uniform", "optimal", "waterfall_variance", "waterfall_std")
# Weights that sum to less than this carry no information: the rest is then spread evenly.
_NO_WEIGHT = 1e-12


def allocate(
    variance: npt.ArrayLike,
    budget: int,
    n_low: int,
    n_high: int,
    *,
    rule: str,
    objective: str = "neyman",
    cost: npt.ArrayLike | None = None,
    weight: npt.ArrayLike | None = None,
) -> IntArray:
    """Rollouts per prompt, int64[N].

    Args:
        variance: c_i = sigma_i^2 >= 0, [N] (only its length matters to `uniform`).
        budget: sum n_i. With `cost`: an upper bound of sum cost_i n_i, met to less than the
            smallest cost of a prompt below its cap.
        n_low, n_high: bounds of every n_i.
        rule: "uniform" (remainder to low indices), "optimal", "waterfall_variance",
            "waterfall_std".
        objective: what "optimal" minimises: "neyman" (n_low >= 1), "rloo" (n_low >= 2), "drgrpo"
            (n_low >= 3: its gains rise before).
        cost: q_i > 0 per rollout, [N], "optimal" only: n ~ sigma / sqrt(q).
        weight: W_i >= 0, [N]: sigma_i -> W_i sigma_i, a curriculum kept apart from variance
            control.

    Source: Neyman allocation (the paper's theorem); for the integers Gross 1956, Fox 1966.

    Raises:
        AlgorithmError: NaN or negative variance, shapes that do not match, n_low > n_high, a budget
            outside the bounds, an n_low too small for the objective, unknown rule or objective.
    """
    choice("rule", rule, RULES)
    choice("objective", objective, OBJECTIVES)
    c = weighted_variance(variance, weight)
    if cost is not None:
        require(rule == "optimal", "cost", f"given for rule '{rule}'", "None unless rule='optimal'")
    else:
        budget = whole("budget", budget, 0)
    q = cost_array(cost, c.size)
    check_bounds(budget, n_low, n_high, q)
    if rule == "uniform":
        return _uniform(c.size, budget)
    if rule != "optimal":
        weights = c if rule == "waterfall_variance" else np.sqrt(c)
        return _waterfall(weights, budget, int(n_low), int(n_high))
    smallest = OBJECTIVES[objective][0]
    require(n_low >= smallest, "n_low", n_low, f"at least {smallest} for objective '{objective}'")
    if cost is not None:
        return cost_aware_greedy(c, q, budget, int(n_low), int(n_high), objective=objective)
    return integer_optimum(c, budget, int(n_low), int(n_high), objective)


def objective_value(variance: npt.ArrayLike, n: npt.ArrayLike, objective: str = "neyman") -> float:
    """sum_i c_i h(n_i): N^2 times the variance of the mean gradient, up to a constant.

    Raises:
        AlgorithmError: unknown objective, shapes that do not match, h undefined at some n_i.
    """
    choice("objective", objective, OBJECTIVES)
    c = non_negative_array("variance", variance)
    n_N = non_negative_array("n", n)
    require(n_N.shape == c.shape, "n", f"of shape {n_N.shape}", f"of shape {c.shape}")
    smallest = 2 if objective == "rloo" else 1
    require(bool((n_N >= smallest).all()), "n", float(n_N.min()), f"at least {smallest}")
    if objective == "neyman":
        return math.fsum(c / n_N)
    if objective == "rloo":
        return math.fsum(c / (n_N - 1))
    return math.fsum(c * (n_N - 1) / n_N**2)


def _uniform(size: int, budget: int) -> IntArray:
    each, odd = divmod(budget, size)
    n = np.full(size, each, dtype=np.int64)
    n[:odd] += 1
    return n


def largest_remainder(shares: npt.ArrayLike, total: int) -> IntArray:
    """`shares` [N] rounded to whole numbers that sum to `total`: floors, then one more to the
    largest fractional parts, ties to the lower index.

    Raises:
        AlgorithmError: negative or non-finite shares, or a total that the floors cannot reach by
            adding at most one each.
    """
    shares_N = non_negative_array("shares", shares)
    n = np.floor(shares_N).astype(np.int64)
    short = whole("total", total, 0) - int(n.sum())
    if not 0 <= short <= n.size:
        fail("total", total, f"in [{n.sum()}, {n.sum() + n.size}], the shares rounded down or up")
    order = np.argsort(n - shares_N, kind="stable")
    n[order[:short]] += 1
    return n


def _waterfall(weights: FloatArray, budget: int, n_low: int, n_high: int) -> IntArray:
    """n_low each, the rest in proportion to `weights` among prompts below the cap.

    Rounded by largest remainder; what exceeds a cap is spread again. The release's shape, with the
    cap always respected.
    """
    n = np.full(weights.size, n_low, dtype=np.int64)
    left = budget - n_low * weights.size
    while left > 0:
        below = np.flatnonzero(n < n_high)
        shares = np.full(below.size, left / below.size)
        total = math.fsum(weights[below])
        if total > _NO_WEIGHT:
            shares = left * weights[below] / total
        given = np.minimum(largest_remainder(shares, left), n_high - n[below])
        n[below] += given
        left -= int(given.sum())
    return n
