"""pass@k: the probability that at least one of k samples is correct.

From n samples of which c are correct, 1 - C(n-c, k) / C(n, k) is unbiased (arXiv 2107.03374); the
plug-in 1 - (1 - c/n)^k is not. Computed in integers and divided once, so that it is exact to the
last bit for any n, also where nearly 0 or 1.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from dynamo_core.errors import AlgorithmError


@lru_cache(maxsize=65536)
def _exact(n: int, c: int, k: int) -> float:
    total = math.comb(n, k)
    return (total - math.comb(n - c, k)) / total


def _whole(argument: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    array = np.asarray(values)
    as_float = np.atleast_1d(array.astype(np.float64))
    bad = ~(np.isfinite(as_float) & (as_float == np.floor(as_float)))
    if bad.any():
        raise AlgorithmError(f"{argument} is {as_float[bad][0]}; it must be a whole number")
    return array.astype(np.int64)


def pass_at_k(
    n: npt.ArrayLike, c: npt.ArrayLike, k: npt.ArrayLike
) -> npt.NDArray[np.float64] | float:
    """Unbiased pass@k, float64 of the broadcast shape of n, c, k (a float for plain numbers).

    Args:
        n: samples drawn.
        c: correct ones among them.
        k: samples allowed.

    Raises:
        AlgorithmError: not whole numbers, c outside [0, n], k outside [1, n].
    """
    n_, c_, k_ = np.broadcast_arrays(_whole("n", n), _whole("c", c), _whole("k", k))
    for name, array, least in (("c", c_, 0), ("k", k_, 1)):
        bad = (array < least) | (array > n_)
        if bad.any():
            value, bound = array[bad][0], n_[bad][0]
            raise AlgorithmError(f"{name} is {value}; it must be in [{least}, n], n = {bound}")
    cells = zip(n_.ravel().tolist(), c_.ravel().tolist(), k_.ravel().tolist(), strict=True)
    values = np.asarray([_exact(*cell) for cell in cells], dtype=np.float64).reshape(n_.shape)
    return values if values.ndim else float(values)
