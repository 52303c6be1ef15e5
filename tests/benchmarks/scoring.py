"""Log-prob, entropy and exact entropy change at a large vocabulary: memory, time, and the same numbers as naive.

python -m tests.benchmarks.scoring [--check]

Memory: a fresh process allocates weights, hidden states and their gradients, reads VmHWM, runs once, reads it again;
the growth is compared with one float32 [B, T, V] tensor. Time: against a plain chunked log-prob (log-sum-exp and the
target's logit; its backward pass also computes logits again), same tiles, alternating, medians. Numbers: against
log_softmax of whole logits in float64, on some of the tokens.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dynamo_core.algorithms.logit_statistics import row_blocks
from dynamo_core.training import head_scores
from dynamo_core.training.head_scores import Gradients, Head, Scores

WIDTH, VOCABULARY, ROWS, LENGTH = 896, 151_936, 4, 1024
TOKENS = ROWS * LENGTH
NAIVE_BYTES = TOKENS * VOCABULARY * 4
MEMORY_LIMIT, TIME_LIMIT, TOLERANCE = 0.12, 1.3, 1e-5
REPEATS = 3
NUMBER_TOKENS = 96


class Problem:
    """Weights, hidden states and gradient buffers, every page of them touched."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(0)
        weight_VH = torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.05
        self.head = Head(weight_VH, None, 1.0)
        self.hidden_NH = torch.randn(tokens, WIDTH, generator=generator)
        self.targets_N = torch.randint(VOCABULARY, (tokens,), generator=generator)
        self.grad_N = torch.randn(tokens, generator=generator) / tokens
        self.into = Gradients(torch.ones_like(self.hidden_NH).zero_(), torch.ones_like(weight_VH).zero_(), None)

    def forward(self) -> Scores:
        return head_scores.forward(self.head, self.hidden_NH, self.targets_N)

    def both(self) -> None:
        scores = self.forward()
        head_scores.backward(self.head, self.hidden_NH, self.targets_N, scores, self.into, grad_log_prob_N=self.grad_N)

    def plain_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(log_prob, log_normaliser): nothing but the log-prob, same tiles and buffers."""
        parts = []
        buffer = self.head.buffer(len(self.targets_N))
        for tile in head_scores.tiles(len(self.targets_N)):
            hidden_NH, targets_N = self.hidden_NH[tile], self.targets_N[tile]
            maximum_N = torch.full((len(targets_N),), -torch.inf)
            sum_N, target_N = torch.zeros(len(targets_N)), torch.zeros(len(targets_N))
            for chunk in self.head.chunks(len(targets_N)):
                logits_NC = self.head.logits(hidden_NH, chunk, buffer)
                here, column = head_scores.inside(targets_N, chunk)
                target_N[here] = logits_NC[here, column]
                highest_N = torch.maximum(maximum_N, logits_NC.amax(-1))
                sum_N *= (maximum_N - highest_N).exp()
                for rows in row_blocks(*logits_NC.shape):
                    sum_N[rows] += logits_NC[rows].sub_(highest_N[rows].unsqueeze(-1)).exp_().sum(-1)
                maximum_N = highest_N
            log_normaliser_N = maximum_N + sum_N.log()
            parts.append((target_N - log_normaliser_N, log_normaliser_N))
        log_prob_N, log_normaliser_N = (torch.cat(column) for column in zip(*parts, strict=True))
        return log_prob_N, log_normaliser_N

    def plain_both(self) -> None:
        _, log_normaliser_N = self.plain_forward()
        buffer = self.head.buffer(len(self.targets_N))
        for tile in head_scores.tiles(len(self.targets_N)):
            for chunk in self.head.chunks(len(self.targets_N[tile])):
                logits_NC = self.head.logits(self.hidden_NH[tile], chunk, buffer)
                for rows in row_blocks(*logits_NC.shape):
                    block_NC = logits_NC[rows].sub_(log_normaliser_N[tile][rows].unsqueeze(-1))
                    block_NC.exp_().mul_(-self.grad_N[tile][rows].unsqueeze(-1))
                here, column = head_scores.inside(self.targets_N[tile], chunk)
                logits_NC[here, column] += self.grad_N[tile][here]
                self.into.add(self.head, self.hidden_NH[tile], logits_NC, tile=tile, chunk=chunk)


def high_water() -> int:
    """Peak resident bytes of this process so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure_memory(what: str) -> None:
    """Run in a fresh process: print the growth of the peak."""
    problem = Problem(TOKENS)
    # Warms up what the process has once (thread pools, the matmul library's own buffers).
    small = Problem.__new__(Problem)
    small.__dict__.update(vars(problem), hidden_NH=problem.hidden_NH[:8], targets_N=problem.targets_N[:8])
    small.forward()
    before = high_water()
    {"forward": problem.forward, "both": problem.both}[what]()
    print(high_water() - before)


def memory(what: str) -> float:
    """Peak growth as a share of one naive tensor."""
    command = [sys.executable, "-m", "tests.benchmarks.scoring", "--memory", what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    share = int(done.stdout.split()[-1]) / NAIVE_BYTES
    print(f"memory {what}: {100 * share:.1f} % of one [B, T, V] tensor ({NAIVE_BYTES / 1e9:.2f} GB)", flush=True)
    return share


def time_ratio(title: str, ours: Callable[[], object], plain: Callable[[], object]) -> float:
    """Median seconds of `ours` over those of `plain`, alternating."""
    seconds: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(REPEATS):
        for name, call in (("ours", ours), ("plain", plain)):
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    a, b = (statistics.median(seconds[name]) for name in ("ours", "plain"))
    print(f"time {title}: {a:.2f} s against {b:.2f} s of the plain log-prob, ratio {a / b:.2f}", flush=True)
    return a / b


def largest_difference() -> float:
    """Of values and gradients against naive float64, relative to each one's largest entry."""
    problem = Problem(NUMBER_TOKENS)
    scores = problem.forward()
    problem.both()
    weight_VH = problem.head.weight_VH.double().requires_grad_()
    hidden_NH = problem.hidden_NH.double().requires_grad_()
    log_p_NV = (hidden_NH @ weight_VH.T).log_softmax(-1)
    log_prob_N = log_p_NV.gather(-1, problem.targets_N.unsqueeze(-1)).squeeze(-1)
    (log_prob_N * problem.grad_N.double()).sum().backward()
    with torch.no_grad():
        p_NV = log_p_NV.exp()
        entropy_N = -(p_NV * log_p_NV).sum(-1)
        lambda_NV = log_p_NV + entropy_N.unsqueeze(-1)
        bracket_N = log_prob_N.exp() * (log_prob_N + entropy_N) - (p_NV**2 * lambda_NV).sum(-1)
    pairs = {
        "log-prob": (scores.log_prob, log_prob_N.detach()),
        "entropy": (scores.entropy, entropy_N),
        "bracket": (scores.bracket, bracket_N),
        "gradient of hidden": (problem.into.hidden_NH, hidden_NH.grad),
        "gradient of weight": (problem.into.weight_VH, weight_VH.grad),
    }
    worst = 0.0
    for name, (found, expected) in pairs.items():
        assert found is not None and expected is not None
        difference = float((found - expected).abs().max() / expected.abs().max())
        print(f"numbers {name}: largest difference to naive float64 {difference:.1e} of the largest entry")
        worst = max(worst, difference)
    return worst


def main() -> int:
    """Print all measurements; 1 when checked and below target."""
    torch.set_num_threads(2)
    difference = largest_difference()
    shares = [memory("forward"), memory("both")]
    problem = Problem(TOKENS)
    ratios = [
        time_ratio("forward", problem.forward, problem.plain_forward),
        time_ratio("forward and backward", problem.both, problem.plain_both),
    ]
    met = max(shares) <= MEMORY_LIMIT and max(ratios) <= TIME_LIMIT and difference <= TOLERANCE
    print(
        f"scoring {ROWS}x{LENGTH} tokens, V {VOCABULARY}: memory {100 * shares[0]:.1f} % forward,"
        f" {100 * shares[1]:.1f} % both"
        f" (limit {100 * MEMORY_LIMIT:.0f} %); time x{ratios[0]:.2f} and x{ratios[1]:.2f} (limit {TIME_LIMIT});"
        f" difference {difference:.0e}: {'met' if met else 'MISSED'}"
    )
    return int("--check" in sys.argv and not met)


if __name__ == "__main__":
    if "--memory" in sys.argv:
        torch.set_num_threads(2)
        measure_memory(sys.argv[-1])
    else:
        sys.exit(main())
