"""Variance ratios of allocation rules that know every success rate p."""

from __future__ import annotations

import numpy as np

from dynamo_core.algorithms.allocation import allocate, continuous
from dynamo_core.algorithms.checks import FloatArray
from dynamo_core.algorithms.prompt_stats import official_rank
from tests.benchmarks.mixtures import MEAN, MIXTURES, draw, ratio, unbounded_ratio
from tests.benchmarks.targets import Target, spread

SIZE, SEEDS = 512, 20
NARROW, WIDE = (8, 24), (2, 64)
# Spread of one seed that the reference states: at 8..24 and without bounds, and at 2..64.
NARROW_SD, WIDE_SD = 0.014, 0.065
# official_rank takes counts: with this many rollouts k/G is p and P is p(1-p), to nine digits.
_KNOWN = 1e9
# An independent simulation of the same mixtures: zero16, no bounds, the rules at 8..24 and 2..64, repo under RLOO.
REFERENCE: dict[str, tuple[float, ...]] = {
    "early (hard)": (0.422, 0.692, 0.793, 0.758, 0.762, 0.756, 0.926, 0.744, 0.811, 0.697, 1.04),
    "mid (bimodal)": (0.449, 0.675, 0.813, 0.748, 0.750, 0.745, 1.077, 0.732, 0.805, 0.680, 1.25),
    "late (easy)": (0.648, 0.531, 0.805, 0.699, 0.700, 0.698, 0.978, 0.615, 0.686, 0.537, 1.08),
    "60 % exactly dead": (0.642, 0.376, 0.710, 0.667, 0.667, 0.667, 0.627, 0.424, 0.436, 0.406, 0.68),
    "Beta(1,1)": (0.116, 0.926, 0.945, 0.935, 0.952, 0.933, 1.121, 0.947, 0.983, 0.927, 1.25),
    "Beta(4,4)": (0.008, 0.993, 0.995, 0.994, 1.000, 0.994, 1.012, 0.997, 1.001, 0.994, 1.03),
}


def columns(p_N: FloatArray) -> dict[str, float]:
    """One row of the table, in the order of REFERENCE, then the RLOO optimum."""
    c_N = p_N * (1 - p_N)
    budget = MEAN * p_N.size
    rank_N = np.maximum(official_rank(p_N * _KNOWN, _KNOWN), 0)
    row = {"zero16": float(np.mean(p_N**MEAN + (1 - p_N) ** MEAN)), "no bounds": unbounded_ratio(c_N)}
    for low, high in (NARROW, WIDE):
        plans = {
            "repo": allocate(rank_N, budget, low, high, rule="waterfall_variance"),
            "floor+P": allocate(c_N, budget, low, high, rule="waterfall_variance"),
            # n ~ P clipped, the multiplier solved again: the continuous optimum of the variance P^2
            "clip P": continuous(c_N**2, budget, low, high).n,
            "optimum": allocate(c_N, budget, low, high, rule="optimal"),
        }
        row |= {f"{name} {low}..{high}": ratio(c_N, plan) for name, plan in plans.items()}
    row["repo RLOO"] = ratio(c_N, plans["repo"], "rloo")  # the wide plan
    best_N = allocate(c_N, budget, *WIDE, rule="optimal", objective="rloo")
    row["optimum RLOO"] = ratio(c_N, best_N, "rloo")
    return row


def table() -> list[Target]:
    """Print the ratios; every column with a reference must lie within the reference's spread of one seed."""
    print(f"1. Known p. {SIZE} prompts, mean {MEAN} rollouts, {SEEDS} seeds: mean (sd of one seed), reference below.")
    print("   ratio = sum p(1-p)/n over that of uniform 16; RLOO: sum p(1-p)/(n-1), bounds 2..64. zero16 = share of")
    print("   groups without variance under uniform 16. repo = the release's live rule; floor+P = the same without its")
    print("   mastery cut and rank floor; clip P = clipped proportional to P; optimum = rule optimal.")
    targets, cells_by_name = [], {}
    for name, mixture in MIXTURES.items():
        rows = [columns(draw(mixture, SIZE, np.random.default_rng(seed))) for seed in range(SEEDS)]
        cells = {column: spread([row[column] for row in rows]) for column in rows[0]}
        cells_by_name[name] = cells
        for column, value in zip(cells, REFERENCE[name], strict=False):
            sd = WIDE_SD if "64" in column or "RLOO" in column else NARROW_SD
            targets.append(Target(f"{name}, {column}", cells[column][0], value + sd, value - sd))
    for half in (slice(0, 6), slice(6, None)):
        print(" " * 18 + "".join(f"{column:>15}" for column in list(cells)[half]))
        for name, cells in cells_by_name.items():
            print(f"{name:18}" + "".join(f"{f'{mean:.3f} ({sd:.3f})':>15}" for mean, sd in list(cells.values())[half]))
            print(" " * 18 + "".join(f"{value:>7.3f}        " for value in REFERENCE[name][half]))
    return targets
