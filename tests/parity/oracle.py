"""Reference vectors and the tolerances at which they must agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[1] / "data" / "oracle"
RTOL, ATOL = 1e-9, 1e-12


def load(name: str) -> Any:
    """The content of tests/data/oracle/<name>.json."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def cases(name: str, key: str = "cases") -> list[Any]:
    """The cases of a file as pytest parameters, named by their id where they have one."""
    return [pytest.param(case, id=str(case.get("id", index))) for index, case in enumerate(load(name)[key])]


def f64(values: Any) -> torch.Tensor:
    """float64 tensor of nested lists."""
    return torch.tensor(values, dtype=torch.float64)


def agree(actual: Any, expected: Any) -> None:
    """Equal shape, dtype float64, values within the oracle's tolerances."""
    actual = torch.as_tensor(actual)
    assert actual.dtype == torch.float64
    np.testing.assert_allclose(actual.detach().numpy(), np.asarray(expected), rtol=RTOL, atol=ATOL)
    assert actual.shape == torch.as_tensor(expected).shape
