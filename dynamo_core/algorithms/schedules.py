"""Learning-rate schedules: functions of the number of finished optimizer steps -> factor in [0, 1].

With w warm-up steps the factor of step s < w is (s + 1) / w: the first step already moves. Then
    constant  1
    linear    1 - (1 - final) x
    cosine    final + (1 - final) (1 + cos(pi x)) / 2,      x = (s - w) / (total - w), at most 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from dynamo_core.algorithms.checks import choice, number, require, whole


def _warmup(step: int, warmup: int) -> float | None:
    """The factor while warming up, else None.

    Raises:
        AlgorithmError: step or warmup is not a whole number >= 0.
    """
    whole("step", step, 0)
    whole("warmup", warmup, 0)
    return (step + 1) / warmup if step < warmup else None


def _progress(step: int, total: int, warmup: int) -> float:
    require(warmup < total, "warmup", warmup, f"below total = {total}")
    return min((step - warmup) / (total - warmup), 1.0)


def constant(step: int, *, total: int = 1, warmup: int = 0, final: float = 1.0) -> float:
    """1 after the warm-up; `total` and `final` are accepted so that all schedules are called alike.

    Raises:
        AlgorithmError: step or warmup is not a whole number >= 0.
    """
    factor = _warmup(step, warmup)
    return 1.0 if factor is None else factor


def linear(step: int, *, total: int, warmup: int = 0, final: float = 0.0) -> float:
    """From 1 to `final`, reached at `total` finished steps and kept.

    Raises:
        AlgorithmError: warmup >= total, final outside [0, 1], step or warmup not whole and >= 0.
    """
    number("final", final, 0, 1)
    progress = _progress(step, whole("total", total, 1), warmup)
    factor = _warmup(step, warmup)
    return 1.0 - (1.0 - final) * progress if factor is None else factor


def cosine(step: int, *, total: int, warmup: int = 0, final: float = 0.0) -> float:
    """Half a cosine from 1 to `final`, reached at `total` finished steps and kept.

    Raises:
        AlgorithmError: warmup >= total, final outside [0, 1], step or warmup not whole and >= 0.
    """
    number("final", final, 0, 1)
    progress = _progress(step, whole("total", total, 1), warmup)
    factor = _warmup(step, warmup)
    if factor is not None:
        return factor
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))


SCHEDULES: Final[dict[str, Callable[..., float]]] = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
}


def factor(name: str, step: int, *, total: int, warmup: int = 0, final: float = 0.0) -> float:
    """The schedule `name` at `step`.

    Raises:
        AlgorithmError: unknown name, or a value that the schedule refuses.
    """
    choice("name", name, SCHEDULES)
    return SCHEDULES[name](step, total=total, warmup=warmup, final=final)
