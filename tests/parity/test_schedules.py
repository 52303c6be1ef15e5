"""Learning-rate schedules at their corners and against their formulas."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from dynamo_core.algorithms.schedules import SCHEDULES, constant, cosine, factor, linear


@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_moves_from_the_first_step_and_reaches_one(name: str) -> None:
    values = [factor(name, step, total=20, warmup=4) for step in range(5)]
    assert values == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factor(name, 0, total=20) == 1


def test_constant() -> None:
    assert [constant(step) for step in (0, 5, 10**6)] == [1.0] * 3


def test_linear() -> None:
    values = [linear(step, total=10, warmup=2, final=0.2) for step in (2, 6, 10, 50)]
    assert values == pytest.approx([1.0, 0.6, 0.2, 0.2])
    assert linear(10, total=10) == 0


def test_cosine() -> None:
    values = [cosine(step, total=10, warmup=2, final=0.2) for step in (2, 6, 10, 50)]
    assert values == pytest.approx([1.0, 0.6, 0.2, 0.2])
    for step in range(12):
        expected = 0.5 * (1 + math.cos(math.pi * min(step / 9, 1)))
        assert cosine(step, total=9) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_decay_is_monotone(name: str) -> None:
    values = [factor(name, step, total=40, warmup=5, final=0.1) for step in range(5, 60)]
    assert all(a >= b for a, b in pairwise(values))
