"""A benchmark's targets, its tables' cells and its last line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Target(NamedTuple):
    """Met when low <= value <= high."""

    name: str
    value: float
    high: float
    low: float = -np.inf

    @property
    def met(self) -> bool:
        return self.low <= self.value <= self.high

    def __str__(self) -> str:
        allowed = f"<= {self.high:.4g}" if self.low == -np.inf else f"in [{self.low:.4g}, {self.high:.4g}]"
        return f"{'met   ' if self.met else 'MISSED'} {self.name}: {self.value:.4g}, target {allowed}"


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds and sd of one seed."""
    return float(np.mean(values)), float(np.std(values, ddof=1))
