"""Allocation: reference plans exactly, the twins on random inputs, and the two-stage weights."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import numpy as np
import pytest

from dynamo_core.algorithms.allocation import (
    allocate,
    continuous,
    largest_remainder,
    marginal_gain,
    objective_value,
    pooled_weights_biased,
    stage_weights,
    top_up_bounds,
)
from dynamo_core.algorithms.prompt_stats import official_rank

from . import allocation_twins as twins
from .oracle import ATOL, RTOL, cases, load

INTEGER = {
    "int_neyman": ("optimal", "neyman"),
    "int_rloo": ("optimal", "rloo"),
    "int_drgrpo": ("optimal", "drgrpo"),
    "waterfall_variance": ("waterfall_variance", "neyman"),
    "waterfall_std": ("waterfall_std", "neyman"),
    "uniform": ("uniform", "neyman"),
}


def _arguments(case: dict[str, Any]) -> tuple[list[float], int, int, int]:
    return case["c"], case["budget_effective"], case["n_low"], case["n_high"]


INTEGER_CASES = [
    pytest.param(case, name, id=f"{case['id']}-{name}")
    for case in [*load("allocation")["cases"], *load("allocation_extra")["cases"]]
    for name in INTEGER
    if case["expected"].get(name) is not None
]
CONTINUOUS_CASES = [
    pytest.param(case, objective, id=f"{case['id']}-{objective}")
    for case in load("allocation")["cases"]
    for objective in ("neyman", "rloo")
    if case["expected"][f"kkt_{objective}"] is not None
]


@pytest.mark.parametrize(("case", "name"), INTEGER_CASES)
def test_oracle_integer_plans(case: dict[str, Any], name: str) -> None:
    expected = case["expected"][name]
    rule, objective = INTEGER[name]
    n = allocate(*_arguments(case), rule=rule, objective=objective)
    assert n.dtype == np.int64
    assert n.tolist() == expected["n"]
    value = expected.get("objective", expected.get("objective_neyman"))
    assert objective_value(case["c"], n, objective) == pytest.approx(value, rel=RTOL, abs=ATOL)


@pytest.mark.parametrize(("case", "objective"), CONTINUOUS_CASES)
def test_oracle_continuous(case: dict[str, Any], objective: str) -> None:
    expected = case["expected"][f"kkt_{objective}"]
    plan = continuous(*_arguments(case), objective=objective)
    assert plan.n.dtype == np.float64
    np.testing.assert_allclose(plan.n, expected["n"], rtol=RTOL, atol=ATOL)
    assert plan.objective == pytest.approx(expected["objective"], rel=RTOL, abs=ATOL)
    assert plan.theta == (expected["theta"] and pytest.approx(expected["theta"], rel=RTOL))
    rounded = case["expected"]["largest_remainder_of_kkt_neyman"]
    if objective == "neyman":
        n = largest_remainder(plan.n, case["budget_effective"])
        assert n.dtype == np.int64
        assert n.tolist() == rounded["n"]


@pytest.mark.parametrize("case", cases("allocation", "cost_aware"))
def test_oracle_cost_aware(case: dict[str, Any]) -> None:
    c, q, budget = case["c"], case["cost_per_rollout"], case["cost_budget"]
    plan = continuous(c, budget, case["n_low"], case["n_high"], cost=q)
    np.testing.assert_allclose(plan.n, case["n"], rtol=RTOL)
    assert plan.theta == pytest.approx(case["theta"], rel=RTOL)
    assert plan.objective == pytest.approx(case["objective"], rel=RTOL)
    assert np.dot(q, plan.n) == pytest.approx(case["spent"], rel=RTOL)
    n = allocate(c, budget, case["n_low"], case["n_high"], rule="optimal", cost=q)
    assert np.dot(q, n) <= budget
    assert np.abs(n - case["n"]).max() < 1.5
    assert objective_value(c, n) >= case["objective"]
    assert objective_value(c, n) == pytest.approx(case["objective"], rel=0.03)


@pytest.mark.parametrize("case", cases("allocation", "official_rule"))
def test_oracle_official_rule(case: dict[str, Any]) -> None:
    rank = official_rank(case["positive_count"], case["sample_count"])
    n = allocate(
        np.maximum(rank, 0), case["budget"], case["n_low"], case["n_high"],
        rule="waterfall_variance",
    )  # fmt: skip
    assert n.tolist() == case["n"]


def _instance(seed: int, n_low: int) -> tuple[list[float], int, int, int]:
    """Random sizes, bounds and variances: real, on a grid (ties), with zeros, or ulp-close."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    high = n_low + int(rng.integers(0, 40))
    success = rng.integers(0, 9, size) / 8
    kinds = [
        rng.random(size),
        success * (1 - success),
        rng.random(size) * (rng.random(size) < 0.5),
        np.where(rng.random(size) < 0.5, 0.1 * 0.9, 0.9 * (1 - 0.9)),
        10.0 ** rng.uniform(-12, 3, size),
    ]
    budget = int(rng.integers(size * n_low, size * high + 1))
    return kinds[seed % len(kinds)].tolist(), budget, n_low, high


@pytest.mark.parametrize(("objective", "n_low"), [("neyman", 1), ("rloo", 2), ("drgrpo", 3)])
def test_optimal_equals_the_heap(objective: str, n_low: int) -> None:
    for seed in range(150):
        instance = _instance(seed, n_low + seed % 3)
        n = allocate(*instance, rule="optimal", objective=objective)
        assert n.tolist() == twins.heap_optimum(*instance, objective), instance


@pytest.mark.parametrize("objective", ["neyman", "rloo", "drgrpo"])
def test_optimal_equals_the_heap_when_large(objective: str) -> None:
    """Above 16384 prompts the threshold is first sought among every second one."""
    rng = np.random.default_rng(5)
    size, budget = 17_000, 85_000
    k = rng.integers(0, 17, size)
    spread = rng.beta(0.3, 0.3, size)
    even = np.arange(size) % 2 == 0
    for c in (spread, (k + 0.5) * (16.5 - k), spread * even, np.where(even, spread, 1e-12)):
        n = allocate(c, budget, 3, 200, rule="optimal", objective=objective)
        assert n.tolist() == twins.heap_optimum(c.tolist(), budget, 3, 200, objective)


def test_optimal_over_extreme_scales() -> None:
    c = [1e-300, 1e-290, 3e-300, 0.0, 5e-324]
    assert allocate(c, 200, 1, 1000, rule="optimal").tolist() == twins.heap_optimum(
        [x * 1e290 for x in c], 200, 1, 1000, "neyman"
    )
    rng = np.random.default_rng(0)
    for _ in range(60):
        c = (10.0 ** rng.integers(-300, 300, 25)).tolist()
        budget = int(rng.integers(25 * 3, 25 * 40 + 1))
        n = allocate(c, budget, 3, 40, rule="optimal")
        assert n.tolist() == twins.heap_optimum(c, budget, 3, 40, "neyman")
    c = [1e300, 2e300, 1e280]
    assert allocate(c, 90, 1, 80, rule="optimal").tolist() == twins.heap_optimum(
        [x * 1e-290 for x in c], 90, 1, 80, "neyman"
    )


def test_ties_go_to_the_smaller_count_then_the_lower_index() -> None:
    # gains of c = 3 at n = 2 and of c = 1 at n = 1 are both 1/2; the smaller n is served first
    assert allocate([3.0, 1.0], 4, 1, 9, rule="optimal").tolist() == [2, 2]
    assert allocate([1.0, 3.0], 4, 1, 9, rule="optimal").tolist() == [2, 2]
    assert allocate([3.0, 1.0, 1.0], 5, 1, 9, rule="optimal").tolist() == [2, 2, 1]
    assert allocate([1.0, 1.0, 3.0], 5, 1, 9, rule="optimal").tolist() == [2, 1, 2]


@pytest.mark.parametrize("kind", ["waterfall_variance", "waterfall_std"])
def test_waterfall_equals_its_twin(kind: str) -> None:
    for seed in range(200):
        c, budget, low, high = _instance(seed, seed % 4)
        weights = c if kind == "waterfall_variance" else [math.sqrt(x) for x in c]
        n = allocate(c, budget, low, high, rule=kind)
        assert n.tolist() == twins.waterfall(weights, budget, low, high)


@pytest.mark.parametrize(("objective", "shift"), [("neyman", 0), ("rloo", 1)])
def test_continuous_equals_bisection(objective: str, shift: int) -> None:
    for seed in range(150):
        c, budget, low, high = _instance(seed, 2)
        q = np.random.default_rng(seed).uniform(0.5, 4, len(c))
        real_budget = float(low * q.sum() + (budget - low * len(c)) / len(c) * q.sum())
        real_budget = min(real_budget, high * float(q.sum()))
        plan = continuous(c, real_budget, low, high, objective=objective, cost=q)
        twin = twins.kkt(c, q.tolist(), real_budget, low, high, shift)
        np.testing.assert_allclose(plan.n, twin, rtol=1e-7, atol=1e-9)
        assert np.dot(q, plan.n) == pytest.approx(real_budget, rel=1e-9)


@pytest.mark.parametrize("objective", ["neyman", "rloo", "drgrpo"])
def test_cost_aware_equals_its_heap(objective: str) -> None:
    for seed in range(100):
        c, _, low, high = _instance(seed, 3)
        rng = np.random.default_rng(seed)
        q = rng.integers(1, 8, len(c)).astype(float)
        budget = float(rng.integers(int(low * q.sum()), int(high * q.sum()) + 1))
        n = allocate(c, budget, low, high, rule="optimal", objective=objective, cost=q)
        assert n.tolist() == twins.heap_cost(c, q.tolist(), budget, low, high, objective)
        open_costs = q[n < high]
        assert not open_costs.size or budget - np.dot(q, n) < open_costs.min()
        assert np.dot(q, n) <= budget


def test_cost_aware_large_and_equal_costs() -> None:
    rng = np.random.default_rng(0)
    c = rng.beta(0.5, 0.5, 2000)
    q = rng.integers(100, 900, 2000).astype(float)
    budget = 16.0 * q.sum()
    n = allocate(c, budget, 2, 64, rule="optimal", cost=q)
    assert n.tolist() == twins.heap_cost(c.tolist(), q.tolist(), budget, 2, 64, "neyman")
    equal = allocate(c, 16 * 2000, 2, 64, rule="optimal", cost=np.full(2000, 1.0))
    assert equal.tolist() == allocate(c, 16 * 2000, 2, 64, rule="optimal").tolist()


def test_weight_multiplies_sigma() -> None:
    rng = np.random.default_rng(1)
    c, weight = rng.random(30), rng.uniform(0, 3, 30)
    for rule in ("optimal", "waterfall_variance", "waterfall_std"):
        weighted = allocate(c, 300, 2, 40, rule=rule, weight=weight)
        assert weighted.tolist() == allocate(weight**2 * c, 300, 2, 40, rule=rule).tolist()
        assert weighted.tolist() != allocate(c, 300, 2, 40, rule=rule).tolist()
    plan = continuous(c, 300, 2, 40, weight=weight)
    np.testing.assert_allclose(plan.n, continuous(weight**2 * c, 300, 2, 40).n)


def test_marginal_gain_is_the_difference_of_the_objective() -> None:
    for objective, low in (("neyman", 1), ("rloo", 2), ("drgrpo", 3)):
        for n in range(low, 60):
            cost = twins.COSTS[objective]
            expected = cost(0.3, n) - cost(0.3, n + 1)
            assert float(marginal_gain(0.3, n, objective)) == pytest.approx(expected, rel=1e-10)


def test_a_million_prompts_in_a_second() -> None:
    p = np.random.default_rng(0).beta(0.5, 0.5, 1_000_000)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        n = allocate(p * (1 - p), 16_000_000, 4, 64, rule="optimal", objective="rloo")
        seconds.append(time.perf_counter() - start)
        assert n.sum() == 16_000_000
        if seconds[-1] <= 1.0:
            break
    assert min(seconds) <= 1.0


# --- pilot and top-up ---------------------------------------------------------------------------


def _pilot_kappa(p: float, pilot: int, topup: Any, pooled: bool) -> float:
    """E[sum_j w_j A_j s_j] / grad p, exactly: leave-one-out within each stage, or pooled."""
    total = 0.0
    for k in range(pilot + 1):
        chance_k = math.comb(pilot, k) * p**k * (1 - p) ** (pilot - k)
        m = topup(k)
        for j in range(m + 1):
            chance = chance_k * math.comb(m, j) * p**j * (1 - p) ** (m - j)
            if pooled:
                weight = float(pooled_weights_biased([pilot], [m])[0])
                total += chance * _score(p, k + j, pilot + m, weight)
            else:
                a, b = stage_weights([pilot], [m], pilot_share=0.25)
                total += chance * (_score(p, k, pilot, a[0]) + _score(p, j, m, b[0]))
    return total


def _score(p: float, right: int, n: int, weight: float) -> float:
    """sum_j w A_j E[s_j | reward] / grad p with A the leave-one-out advantage."""
    mean = right / n
    scale = n / (n - 1)
    gained = right * (1 - mean) * scale / p
    lost = (n - right) * (0 - mean) * scale / (1 - p)
    return weight * (gained - lost)


@pytest.mark.parametrize(("p", "pooled"), [(0.02, 0.70), (0.1, 0.79), (0.3, 0.93), (0.5, 0.98)])
def test_fixed_stage_weights_are_unbiased_and_pooling_is_not(p: float, pooled: float) -> None:
    def rule(k: int) -> int:
        return 20 if 0 < k < 4 else 4

    assert _pilot_kappa(p, 4, rule, pooled=False) == pytest.approx(1, abs=1e-12)
    assert _pilot_kappa(p, 4, rule, pooled=True) == pytest.approx(pooled, abs=0.006)


def test_stage_weights_sum_to_one_per_prompt() -> None:
    pilot, topup = np.array([4, 4, 2]), np.array([2, 9, 30])
    a, b = stage_weights(pilot, topup, pilot_share=0.3)
    np.testing.assert_allclose(pilot * a, 0.3)
    np.testing.assert_allclose(topup * b, 0.7)
    np.testing.assert_allclose(pooled_weights_biased(pilot, topup), 1 / (pilot + topup))


def test_top_up_bounds_feed_allocate() -> None:
    c = np.random.default_rng(2).random(10)
    budget, low, high = top_up_bounds(10, 160, 4, 8, 24)
    assert (budget, low, high) == (120, 4, 20)
    n = 4 + allocate(c, budget, low, high, rule="optimal")
    assert n.sum() == 160
    assert n.min() >= 8
    assert n.max() <= 24
    assert top_up_bounds(10, 160, 6, 2, 24) == (100, 2, 18)
    assert top_up_bounds(10, 160, 6, 2, 24, least=1) == (100, 1, 18)


def test_brute_force_and_both_roundings_on_every_small_instance() -> None:
    grid = (0.0, 0.09, 0.25, 1.0)
    for c in itertools.product(grid, repeat=3):
        for budget in range(9, 19, 2):
            for objective in ("neyman", "rloo", "drgrpo"):
                n = allocate(c, budget, 3, 6, rule="optimal", objective=objective)
                best = twins.brute_force(c, budget, 3, 6, objective)
                assert twins.objective(c, n.tolist(), objective) == pytest.approx(best, rel=1e-12)
