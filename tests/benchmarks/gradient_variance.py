"""Variance and bias of the policy gradient under uniform, official and optimal allocation, at a fixed policy.

    python -m tests.benchmarks.gradient_variance [--check]

256 prompts in five difficulty classes share one linear-softmax policy (token_mdp.py), stopped on its way up an exact
gradient ascent where success rates are bimodal. Allocations see three earlier visits of 16 rollouts, made at earlier
points of the ascent, and nothing of this step's rewards. A replicate is one step's gradient, 16 rollouts a prompt on
average; all lines share the replicate's random numbers. Against the exact grad J, J = mean p:
    variance       trace of the covariance, as a ratio to uniform RLOO; 95 % bootstrap interval over replicates
    predicted      the same ratio by the allocation's objective, sum W^2 p(1-p)/(n-1), from the true p; it takes
                   the score's norm to be the same for every prompt, which it is not
    noise/signal   trace of the covariance / |E g|^2
    bias           sqrt(|mean g - grad J|^2 - trace / replicates) / |grad J|, 0 where that is negative; `noise` is what
                   an estimator without bias stays below 999 times in 1000 (bootstrap)
    exact, cosine  |E g - grad J| / |grad J| and cos(E g, grad J), E g = mean W grad p exactly, W = kappa N sum_j w_ij
GRPO has another scale, so only its scale-free figures are shown.

Shapes: N prompts, R replicates, S resamples, D parameters.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np
import torch

from dynamo_core.algorithms.allocation import objective_value
from dynamo_core.algorithms.effective_weights import BANDS
from dynamo_core.evaluation.bootstrap import Estimate
from tests.benchmarks.gradient_replicates import (
    MEAN_ROLLOUTS,
    NARROW,
    WIDE,
    Line,
    Snapshot,
    gradients,
    prompt_weights,
    random,
    table_lines,
    take_snapshot,
)
from tests.benchmarks.token_mdp import Floats

REPLICATES, RESAMPLES = 500, 4000
NOISE_QUANTILE = 0.999
CLEARLY = 2.0  # a bias this many times the noise is no accident


@dataclass(frozen=True)
class Measured:
    """Figures of one line (module docstring); `surprise` is |mean g - E g|^2 over its noise, at most 1 if exact."""

    line: Line
    variance: Estimate
    resampled_variance_S: Floats
    predicted: float
    noise_to_signal: float
    bias: float
    noise: float
    surprise: float
    exact_bias: float
    cosine: float


def measure(snapshot: Snapshot, lines: list[Line], gradient_CRD: Floats, resamples: int) -> list[Measured]:
    """All figures; the first line is the one that variances are compared with."""
    p_N, slope_ND = snapshot.truth.p_N, snapshot.truth.gradient_NTKV.reshape(len(snapshot.truth.p_N), -1)
    target_D = slope_ND.mean(0)
    scale = float(np.linalg.norm(target_D))
    replicates = gradient_CRD.shape[1]
    share_SR = random(2).multinomial(replicates, np.full(replicates, 1 / replicates), size=resamples) / replicates
    c_N = p_N * (1 - p_N)
    base, base_S, base_objective = 0.0, np.empty(0), objective_value(c_N, lines[0].n_N, "rloo")
    result: list[Measured] = []
    for line, gradient_RD in zip(lines, gradient_CRD, strict=True):
        mean_D = gradient_RD.mean(0)
        centred_RD = gradient_RD - mean_D
        square_R = (centred_RD**2).sum(-1)
        trace = float(square_R.sum() / (replicates - 1))
        wander_S = ((share_SR @ centred_RD) ** 2).sum(-1)  # |mean - E g|^2, were E g known
        trace_S = share_SR @ square_R - wander_S
        if not result:
            base, base_S = trace, trace_S
        ratio_S = trace_S / base_S
        low, high = np.quantile(ratio_S, [0.025, 0.975])
        weight_N = prompt_weights(line, p_N)
        expected_D = (weight_N[:, None] * slope_ND).mean(0)
        noise = float(np.quantile(wander_S, NOISE_QUANTILE))
        result.append(
            Measured(
                line=line,
                variance=Estimate(trace / base, float(low), float(high)),
                resampled_variance_S=ratio_S,
                predicted=objective_value(c_N * weight_N**2, line.n_N, "rloo") / base_objective,
                noise_to_signal=trace / float(expected_D @ expected_D),
                bias=float(np.sqrt(max(0.0, ((mean_D - target_D) ** 2).sum() - trace / replicates))) / scale,
                noise=float(np.sqrt(max(0.0, noise - trace / replicates))) / scale,
                surprise=float(((mean_D - expected_D) ** 2).sum()) / noise,
                exact_bias=float(np.linalg.norm(expected_D - target_D)) / scale,
                cosine=float(expected_D @ target_D / (np.linalg.norm(expected_D) * scale)),
            )
        )
    return result


def failures(rows: list[Measured]) -> list[str]:
    """What the mathematics promises and these rows do not show."""
    missed = []
    variance_S = {(row.line.allocation, row.line.bounds, row.line.weighting): row.resampled_variance_S for row in rows}
    for row in rows:
        line = row.line
        if row.surprise > 1:
            missed.append(f"{line.name}: the mean gradient is not the exact expectation")
        if line.estimator != "rloo":
            continue
        if line.weighting == "prompt-mean" and row.bias > row.noise:
            missed.append(f"{line.name}: bias {row.bias:.3f} above the noise {row.noise:.3f}")
        if line.weighting == "rollout-mean" and line.allocation != "uniform" and row.bias < CLEARLY * row.noise:
            missed.append(f"{line.name}: bias {row.bias:.3f} not clearly above the noise {row.noise:.3f}")
        if line.weighting == "prompt-mean" and line.allocation.startswith("optimal"):
            if row.variance.high >= 1:
                missed.append(f"{line.name}: variance {interval(row.variance)} not below uniform's")
            excess_S = row.resampled_variance_S - variance_S["official", line.bounds, line.weighting]
            if np.quantile(excess_S, 0.025) > 0:
                missed.append(f"{line.name}: more variance than the official plan within the same bounds")
    return missed


def interval(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def print_setting(snapshot: Snapshot, replicates: int) -> None:
    p_N = snapshot.truth.p_N
    bands = ", ".join(f"{low:g}-{high:g}: {np.mean((p_N >= low) & (p_N < high)):.0%}" for low, high in BANDS)
    print(f"{p_N.size} prompts, {MEAN_ROLLOUTS} rollouts each on average, {replicates} replicate gradients a line")
    print(f"success rate: mean {p_N.mean():.3f}; share of prompts by rate {bands}\n")


def print_table(rows: list[Measured]) -> None:
    print(f"{'estimator, allocation':<30}{'weighting':<14}{'variance [95 %]':<23}{'predicted':>9}{'noise/signal':>14}"
          f"{'bias':>8}{'noise':>7}{'exact':>7}{'cosine':>8}")  # fmt: skip
    for row in rows:
        line, same_scale = row.line, row.line.estimator == "rloo"
        variance = interval(row.variance) if same_scale else "-"
        predicted = f"{row.predicted:.3f}" if same_scale else "-"
        biases = [f"{value:.3f}" if same_scale else "-" for value in (row.bias, row.noise, row.exact_bias)]
        print(f"{line.plan:<30}{line.weighting:<14}{variance:<23}{predicted:>9}{row.noise_to_signal:>14.2f}"
              f"{biases[0]:>8}{biases[1]:>7}{biases[2]:>7}{row.cosine:>8.3f}")  # fmt: skip


def summary(rows: list[Measured], missed: list[str]) -> str:
    """The last line: variance of the narrow and wide optimum and the official plan, and the biases by weighting."""

    def variance(allocation: str, bounds: tuple[int, int]) -> str:
        row = next(row for row in rows if (row.line.allocation, row.line.bounds) == (allocation, bounds))
        return f"{allocation} {bounds[0]}..{bounds[1]} {interval(row.variance)}"

    ours = [row for row in rows if row.line.estimator == "rloo" and row.line.allocation != "uniform"]
    unbiased = max((row.bias, row.noise) for row in ours if row.line.weighting == "prompt-mean")
    biased = [row.bias for row in ours if row.line.weighting == "rollout-mean"]
    plans = ", ".join(variance(*key) for key in (("official", NARROW), ("optimal", NARROW), ("optimal", WIDE)))
    return (
        f"gradient variance against uniform RLOO, prompt-mean: {plans}; "
        f"bias: prompt-mean at most {unbiased[0]:.3f} (noise {unbiased[1]:.3f}), "
        f"rollout-mean under allocation {min(biased):.2f} to {max(biased):.2f}; "
        f"{'all targets met' if not missed else f'{len(missed)} targets missed'}"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gradient_variance")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--replicates", type=int, default=REPLICATES)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    snapshot = take_snapshot()
    lines = table_lines(snapshot)
    print_setting(snapshot, options.replicates)
    rows = measure(snapshot, lines, gradients(snapshot, lines, options.replicates), RESAMPLES)
    print_table(rows)
    missed = failures(rows)
    for reason in missed:
        print(f"missed: {reason}")
    print("\n" + summary(rows, missed))
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
