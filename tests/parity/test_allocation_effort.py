"""What the exact optimum costs, counted instead of timed: passes over the prompts and units ranked."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest

from dynamo_core.algorithms import integer_optimum as module
from dynamo_core.algorithms.allocation import allocate


class Effort:
    """Sizes of the passes and numbers of ranked units, while `allocate` runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[int] = []
        self.ranked: list[int] = []
        count, rank = module._units_above, module._rank_undecided

        def counting(c: Any, *rest: Any) -> Any:
            self.passes.append(c.size)
            return count(c, *rest)

        def ranking(c: Any, fits: Any, over: Any, **rest: Any) -> Any:
            self.ranked.append(int((over - fits).sum()))
            return rank(c, fits, over, **rest)

        monkeypatch.setattr(module, "_units_above", counting)
        monkeypatch.setattr(module, "_rank_undecided", ranking)

    def of(self, c: Any, *rest: Any, **options: Any) -> tuple[list[int], int]:
        """(sizes of the passes, units ranked) of one allocation."""
        self.passes.clear()
        self.ranked.clear()
        allocate(c, *rest, rule="optimal", **options)
        return list(self.passes), sum(self.ranked)


@pytest.fixture(name="effort")
def _effort(monkeypatch: pytest.MonkeyPatch) -> Effort:
    return Effort(monkeypatch)


def _variances(seed: int, size: int) -> Any:
    rng = np.random.default_rng(seed)
    p = rng.beta(0.5, 0.5, size)
    return [p * (1 - p), p * (1 - p) * (rng.random(size) < 0.5), 10.0 ** rng.uniform(-8, 0, size)][seed % 3]


def test_the_first_guess_is_the_solution_where_bounds_hardly_bind(effort: Effort) -> None:
    c = np.random.default_rng(0).uniform(0.05, 0.25, 2000)
    for low in (1, 4, 8):
        for mean in (16, 20, 40):
            passes, ranked = effort.of(c, 2000 * mean, low, 1000)
            assert passes == [2000, 2000]  # the threshold 2 % above the guess, and 2 % below
            assert ranked < 2000 * (0.04 * mean + 0.1)


@pytest.mark.parametrize("objective", ["neyman", "rloo", "drgrpo"])
def test_few_passes_and_two_units_per_prompt_to_rank(effort: Effort, objective: str) -> None:
    counts = []
    for seed in range(60):
        size = (100, 1000)[seed % 2]
        high = (20, 64, 500)[seed // 2 % 3]
        mean = np.random.default_rng(seed).uniform(4, 3 + 0.45 * (high - 3))
        passes, ranked = effort.of(_variances(seed, size), int(mean * size), 3, high, objective=objective)
        assert ranked <= 2 * size
        counts.append(len(passes))
    assert np.mean(counts) < 6.5
    assert max(counts) < 15


@pytest.mark.parametrize("objective", ["neyman", "rloo", "drgrpo"])
def test_a_sample_of_many_prompts_leaves_two_passes_over_all(effort: Effort, objective: str) -> None:
    size = 40_000
    for seed in range(5):
        for mean in (5, 12):
            passes, ranked = effort.of(_variances(seed, size), mean * size, 3, 64, objective=objective)
            assert passes[-2:] == [size] * 2
            assert set(passes[:-2]) == {size // 4}  # every fourth prompt
            assert len(passes) < 25
            assert ranked <= 2 * size


@pytest.mark.parametrize("objective", ["neyman", "rloo", "drgrpo"])
def test_unequal_costs_leave_few_units_to_the_heap(
    effort: Effort, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pops, pop = [0], heapq.heappop

    def counting(heap: list[Any]) -> Any:
        pops[0] += 1
        return pop(heap)

    monkeypatch.setattr(heapq, "heappop", counting)
    counts = []
    for seed in range(24):
        cost = np.random.default_rng(seed).uniform(1, 5, 300)
        c, total = _variances(seed, 300), float(cost.sum())
        pops[0] = 0
        passes, _ = effort.of(c, (10 + seed) * total, 3, 64, objective=objective, cost=cost)
        assert pops[0] < 5 * 64  # at most 64 units of the largest cost are undecided
        counts.append(len(passes))
        enough = 3 * total + 61 * float(cost[c > 0].sum()) + 0.5  # all of them at the cap: nothing to seek
        assert effort.of(c, min(enough, 64 * total), 3, 64, objective=objective, cost=cost)[0] == []
    assert np.mean(counts) < 9


def test_a_sample_helps_under_unequal_costs_too(effort: Effort) -> None:
    size, over_all = 40_000, []
    for seed in range(5):
        cost = np.random.default_rng(seed).uniform(1, 5, size)
        passes, _ = effort.of(_variances(seed, size), 12 * float(cost.sum()), 3, 64, cost=cost)
        assert 0 < passes.count(size // 4) < 12
        over_all.append(passes.count(size))
    assert np.mean(over_all) < 8
