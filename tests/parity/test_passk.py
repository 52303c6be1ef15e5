"""pass@k: reference values, the twin, unbiasedness and extremes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dynamo_core.evaluation.passk import pass_at_k

from . import twins
from .oracle import ATOL, RTOL, cases, load


@pytest.mark.parametrize("case", cases("passk"))
def test_oracle(case: dict[str, Any]) -> None:
    value = pass_at_k(case["n"], case["c"], case["k"])
    assert isinstance(value, float)
    assert value == pytest.approx(case["pass_at_k"], rel=RTOL, abs=ATOL)


def test_oracle_benchmark() -> None:
    benchmark = load("passk")["benchmark"]
    for k, expected in benchmark["expected"].items():
        values = pass_at_k(benchmark["n"], benchmark["c"], int(k))
        assert isinstance(values, np.ndarray)
        assert values.dtype == np.float64
        assert values.mean() == pytest.approx(expected, rel=RTOL)


def test_equals_its_twin_and_broadcasts() -> None:
    for n in (1, 2, 5, 32, 200):
        c = np.arange(n + 1).reshape(-1, 1)
        k = np.array([1, max(n // 2, 1), n])
        values = pass_at_k(n, c, k)
        twin = [[twins.pass_at_k(n, int(ci), int(ki)) for ki in k] for (ci,) in c]
        np.testing.assert_allclose(values, twin, rtol=1e-15)
    assert np.asarray(pass_at_k(8, [], 1)).shape == (0,)


def test_unbiased_under_binomial_sampling() -> None:
    n, p = 10, 0.13
    c = np.arange(n + 1)
    chance = np.array([math.comb(n, int(i)) * p**i * (1 - p) ** (n - i) for i in c])
    for k in range(1, n + 1):
        assert np.dot(chance, pass_at_k(n, c, k)) == pytest.approx(1 - (1 - p) ** k, rel=1e-12)


def test_large_counts_keep_their_digits() -> None:
    assert pass_at_k(100_000, 1, 3) == pytest.approx(3e-5, rel=1e-14)
    assert pass_at_k(4096, 4095, 2) == 1.0
    assert 1 - float(pass_at_k(2000, 600, 64)) > 0
