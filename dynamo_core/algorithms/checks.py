"""Argument checks shared by the algorithms. Messages name the argument, the value and the bound.

Checks on shapes and on plain numbers are free; checks on tensor values synchronise a GPU, so the
functions that run once per micro-batch only check shapes.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from dynamo_core.errors import AlgorithmError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def fail(argument: str, value: object, bound: str) -> NoReturn:
    """Raise the one error of this package.

    Raises:
        AlgorithmError: always.
    """
    raise AlgorithmError(f"{argument} is {value}; it must be {bound}")


def require(condition: bool, argument: str, value: object, bound: str) -> None:
    """Raise AlgorithmError unless `condition` holds."""
    if not condition:
        fail(argument, value, bound)


def number(argument: str, value: float, low: float, high: float = math.inf) -> float:
    """`value`, which must be a finite number in [low, high]."""
    if not (math.isfinite(value) and low <= value <= high):
        fail(argument, value, f"a finite number in [{low:g}, {high:g}]")
    return float(value)


def whole(argument: str, value: float, low: int) -> int:
    """`value` as int: a whole number, at least `low`."""
    is_whole = not isinstance(value, bool) and math.isfinite(value) and value == int(value)
    if not is_whole or value < low:
        fail(argument, value, f"a whole number of at least {low}")
    return int(value)


def choice(argument: str, value: str, allowed: Collection[str]) -> str:
    """`value`, which must be one of `allowed`."""
    if value not in allowed:
        fail(argument, repr(value), f"one of {', '.join(sorted(allowed))}")
    return value


def non_negative_array(argument: str, values: npt.ArrayLike) -> FloatArray:
    """`values` as float64[N], N >= 1, finite and >= 0.

    Raises:
        AlgorithmError: another shape, or the first value that is NaN, infinite or negative.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        fail(argument, f"an array of shape {array.shape}", "of shape [N] with N >= 1")
    bad = ~(np.isfinite(array) & (array >= 0))
    if bad.any():
        where = int(np.argmax(bad))
        fail(f"{argument}[{where}]", array[where], "finite and >= 0")
    return array


def same_shape(**tensors: torch.Tensor) -> None:
    """Every tensor must have the shape of the first."""
    (first, reference), *rest = tensors.items()
    for name, tensor in rest:
        if tensor.shape != reference.shape:
            fail(name, f"of shape {tuple(tensor.shape)}", f"{tuple(reference.shape)} like {first}")


def vector(argument: str, tensor: torch.Tensor, length: int) -> None:
    """`tensor` must have shape [length]."""
    if tensor.shape != (length,):
        fail(argument, f"of shape {tuple(tensor.shape)}", f"of shape ({length},)")


def matrix(argument: str, tensor: torch.Tensor) -> None:
    """`tensor` must have two axes."""
    if tensor.ndim != 2:
        fail(argument, f"of shape {tuple(tensor.shape)}", "of shape [B, T]")


def selection(mask: torch.Tensor) -> torch.Tensor:
    """`mask` as bool, True where it is not zero.

    Raises:
        AlgorithmError: not a single True (synchronises a GPU).
    """
    chosen = mask != 0
    if not bool(chosen.any()):
        fail("mask", f"empty (shape {tuple(mask.shape)})", "non-zero for at least one token")
    return chosen


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """float64 and float32 stay; half precision and integers become float32."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.float()


def zero_outside(chosen: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` where chosen, else 0, so that a NaN outside reaches neither value nor gradient."""
    return torch.where(chosen, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def state_entry(state: dict[str, Any], key: str) -> Any:
    """`state[key]`.

    Raises:
        AlgorithmError: the key is missing.
    """
    if key not in state:
        fail("state", f"without '{key}' (it has {sorted(state)})", f"a state_dict with '{key}'")
    return state[key]
