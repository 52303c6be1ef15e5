"""Percentile bootstrap intervals, clustered by problem: samples of one problem are resampled together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynamo_core.errors import AlgorithmError


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its 95 % interval."""

    value: float
    low: float
    high: float


def mean_interval(scores_P: npt.NDArray[np.float64], *, resamples: int, seed: int) -> Estimate:
    """Mean of one score a problem, with the 2.5 % and 97.5 % quantiles of its bootstrap distribution.

    Raises:
        AlgorithmError: no problems, or fewer than one resample.
    """
    if scores_P.ndim != 1 or scores_P.size == 0:
        raise AlgorithmError(f"scores_P has shape {scores_P.shape}, one score for each of at least one problem needed")
    if resamples < 1:
        raise AlgorithmError(f"resamples is {resamples}, at least 1 needed")
    generator = np.random.Generator(np.random.Philox(seed))
    # A resample's mean only needs how often each problem was drawn.
    counts_RP = generator.multinomial(scores_P.size, np.full(scores_P.size, 1 / scores_P.size), size=resamples)
    low, high = np.quantile(counts_RP @ scores_P / scores_P.size, [0.025, 0.975])
    return Estimate(float(scores_P.mean()), float(low), float(high))
