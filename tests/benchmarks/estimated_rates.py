"""Variance ratios of allocation from a prompt's history, and of a pilot with its top-up in the same step.

The mid mixture after a drift that the statistics do not know. Shapes: N prompts, V visits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dynamo_core.algorithms.allocation import allocate, stage_weights, top_up_bounds
from dynamo_core.algorithms.checks import FloatArray, IntArray
from dynamo_core.algorithms.prompt_stats import PromptStats, official_rank, posterior_variance, unbiased_variance
from tests.benchmarks.mixtures import MEAN, MID, draw, ratio, visited
from tests.benchmarks.targets import Target, spread
from tests.benchmarks.true_rates import NARROW, SIZE, WIDE

SEEDS = 12
BUDGET = MEAN * SIZE
IDS = range(SIZE)
BOUNDS = (NARROW, WIDE)
Bounds = tuple[int, int]
PILOTS = (2, 4, 8)
# Largest ratios at BOUNDS after three visits: from history, and with a pilot of 8 besides.
HISTORY_LIMITS, PILOT_LIMITS = (0.80, 0.79), (0.77, 0.755)


class Scenario(NamedTuple):
    """Visits before the step and the sd of the drift after each."""

    visits: int
    drift_sd: float

    def __str__(self) -> str:
        return f"v{self.visits},t{self.drift_sd:g}"


FRESH, DRIFTED = Scenario(1, 0.5), Scenario(3, 1.0)
Row = dict[str, float]
# label -> ratios of an independent simulation: 8..24 fresh, drifted, 2..64 fresh, drifted.
REFERENCE: dict[str, tuple[float, ...]] = {
    "oracle p": (0.739, 0.720, 0.669, 0.631),
    "repo live rule": (0.833, 0.841, 1.236, 1.242),
    "raw P, floor .01": (0.803, 0.798, 0.806, 0.792),
    "raw P": (0.803, 0.798, 1.198, 0.919),
    "Jeffreys, lifetime": (0.804, 0.798, 0.794, 0.787),
    "pilot 4, pooled": (0.790, 0.770, 0.776, 0.749),
    "pilot 8, pooled": (0.777, 0.761, 0.762, 0.746),
}


def observe(stats: PromptStats, successes_N: IntArray, rollouts: int) -> None:
    """`rollouts` of every prompt, the first `successes_N` of them correct (their order does not matter)."""
    for prompt_id, successes in zip(IDS, successes_N.tolist(), strict=True):
        for rollout in range(rollouts):
            stats.observe(prompt_id, rollout < successes)


def copied(stats: PromptStats) -> PromptStats:
    twin = PromptStats()
    twin.load_state_dict(stats.state_dict())
    return twin


def remembered(successes_VN: IntArray) -> PromptStats:
    """The method's default statistics, Beta(.5,.5) and discount .5 per visit; the last visit is still open."""
    stats = PromptStats()
    for visit, successes_N in enumerate(successes_VN):
        if visit:
            stats.end_step()
        observe(stats, successes_N, MEAN)
    return stats


def history_row(c_N: FloatArray, stats: PromptStats, bounds: Bounds) -> Row:
    """Plans from history alone."""
    k_N, G_N = stats.lifetime_counts(IDS)
    raw_N = unbiased_variance(k_N, G_N)
    estimates = {
        "oracle p": c_N,
        "raw P, floor .01": np.maximum(raw_N, 0.01),
        "raw P": raw_N,
        "Jeffreys, lifetime": posterior_variance(k_N, G_N),
        "default (discount .5)": stats.variance(IDS),
    }
    rank_N = np.maximum(official_rank(k_N, G_N), 0)
    row = {"repo live rule": ratio(c_N, allocate(rank_N, BUDGET, *bounds, rule="waterfall_variance"))}
    for name, estimate_N in estimates.items():
        row[name] = ratio(c_N, allocate(estimate_N, BUDGET, *bounds, rule="optimal"))
    return row


def staged_ratio(c_N: FloatArray, pilot: int, topup_N: IntArray, share_N: FloatArray) -> float:
    """Fixed stage weights with a known baseline: sum c (n_p w_p^2 + n_t w_t^2) over that of uniform."""
    noise_N = np.empty(c_N.size)
    for share in np.unique(share_N):
        at = share_N == share
        pilot_weight, topup_weight = stage_weights(np.full(at.sum(), pilot), topup_N[at], pilot_share=share)
        noise_N[at] = pilot * pilot_weight**2 + topup_N[at] * topup_weight**2
    return float((c_N * noise_N).sum() / (c_N.sum() / MEAN))


def pilot_row(c_N: FloatArray, before: PromptStats, after: PromptStats, pilot: int, bounds: Bounds) -> Row:
    """Plans with `pilot` rollouts of each prompt, statistics `before` and `after` them.

    Pooled: the total n is planned, at least the pilot. Staged: the top-up is planned by itself.
    """
    low, high = bounds
    c_after_N = after.variance(IDS)
    total_N = allocate(c_after_N, BUDGET, max(low, pilot), high, rule="optimal")
    rest, rest_low, rest_high = top_up_bounds(SIZE, BUDGET, pilot, low, high)
    topped_N = allocate(c_after_N, BUDGET, pilot + rest_low, pilot + rest_high, rule="optimal")
    topup_N = allocate(c_after_N, rest, rest_low, rest_high, rule="optimal")
    # a share for each prompt, from what is known before the pilot: its part of the total then planned
    planned_N = allocate(before.variance(IDS), BUDGET, pilot + rest_low, pilot + rest_high, rule="optimal")
    share_N = pilot / planned_N
    own_N = allocate(c_after_N, rest, rest_low, rest_high, rule="optimal", weight=1 - share_N)
    return {
        f"pilot {pilot}, pooled": ratio(c_N, total_N),
        f"pilot {pilot}, pooled, top-up >= 2": ratio(c_N, topped_N),
        f"pilot {pilot}, unbiased, a = {pilot}/16": staged_ratio(c_N, pilot, topup_N, np.full(SIZE, pilot / MEAN)),
        f"pilot {pilot}, unbiased, a_i by history": staged_ratio(c_N, pilot, own_N, share_N),
    }


def seed_rows(scenario: Scenario, seed: int) -> dict[Bounds, tuple[Row, Row]]:
    """(rows from history, rows with a pilot) at each of the bounds."""
    rng = np.random.default_rng(seed)
    p_N, successes_VN = visited(draw(MID, SIZE, rng), scenario.visits, scenario.drift_sd, rng)
    c_N = p_N * (1 - p_N)
    open_visit = remembered(successes_VN)
    stats = copied(open_visit)
    stats.end_step()
    history = {bounds: history_row(c_N, stats, bounds) for bounds in BOUNDS}
    pilots: dict[Bounds, Row] = {bounds: {} for bounds in BOUNDS}
    for pilot in PILOTS:
        successes_N = rng.binomial(pilot, p_N)
        after, joined = copied(stats), copied(open_visit)
        observe(after, successes_N, pilot)
        observe(joined, successes_N, pilot)
        for low, high in BOUNDS:
            row = pilot_row(c_N, stats, after, pilot, (low, high))
            whole_N = allocate(joined.variance(IDS), BUDGET, max(low, pilot), high, rule="optimal")
            row[f"pilot {pilot}, pooled, no discount of the last visit"] = ratio(c_N, whole_N)
            pilots[low, high] |= row
    return {bounds: (history[bounds], pilots[bounds]) for bounds in BOUNDS}


def unseen_rows(seed: int) -> dict[Bounds, Row]:
    """A pilot without any history, prompts of the mid mixture."""
    rng = np.random.default_rng(seed)
    p_N = draw(MID, SIZE, rng)
    rows: dict[Bounds, Row] = {bounds: {} for bounds in BOUNDS}
    for pilot in PILOTS:
        stats = PromptStats()
        observe(stats, rng.binomial(pilot, p_N), pilot)
        for low, high in BOUNDS:
            plan_N = allocate(stats.variance(IDS), BUDGET, max(low, pilot), high, rule="optimal")
            rows[low, high][f"pilot {pilot}, no history"] = ratio(p_N * (1 - p_N), plan_N)
    return rows


def _print(columns: list[list[Row]]) -> None:
    """One line per label; `columns` hold the rows of each seed, in the order of REFERENCE."""
    for label in columns[0][0]:
        cells = [spread([row[label] for row in rows]) for rows in columns]
        text = "".join(f"{f'{mean:.3f} ({sd:.3f})':>15}" for mean, sd in cells)
        reference = "  ".join(f"{value:.3f}" for value in REFERENCE.get(label, ()))
        print(f"{label:50}{text}   {reference}")


def table() -> list[Target]:
    """Print the ratios; targets on the default statistics after three visits, without and with a pilot of 8."""
    order = [(scenario, bounds) for bounds in BOUNDS for scenario in (FRESH, DRIFTED)]
    seeds = {scenario: [seed_rows(scenario, seed) for seed in range(SEEDS)] for scenario in (FRESH, DRIFTED)}
    head = "".join(f"{f'{low}..{high} {scenario}':>15}" for scenario, (low, high) in order)
    print(f"\n2. Estimated p. Mid mixture, {SIZE} prompts, {SEEDS} seeds: mean (sd of one seed), reference.")
    print("   v visits of 16 rollouts, each followed by a drift of logit p by .25 + t normal. ratio = sum p(1-p)/n")
    print("   over that of uniform 16, at the p after the last visit, n by rule optimal of the estimate named.")
    print(" " * 50 + head)
    history = [[rows[bounds][0] for rows in seeds[scenario]] for scenario, bounds in order]
    _print(history)
    print("\n3. Pilot, then top-up, default statistics of history and pilot. pooled (biased, top-up may be none):")
    print("   ratio as above, n the total of both stages. unbiased: stage weights a and 1-a fixed before the pilot,")
    print("   top-up >= 2, baseline known; ratio = sum p(1-p) (a^2/n_pilot + (1-a)^2/n_topup) over that of uniform 16.")
    pilots = [[rows[bounds][1] for rows in seeds[scenario]] for scenario, bounds in order]
    _print(pilots)
    print("   without history (prompts of the mixture, no drift), pooled, bounds 8..24 and 2..64:")
    unseen = [unseen_rows(seed) for seed in range(SEEDS)]
    _print([[rows[bounds] for rows in unseen] for bounds in BOUNDS])
    targets = []
    for (low, high), most, most_pilot in zip(BOUNDS, HISTORY_LIMITS, PILOT_LIMITS, strict=True):
        column = order.index((DRIFTED, (low, high)))
        value, _ = spread([row["default (discount .5)"] for row in history[column]])
        with_pilot, _ = spread([row["pilot 8, pooled"] for row in pilots[column]])
        targets.append(Target(f"history {low}..{high}", value, most))
        targets.append(Target(f"pilot 8 {low}..{high}", with_pilot, most_pilot))
    return targets
