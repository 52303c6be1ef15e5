"""Estimates of a prompt's reward variance p(1-p) from k successes in G rollouts.

Shapes: k and G are numbers or arrays of any shapes that broadcast; N prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamo_core.algorithms.checks import FloatArray, fail, number, require

# A critic's estimate is kept this far from 0 and 1: certainty would mean zero variance.
CRITIC_MARGIN: Final = 0.01
_OFFICIAL_MIN_COUNT, _OFFICIAL_MASTERED, _OFFICIAL_FLOOR = 4, 0.85, 0.01


def _counts(k: npt.ArrayLike, G: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
    k_, G_ = np.broadcast_arrays(np.asarray(k, dtype=np.float64), np.asarray(G, dtype=np.float64))
    bad_G = ~(np.isfinite(G_) & (G_ >= 0))
    if bad_G.any():
        fail("G", G_[bad_G][0], "finite and >= 0")
    bad_k = ~(np.isfinite(k_) & (k_ >= 0) & (k_ <= G_))
    if bad_k.any():
        fail("k", k_[bad_k][0], f"in [0, G], G = {G_[bad_k][0]:g}")
    return k_, G_


def unbiased_variance(k: npt.ArrayLike, G: npt.ArrayLike) -> FloatArray:
    """P = k(G-k) / (G(G-1)), unbiased for p(1-p); NaN where G < 2 (unknown is not zero).

    Source: the paper's proxy; E[k(G-k)] = G(G-1) p(1-p).

    Raises:
        AlgorithmError: k outside [0, G], or a value that is not finite.
    """
    k_, G_ = _counts(k, G)
    pairs = np.where(G_ >= 2, G_ * (G_ - 1), np.nan)
    return np.asarray(k_ * (G_ - k_) / pairs)[()]


def posterior_variance(
    k: npt.ArrayLike, G: npt.ArrayLike, prior: Sequence[float] = (0.5, 0.5)
) -> FloatArray:
    """E[p(1-p) | k successes in G] = ab / ((a+b)(a+b+1)), a = alpha + k, b = beta + G - k.

    Args:
        k, G: counts, real when discounted.
        prior: alpha, beta > 0; Jeffreys by default.

    Raises:
        AlgorithmError: k outside [0, G], a value that is not finite, a prior that is not positive.
    """
    k_, G_ = _counts(k, G)
    alpha, beta = beta_prior(prior)
    a, b = alpha + k_, beta + (G_ - k_)
    return np.asarray(a * b / ((a + b) * (a + b + 1)))[()]


def official_rank(k: npt.ArrayLike, G: npt.ArrayLike) -> FloatArray:
    """The release's priority: -1 if G < 4; 0.01 if k/G >= 0.85; else max(P + 1e-6 (1 - k/G), 0.01).

    It takes lifetime counts; its allocation is waterfall_variance on np.maximum(rank, 0).
    Source: DynaMO-RL verl/utils/dataset/rl_dataset.py:185-197.

    Raises:
        AlgorithmError: k outside [0, G], or a value that is not finite.
    """
    k_, G_ = _counts(k, G)
    known = G_ >= _OFFICIAL_MIN_COUNT
    safe_G = np.where(known, G_, float(_OFFICIAL_MIN_COUNT))
    rate = k_ / safe_G
    rank = np.maximum(
        k_ * (safe_G - k_) / (safe_G * (safe_G - 1)) + 1e-6 * (1 - rate), _OFFICIAL_FLOOR
    )
    rank = np.where(rate >= _OFFICIAL_MASTERED, _OFFICIAL_FLOOR, rank)
    return np.where(known, rank, -1.0)[()]


def beta_prior(prior: Sequence[float]) -> tuple[float, float]:
    """(alpha, beta) as floats.

    Raises:
        AlgorithmError: not two positive finite numbers.
    """
    pair = tuple(float(value) for value in prior)
    if len(pair) != 2 or not all(math.isfinite(value) and value > 0 for value in pair):
        fail("prior", prior, "two positive numbers (alpha, beta)")
    return pair[0], pair[1]


def fit_critic_strength(
    k: npt.ArrayLike,
    G: npt.ArrayLike,
    prior_mean: npt.ArrayLike,
    candidates: Sequence[float] = (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0),
) -> float:
    """The strength kappa under which k successes in G, [N], are likeliest given the critic's means.

    Beta-binomial: sum_i log B(k + kappa V, G - k + kappa (1-V)) - log B(kappa V, kappa (1-V)).

    Raises:
        AlgorithmError: k outside [0, G], shapes that do not match, no candidate.
    """
    k_, G_ = _counts(k, G)
    mean = np.clip(np.asarray(prior_mean, dtype=np.float64), CRITIC_MARGIN, 1 - CRITIC_MARGIN)
    require(mean.shape == k_.shape, "prior_mean", f"of shape {mean.shape}", f"{k_.shape}")
    require(len(candidates) > 0, "candidates", candidates, "at least one strength")

    def log_likelihood(strength: float) -> float:
        terms = (
            math.lgamma(ki + strength * v) + math.lgamma(gi - ki + strength * (1 - v))
            - math.lgamma(gi + strength) + math.lgamma(strength)
            - math.lgamma(strength * v) - math.lgamma(strength * (1 - v))
            for ki, gi, v in zip(k_.ravel(), G_.ravel(), mean.ravel(), strict=True)
        )  # fmt: skip
        return math.fsum(terms)

    return max((number("candidates", value, 1e-9) for value in candidates), key=log_likelihood)
