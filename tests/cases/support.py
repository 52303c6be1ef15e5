"""Small inputs that broke real systems, each with the right value and the public issue it comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

CASES = Path(__file__).parents[1] / "data" / "cases"
SOLVED: dict[str, str] = {}
"""Case id -> the test function that computes its value."""

Test = TypeVar("Test", bound=Callable[..., None])


@cache
def train_cases() -> dict[str, dict[str, Any]]:
    """id -> case."""
    lines = (CASES / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return {case["id"]: case for case in map(json.loads, lines)}


def solves(*ids: str) -> Callable[[Test], Test]:
    """The decorated test gets `given`, the case's input, and `expected`, its right value, for each of `ids`."""

    def decorate(test: Test) -> Test:
        SOLVED.update(dict.fromkeys(ids, test.__name__))
        rows = [
            pytest.param(train_cases()[key]["input"], train_cases()[key]["expected"]["value"], id=key) for key in ids
        ]
        return pytest.mark.parametrize(("given", "expected"), rows)(test)

    return decorate


def close(found: Any, expected: Any) -> None:
    """Equal to the six digits that cases are written with."""
    assert np.asarray(found, dtype=np.float64) == pytest.approx(np.asarray(expected, dtype=np.float64), abs=2e-6)
