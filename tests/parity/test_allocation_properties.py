"""Properties of allocation that hold for every input (hypothesis)."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_core.algorithms.allocation import RULES, allocate, continuous, objective_value

from . import allocation_twins as twins

# Mutation testing asks for fewer.
FEW = settings(max_examples=int(os.environ.get("PARITY_EXAMPLES", "150")), deadline=None, derandomize=True)
OBJECTIVES = ("neyman", "rloo", "drgrpo")
VARIANCES = st.one_of(st.just(0.0), st.floats(1e-9, 10.0), st.sampled_from([0.09, 0.25, 0.1 * 0.9, 0.16]))


@st.composite
def instances(draw: st.DrawFn, max_size: int = 12) -> tuple[list[float], int, int, int]:
    """(variance, budget, n_low, n_high), feasible; n_low >= 3: every objective is defined."""
    c = draw(st.lists(VARIANCES, min_size=1, max_size=max_size))
    low = draw(st.integers(3, 6))
    high = draw(st.integers(low, low + 30))
    budget = draw(st.integers(low * len(c), high * len(c)))
    return c, budget, low, high


@FEW
@given(instances(), st.sampled_from(RULES), st.sampled_from(OBJECTIVES))
def test_exact_sum_and_bounds(instance: tuple[list[float], int, int, int], rule: str, objective: str) -> None:
    c, budget, low, high = instance
    n = allocate(*instance, rule=rule, objective=objective)
    assert n.dtype == np.int64
    assert n.shape == (len(c),)
    assert int(n.sum()) == budget
    assert n.min() >= low
    assert n.max() <= high


@FEW
@given(instances(), st.sampled_from(OBJECTIVES), st.randoms(use_true_random=False))
def test_permutation_equivariance(
    instance: tuple[list[float], int, int, int], objective: str, random: np.random.Generator
) -> None:
    c, *rest = instance
    order = list(range(len(c)))
    random.shuffle(order)
    n = allocate(c, *rest, rule="optimal", objective=objective)
    shuffled = allocate([c[i] for i in order], *rest, rule="optimal", objective=objective)
    if len(set(c)) == len(c) and min(np.diff(sorted(c)), default=1) > 1e-9:
        assert shuffled.tolist() == n[order].tolist()
    assert sorted(shuffled) == sorted(n)
    plain = twins.objective(c, n.tolist(), objective)
    moved = twins.objective([c[i] for i in order], shuffled.tolist(), objective)
    assert np.isclose(plain, moved, rtol=1e-12, atol=0)


@FEW
@given(instances(), st.sampled_from(("optimal", "waterfall_variance", "waterfall_std")))
def test_monotone_in_variance(instance: tuple[list[float], int, int, int], rule: str) -> None:
    c = np.asarray(instance[0])
    n = allocate(*instance, rule=rule)
    larger = c[:, None] > c[None, :] * (1 + 1e-12)
    assert (n[:, None] >= n[None, :])[larger].all()


@FEW
@given(instances(), st.floats(0, 5), st.sampled_from(OBJECTIVES))
def test_equal_variance_is_uniform(
    instance: tuple[list[float], int, int, int], variance: float, objective: str
) -> None:
    c, *rest = instance
    equal = [variance] * len(c)
    uniform = allocate(equal, *rest, rule="uniform").tolist()
    for rule in RULES:
        assert allocate(equal, *rest, rule=rule, objective=objective).tolist() == uniform


@FEW
@given(instances(), st.sampled_from(OBJECTIVES))
def test_optimal_is_never_worse(instance: tuple[list[float], int, int, int], objective: str) -> None:
    best = objective_value(instance[0], allocate(*instance, rule="optimal", objective=objective), objective)
    for rule in RULES:
        for other in OBJECTIVES:
            n = allocate(*instance, rule=rule, objective=other)
            assert best <= objective_value(instance[0], n, objective) * (1 + 1e-12)


@FEW
@given(instances(), st.sampled_from(("neyman", "rloo")))
def test_continuous_bounds_the_integers_from_below(instance: tuple[list[float], int, int, int], objective: str) -> None:
    plan = continuous(*instance, objective=objective)
    n = allocate(*instance, rule="optimal", objective=objective)
    assert np.isclose(plan.n.sum(), instance[1], rtol=1e-9)
    value = objective_value(instance[0], n, objective)
    assert plan.objective <= value * (1 + 1e-9) + 1e-15


@FEW
@given(instances(max_size=3), st.sampled_from(OBJECTIVES))
def test_brute_force(instance: tuple[list[float], int, int, int], objective: str) -> None:
    c, budget, low, high = instance
    high = min(high, low + 6)
    budget = min(budget, high * len(c))
    n = allocate(c, budget, low, high, rule="optimal", objective=objective)
    best = twins.brute_force(c, budget, low, high, objective)
    assert np.isclose(twins.objective(c, n.tolist(), objective), best, rtol=1e-12, atol=0)


@FEW
@given(instances(), st.integers(-30, 30))
def test_a_common_factor_changes_nothing(instance: tuple[list[float], int, int, int], power: int) -> None:
    c, *rest = instance
    scaled = [x * 2.0**power for x in c]
    assert allocate(scaled, *rest, rule="optimal").tolist() == allocate(c, *rest, rule="optimal").tolist()
