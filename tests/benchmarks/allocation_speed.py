"""How long rule "optimal" takes, how the time grows with the number of prompts, and that the plan is optimal."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from dynamo_core.algorithms.allocation import allocate, marginal_gain
from dynamo_core.algorithms.checks import FloatArray, IntArray
from tests.benchmarks.mixtures import MEAN, MID, draw
from tests.benchmarks.targets import Target
from tests.benchmarks.true_rates import NARROW, WIDE

SIZES = (1_000, 10_000, 100_000, 1_000_000)
RUNS = 5
LIMIT_S = 1.0


class Timing(NamedTuple):
    """Best wall time, and the processor time of that run: equal when one thread does the work."""

    wall_s: float
    processor_s: float


def best_of(c_N: FloatArray, low: int, high: int) -> tuple[Timing, IntArray]:
    timings = []
    for _ in range(RUNS):
        wall, processor = time.perf_counter(), time.process_time()
        plan_N = allocate(c_N, MEAN * c_N.size, low, high, rule="optimal")
        timings.append(Timing(time.perf_counter() - wall, time.process_time() - processor))
    return min(timings), plan_N


def is_optimal(c_N: FloatArray, n_N: IntArray, low: int, high: int) -> bool:
    """No unit moved from one prompt to another lowers the objective: for falling gains, the optimum.

    Every gain still open is at most every gain taken; the objective is 1/n.
    """
    taken, still = n_N > low, n_N < high
    least = marginal_gain(c_N[taken], n_N[taken] - 1, "neyman").min(initial=np.inf)
    most = marginal_gain(c_N[still], n_N[still], "neyman").max(initial=0.0)
    return bool(most <= least)


def table() -> list[Target]:
    """Print times and their growth; the slower of the two bounds must keep the limit at the largest size."""
    print(f"\n4. Time of rule optimal, mid mixture, mean {MEAN}, best of {RUNS} (one thread: processor/wall about 1).")
    print("   growth = time over that of a tenth of the prompts. optimal = no exchange of one rollout improves it.")
    print(f"{'prompts':>10}{'bounds':>8}{'wall':>12}{'growth':>8}{'processor/wall':>16}{'optimal':>9}")
    slowest, optimal = 0.0, True
    for low, high in (NARROW, WIDE):
        before = None
        for size in SIZES:
            p_N = draw(MID, size, np.random.default_rng(size))
            c_N = p_N * (1 - p_N)
            timing, plan_N = best_of(c_N, low, high)
            proven = is_optimal(c_N, plan_N, low, high) and int(plan_N.sum()) == MEAN * size
            growth = f"{timing.wall_s / before:.1f}" if before else ""
            share = timing.processor_s / timing.wall_s
            bounds = f"{low}..{high}"
            print(f"{size:>10}{bounds:>8}{timing.wall_s * 1e3:>9.2f} ms{growth:>8}{share:>16.2f}{proven!s:>9}")
            before, optimal = timing.wall_s, optimal and proven
        slowest = max(slowest, timing.wall_s)
    return [
        Target(f"seconds for {SIZES[-1]:,} prompts", slowest, LIMIT_S),
        Target("plans not optimal", float(not optimal), 0),
    ]
