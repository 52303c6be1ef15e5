"""Slow twins of allocation and prompt statistics; see twins.py."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

# --- allocation ---------------------------------------------------------------------------------

GAINS: dict[str, Callable[[float, int], float]] = {
    "neyman": lambda c, n: c / (n * (n + 1)),
    "rloo": lambda c, n: c / (n * (n - 1)),
    "drgrpo": lambda c, n: c * ((n * n - n - 1) / (n * (n + 1)) ** 2),
}
COSTS: dict[str, Callable[[float, int], float]] = {
    "neyman": lambda c, n: c / n,
    "rloo": lambda c, n: c / (n - 1),
    "drgrpo": lambda c, n: c * (n - 1) / n**2,
}


def objective(c: Sequence[float], n: Sequence[int], name: str) -> float:
    return math.fsum(COSTS[name](ci, ni) for ci, ni in zip(c, n, strict=True))


def heap_optimum(c: Sequence[float], budget: int, low: int, high: int, name: str) -> list[int]:
    """One rollout at a time to the largest gain; ties to the smaller n, then the lower index."""
    n = [low] * len(c)
    heap = [(-GAINS[name](ci, low), low, i) for i, ci in enumerate(c) if low < high]
    heapq.heapify(heap)
    for _ in range(budget - low * len(c)):
        _, current, i = heapq.heappop(heap)
        n[i] = current + 1
        if n[i] < high:
            heapq.heappush(heap, (-GAINS[name](c[i], n[i]), n[i], i))
    return n


def heap_cost(c: Sequence[float], q: Sequence[float], budget: float, low: int, high: int, name: str) -> list[int]:
    """The same on the gain of c/q, skipping what no longer fits into the cost budget."""
    n = [low] * len(c)
    left = budget - low * math.fsum(q)
    heap = [(-GAINS[name](ci / qi, low), low, i) for i, (ci, qi) in enumerate(zip(c, q, strict=True))]
    heapq.heapify(heap)
    while heap:
        _, current, i = heapq.heappop(heap)
        if current == high or q[i] > left:
            continue
        left -= q[i]
        n[i] = current + 1
        heapq.heappush(heap, (-GAINS[name](c[i] / q[i], n[i]), n[i], i))
    return n


def brute_force(c: Sequence[float], budget: int, low: int, high: int, name: str) -> float:
    """The smallest objective over all feasible plans."""
    plans = itertools.product(range(low, high + 1), repeat=len(c))
    return min(objective(c, plan, name) for plan in plans if sum(plan) == budget)


def waterfall(weights: Sequence[float], budget: int, low: int, high: int) -> list[int]:
    n = [low] * len(weights)
    left = budget - low * len(weights)
    while left:
        below = [i for i in range(len(n)) if n[i] < high]
        total = math.fsum(weights[i] for i in below)
        shares = [left * weights[i] / total if total > 1e-12 else left / len(below) for i in below]
        given = [math.floor(share) for share in shares]
        order = sorted(range(len(below)), key=lambda j: (given[j] - shares[j], j))
        for j in order[: left - sum(given)]:
            given[j] += 1
        for j, i in enumerate(below):
            added = min(given[j], high - n[i])
            n[i] += added
            left -= added
    return n


def kkt(c: Sequence[float], q: Sequence[float], budget: float, low: int, high: int, shift: int) -> list[float]:
    """clip(shift + theta sigma / sqrt q) with theta by 300 bisections; zeros share what is left."""

    def plan(theta: float) -> list[float]:
        raw = [shift + theta * math.sqrt(ci) / math.sqrt(qi) for ci, qi in zip(c, q, strict=True)]
        return [min(max(value, low), high) for value in raw]

    def spent(n: Sequence[float]) -> float:
        return math.fsum(qi * ni for qi, ni in zip(q, n, strict=True))

    positive = [math.sqrt(ci) / math.sqrt(qi) for ci, qi in zip(c, q, strict=True) if ci > 0]
    bottom, top = 0.0, high / min(positive) if positive else 0.0
    if spent(plan(top)) <= budget:
        n = plan(top)
        zeros = math.fsum(qi for ci, qi in zip(c, q, strict=True) if ci == 0)
        rest = budget - math.fsum(qi * high for ci, qi in zip(c, q, strict=True) if ci > 0)
        return [ni if ci > 0 else rest / zeros for ci, ni in zip(c, n, strict=True)]
    for _ in range(300):
        middle = 0.5 * (bottom + top)
        bottom, top = (middle, top) if spent(plan(middle)) <= budget else (bottom, middle)
    return plan(bottom)


# --- prompt statistics --------------------------------------------------------------------------


def discounted_counts(visits: Sequence[Sequence[bool]], discount: float) -> tuple[float, float]:
    """(k, G) of a prompt's visits, oldest first; the newest weighs 1, older ones discounted."""
    k = G = 0.0
    for age, visit in enumerate(reversed(visits)):
        k += discount**age * sum(visit)
        G += discount**age * len(visit)
    return k, G


def bernoulli_variance(k: float, G: float, alpha: float, beta: float) -> float:
    a, b = alpha + k, beta + G - k
    mean = a / (a + b)
    return mean * (1 - mean) * (a + b) / (a + b + 1)  # E[p] - E[p^2]


def official_rank(k: float, G: float) -> float:
    if G < 4:
        return -1.0
    if k / G >= 0.85:
        return 0.01
    return max(k * (G - k) / (G * (G - 1)) + 1e-6 * (1 - k / G), 0.01)
