"""Exact integer optimum of sum_i c_i h(n_i), sum n_i = budget, n_low <= n_i <= n_high, h convex.

Every prompt starts at n_low and the rest goes, one at a time, to the largest gain
f_i(n) - f_i(n+1) (Gross 1956, Fox 1966). A prompt's gains fall with n, so the units taken are the
largest of all gains, and one threshold on the gain replaces the loop: count the gains above it in
closed form, narrow it until at most about 2N units are undecided, and rank those. O(N) per count.

Ties: larger gain, then smaller current n, then lower index, as a heap on (-gain, n, index) has it.

Shapes: N prompts, U undecided units.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamo_core.algorithms.checks import FloatArray, IntArray

# Variances below this share of the largest come after all others: their gains would underflow.
_NEGLIGIBLE = 2.0**-900
# With many prompts the threshold is first sought among about this many of them.
_SAMPLE = 8192
_NEAR = 1.02


def _gain_neyman(c: FloatArray, n: FloatArray) -> FloatArray:
    return c / (n * (n + 1))  # 1/n - 1/(n+1)


def _gain_rloo(c: FloatArray, n: FloatArray) -> FloatArray:
    return c / (n * (n - 1))  # 1/(n-1) - 1/n


def _gain_drgrpo(c: FloatArray, n: FloatArray) -> FloatArray:
    return c * ((n * n - n - 1) / (n * (n + 1)) ** 2)  # (n-1)/n^2 - n/(n+1)^2


Gain = Callable[[FloatArray, FloatArray], FloatArray]
# objective -> (smallest n from which the gains fall, gain(c, n), s with gain(n) ~ c / (n + s)^2)
OBJECTIVES: dict[str, tuple[int, Gain, float]] = {
    "neyman": (1, _gain_neyman, 0.5),
    "rloo": (2, _gain_rloo, -0.5),
    "drgrpo": (3, _gain_drgrpo, 1.5),
}


def marginal_gain(c: npt.ArrayLike, n: npt.ArrayLike, objective: str) -> FloatArray:
    """f(n) - f(n+1) of a prompt with variance c: what its next rollout takes off the objective."""
    _, gain, _ = OBJECTIVES[objective]
    return gain(np.asarray(c, dtype=np.float64), np.asarray(n, dtype=np.float64))


def _normalised(c: FloatArray) -> FloatArray:
    """c times a power of two (exact), largest value in [0.5, 1), negligible values zero."""
    scaled = np.ldexp(c, -int(np.frexp(c.max())[1]))
    return np.where(scaled < _NEGLIGIBLE, 0.0, scaled)


def _units_above(
    c: FloatArray, threshold: float, n_low: int, n_high: int, objective: str
) -> IntArray:
    """int64[N]: how many of each prompt's gains, from n_low to n_high - 1, exceed the threshold."""
    _, gain, shift = OBJECTIVES[objective]
    n = np.clip(np.ceil(np.sqrt(c / threshold + 0.25) - shift), n_low, n_high)
    while (more := (n < n_high) & (gain(c, n) > threshold)).any():
        n[more] += 1
    while (fewer := (n > n_low) & (gain(c, np.maximum(n - 1, n_low)) <= threshold)).any():
        n[fewer] -= 1
    return n.astype(np.int64) - n_low


def _first_guess(
    c: FloatArray, price: FloatArray, *, extra: float, bounds: tuple[int, int], objective: str
) -> float:
    """threshold^-1/2 near the solution, from every k-th prompt where there are many."""
    step = c.size // _SAMPLE
    if step > 1:
        some = slice(step // 2, None, step)
        part, part_price = c[some], price[some]
        part_extra = extra * float(part_price.sum() / price.sum())
        room = float((part_price * (part > 0)).sum()) * (bounds[1] - bounds[0])
        if part_extra < room:
            few = 0.02 * part.size * float(price.max())
            found = _bracket(
                part, part_price, extra=part_extra, few=few, bounds=bounds, objective=objective
            )
            return math.sqrt(found.x_top * found.x_bottom)
    return (extra + bounds[0] * float(price.sum())) / float((price * np.sqrt(c)).sum())


class _Bracket(NamedTuple):
    """Units [N] above the thresholds x^-2: `fits` into the budget, `over` fills it or more."""

    fits: IntArray
    over: IntArray
    x_top: float
    x_bottom: float


def _bracket(
    c: FloatArray,
    price: FloatArray,
    *,
    extra: float,
    few: float,
    bounds: tuple[int, int],
    objective: str,
) -> _Bracket:
    """Narrow the thresholds until the units between them cost at most `few` (or none lies between).

    By interpolation in x = threshold^-1/2, in which the number of units is nearly linear, and by
    the geometric mean whenever that has not halved the bracket.
    """
    n_low, n_high = bounds
    positive = c[c > 0]
    x_top = float(marginal_gain(positive.max(), n_low, objective)) ** -0.5
    x_bottom = (0.5 * float(marginal_gain(positive.min(), n_high - 1, objective))) ** -0.5
    fits = np.zeros(c.size, dtype=np.int64)
    over = np.where(c > 0, n_high - n_low, 0).astype(np.int64)
    used, over_used = 0.0, float((over * price).sum())
    guess = _first_guess(c, price, extra=extra, bounds=bounds, objective=objective)
    tries = [guess * _NEAR, guess / _NEAR]
    halved = True
    while over_used - used > few:
        width = math.log(x_bottom / x_top)
        x = x_top + (x_bottom - x_top) * (extra - used) / (over_used - used)
        x = tries.pop() if tries else x if halved else math.sqrt(x_top * x_bottom)
        if not x_top < x < x_bottom:
            x = math.sqrt(x_top * x_bottom)
            if not x_top < x < x_bottom:
                break
        units = _units_above(c, x**-2.0, n_low, n_high, objective)
        spent = float((units * price).sum())
        if spent <= extra:
            x_top, fits, used = x, units, spent
        else:
            x_bottom, over, over_used = x, units, spent
        halved = math.log(x_bottom / x_top) < 0.5 * width
    return _Bracket(fits, over, x_top, x_bottom)


def _rank_undecided(
    c: FloatArray, fits: IntArray, over: IntArray, *, short: int, n_low: int, objective: str
) -> IntArray:
    """int64[N]: the `short` best of the units between `fits` and `over`, counted by prompt."""
    undecided = over - fits
    prompt_U = np.repeat(np.arange(c.size), undecided)
    first_U = np.repeat(np.cumsum(undecided) - undecided, undecided)
    n_U = n_low + fits[prompt_U] + (np.arange(prompt_U.size) - first_U)
    gain_U = marginal_gain(c[prompt_U], n_U, objective)
    cut = np.partition(gain_U, gain_U.size - short)[gain_U.size - short]
    taken = gain_U > cut
    tied = np.flatnonzero(gain_U == cut)
    tied = tied[np.argsort(n_U[tied], kind="stable")]  # prompts ascend already
    taken[tied[: short - int(taken.sum())]] = True
    return np.bincount(prompt_U[taken], minlength=c.size).astype(np.int64)


def integer_optimum(
    c: FloatArray, budget: int, n_low: int, n_high: int, objective: str
) -> IntArray:
    """The optimum n, int64[N]; arguments are validated: N n_low <= budget <= N n_high, c >= 0."""
    extra = budget - c.size * n_low
    n = np.full(c.size, n_low, dtype=np.int64)
    if extra == 0:
        return n
    scaled = _normalised(c)
    positive = scaled > 0
    if not positive.any():
        each, odd = divmod(extra, c.size)
        n += each
        n[:odd] += 1
        return n
    room = int(positive.sum()) * (n_high - n_low)
    if extra >= room:  # every gain is taken; the rest goes to those that counted as zero
        n[positive] = n_high
        if not positive.all():
            rest = budget - n_high * int(positive.sum())
            n[~positive] = integer_optimum(c[~positive], rest, n_low, n_high, objective)
        return n
    c = scaled
    few = max(2.0 * c.size, 64.0)
    found = _bracket(
        c, np.ones(c.size), extra=extra, few=few, bounds=(n_low, n_high), objective=objective
    )
    short = extra - int(found.fits.sum())
    n += found.fits
    if short:
        n += _rank_undecided(
            c, found.fits, found.over, short=short, n_low=n_low, objective=objective
        )
    return n


def cost_aware_greedy(
    c: FloatArray, cost: FloatArray, budget: float, n_low: int, n_high: int, *, objective: str
) -> IntArray:
    """Greedy on the gain per unit of cost under sum cost_i n_i <= budget, for validated arguments.

    Units are taken in the order of gain(c_i / cost_i, n), ties as above; one that no longer fits
    ends its prompt. The order is that of the continuous optimum n ~ sigma / sqrt(cost), and what
    stays unspent is less than the smallest cost of a prompt below its cap. With equal costs it is
    exact.
    """
    c = c / cost
    fits = np.zeros(c.size, dtype=np.int64)
    left = budget - n_low * float(cost.sum())
    if c.max() > 0 and n_high > n_low:
        c = _normalised(c)
        room = float((cost * (c > 0)).sum()) * (n_high - n_low)
        fits[c > 0] = n_high - n_low
        if left < room:
            few = 64.0 * float(cost.max())
            fits = _bracket(
                c, cost, extra=left, few=few, bounds=(n_low, n_high), objective=objective
            ).fits
    n = n_low + fits
    left = budget - float((cost * n).sum())
    gains = marginal_gain(c, n, objective)
    open_N = (n < n_high) & (cost <= left)
    cheapest = float(cost[open_N].min(initial=np.inf))
    heap = [(-gains[i], int(n[i]), i) for i in np.flatnonzero(open_N)]
    heapq.heapify(heap)
    while heap and left >= cheapest:
        _, current, i = heapq.heappop(heap)
        if cost[i] > left:
            continue
        left -= cost[i]
        n[i] = current + 1
        if n[i] < n_high:
            heapq.heappush(heap, (-float(marginal_gain(c[i], n[i], objective)), int(n[i]), i))
    return n
