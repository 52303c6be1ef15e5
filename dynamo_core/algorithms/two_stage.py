"""Pilot and top-up in one step: the top-up may depend on the pilot's rewards, so weights matter.

Unbiased: fixed stage weights, g_i = a g_pilot + (1 - a) g_topup, a chosen before the pilot, each
stage with its own baseline and every prompt topped up (by >= 2 rollouts under a leave-one-out
baseline). Then E[g_i] = grad p_i whatever the top-up rule. Pooling both with 1/n_i is biased,
because n_i depends on the same rewards: a prompt's weight becomes kappa(p) != 1.

Shapes: N prompts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynamo_core.algorithms.checks import FloatArray, fail, non_negative_array, require, whole


def _counts(argument: str, values: npt.ArrayLike, least: int) -> FloatArray:
    n = non_negative_array(argument, values)
    bad = (n != np.floor(n)) | (n < least)
    if bad.any():
        fail(argument, n[bad][0], f"a whole number of at least {least}")
    return n


def stage_weights(
    n_pilot: npt.ArrayLike, n_topup: npt.ArrayLike, *, pilot_share: float
) -> tuple[FloatArray, FloatArray]:
    """Weights of a pilot and of a top-up rollout, each float64[N]: a / n_pilot, (1-a) / n_topup.

    A prompt's weights sum to 1; divide by N for the mean over prompts. Advantages must be computed
    within each stage (two groups per prompt). Unbiased for any top-up rule as long as `pilot_share`
    a is fixed before the pilot. Var = sigma^2 (a^2 / n_pilot + (1-a)^2 / n_topup).

    Raises:
        AlgorithmError: counts that are not whole and >= 1, shapes that differ, a outside (0, 1).
    """
    pilot, topup = _counts("n_pilot", n_pilot, 1), _counts("n_topup", n_topup, 1)
    require(pilot.shape == topup.shape, "n_topup", f"of shape {topup.shape}", f"{pilot.shape}")
    if not 0 < pilot_share < 1:
        fail("pilot_share", pilot_share, "in (0, 1), fixed before the pilot")
    return pilot_share / pilot, (1 - pilot_share) / topup


def pooled_weights_biased(n_pilot: npt.ArrayLike, n_topup: npt.ArrayLike) -> FloatArray:
    """Weight of a rollout when both stages are pooled, 1 / (n_pilot + n_topup), float64[N].

    Biased if the top-up depends on the pilot's rewards: the objective is re-weighted by kappa(p),
    for example 0.70 at p = 0.02 under "pilot 4, +20 if mixed, else +4". Use it only when that is
    meant.

    Raises:
        AlgorithmError: counts that are not whole, a pilot below 1, shapes that differ.
    """
    pilot, topup = _counts("n_pilot", n_pilot, 1), _counts("n_topup", n_topup, 0)
    require(pilot.shape == topup.shape, "n_topup", f"of shape {topup.shape}", f"{pilot.shape}")
    return np.asarray(1.0 / (pilot + topup), dtype=np.float64)


def top_up_bounds(
    size: int, budget: int, n_pilot: int, n_low: int, n_high: int, *, least: int = 2
) -> tuple[int, int, int]:
    """(budget, n_low, n_high) of the top-up after a uniform pilot: arguments for `allocate`.

    Args:
        size: N.
        budget, n_low, n_high: of pilot and top-up together.
        n_pilot: rollouts of each prompt in the pilot.
        least: fewest top-up rollouts of a prompt: 2 with a leave-one-out baseline, 1 with a critic.

    Raises:
        AlgorithmError: the pilot leaves too little budget or room.
    """
    pilot = whole("n_pilot", n_pilot, 1)
    low, high = max(n_low - pilot, whole("least", least, 1)), n_high - pilot
    require(low <= high, "n_pilot", n_pilot, f"at most n_high - {least} = {n_high - least}")
    rest = budget - size * pilot
    if not size * low <= rest <= size * high:
        least_budget, most_budget = size * (pilot + low), size * (pilot + high)
        fail("budget", budget, f"in [{least_budget}, {most_budget}] with the pilot")
    return rest, low, high
