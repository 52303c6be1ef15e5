"""Replicates of one step's gradient at a fixed policy, for every allocation and weighting.

The policy is stopped on its way up an exact gradient ascent. Allocations see earlier visits, made at earlier points of
the ascent, and nothing of this step's rewards: n is fixed given the past, as an unbiased estimate needs.

Shapes: N prompts, B rollouts, T tokens, J rollouts of a prompt, C lines of the table, R replicates, D parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dynamo_core.algorithms.advantages import grpo, rloo
from dynamo_core.algorithms.allocation import allocate
from dynamo_core.algorithms.effective_weights import kappa
from dynamo_core.algorithms.losses import aggregation_weights
from dynamo_core.algorithms.prompt_stats import PromptStats, official_rank
from tests.benchmarks.token_mdp import (
    Exact,
    Floats,
    Ints,
    TokenMDP,
    ascend,
    difficulty_classes,
    exact,
    policy,
    sample,
    score_gradients,
)

MEAN_ROLLOUTS = 16
STEPS, RATE = 320, 10.0  # of the ascent: mean p is then .54 and success rates are bimodal
VISITS = (170, 220, 270)  # steps of the earlier visits: the logit of p rises by about .25 from one to the next
NARROW, WIDE = (8, 24), (4, 64)  # the release's bounds, and a quarter to four times the mean
SEED = 20260801
AGGREGATION = {"prompt-mean": "prompt-mean-token-sum-norm", "rollout-mean": "seq-mean-token-sum"}
ESTIMATOR = {"rloo": rloo, "grpo": grpo}


@dataclass(frozen=True)
class Snapshot:
    """The fixed policy, what is exactly true of it, and what earlier visits told."""

    mdp: TokenMDP
    pi_NTUV: Floats
    truth: Exact
    stats: PromptStats


@dataclass(frozen=True)
class Line:
    """One row of the table: who gets how many rollouts, and how they are weighted."""

    allocation: str
    bounds: tuple[int, int]
    n_N: Ints
    weighting: str
    estimator: str = "rloo"

    @property
    def plan(self) -> str:
        bounds = "" if self.allocation == "uniform" else f" {self.bounds[0]}..{self.bounds[1]}"
        return f"{self.estimator} {self.allocation}{bounds}"

    @property
    def name(self) -> str:
        return f"{self.plan}, {self.weighting}"


def random(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([SEED, *key])))


def take_snapshot() -> Snapshot:
    """Ascend, stop, and visit every prompt at three earlier points."""
    mdp = difficulty_classes(1, prompts=256, features=12, places=4, tokens=10, accepted=(8, 7, 4, 2, 1))
    thetas = ascend(mdp, STEPS, RATE)
    stats = PromptStats()
    for step in VISITS:
        p_N = exact(mdp, policy(mdp, thetas[step])).p_N
        right_NJ = random(0, step).random((p_N.size, MEAN_ROLLOUTS)) < p_N[:, None]
        for prompt, row in enumerate(right_NJ.tolist()):
            for right in row:
                stats.observe(prompt, right)
        stats.end_step()
    pi_NTUV = policy(mdp, thetas[STEPS])
    return Snapshot(mdp, pi_NTUV, exact(mdp, pi_NTUV), stats)


def table_lines(snapshot: Snapshot) -> list[Line]:
    """Every allocation with both weightings, uniform prompt-mean RLOO first; then GRPO as the release has it."""
    p_N = snapshot.truth.p_N
    prompts = list(range(p_N.size))
    budget = MEAN_ROLLOUTS * p_N.size
    rank_N = np.maximum(official_rank(*snapshot.stats.lifetime_counts(prompts)), 0)
    history_N = snapshot.stats.variance(prompts)

    def official(bounds: tuple[int, int]) -> Ints:
        return allocate(rank_N, budget, *bounds, rule="waterfall_variance")

    def optimal(variance_N: Floats, bounds: tuple[int, int]) -> Ints:
        return allocate(variance_N, budget, *bounds, rule="optimal", objective="rloo")

    same = (MEAN_ROLLOUTS, MEAN_ROLLOUTS)
    plans = [
        ("uniform", same, allocate(history_N, budget, *same, rule="uniform")),
        ("official", NARROW, official(NARROW)),
        ("optimal", NARROW, optimal(history_N, NARROW)),
        ("official", WIDE, official(WIDE)),
        ("optimal", WIDE, optimal(history_N, WIDE)),
        ("optimal (true p)", WIDE, optimal(p_N * (1 - p_N), WIDE)),
    ]
    lines = [Line(*plan, weighting) for plan in plans for weighting in AGGREGATION]
    return [*lines, Line(*plans[0], "rollout-mean", "grpo"), Line(*plans[1], "rollout-mean", "grpo")]


def coefficients(line: Line, prompt_B: torch.Tensor, right_B: torch.Tensor, places: int) -> Floats:
    """w A [B, T]: minus the slope of the loss in log pi of each token, at ratio 1.

    The horizon only scales the loss; 1 makes the prompt-mean gradient one of J itself.
    """
    mask_BT = torch.ones(prompt_B.numel(), places)
    weights_BT = aggregation_weights(mask_BT, prompt_B, aggregation=AGGREGATION[line.weighting], horizon=1.0)
    advantage_B = ESTIMATOR[line.estimator](right_B.double(), prompt_B)
    return (weights_BT * advantage_B[:, None]).numpy()


def gradients(snapshot: Snapshot, lines: list[Line], replicates: int) -> Floats:
    """[C, R, D]. Rollout j of a prompt is the same in every line that has it."""
    prompts, places, _, _ = snapshot.pi_NTUV.shape
    most = max(int(line.n_N.max()) for line in lines)
    size = int(np.prod(snapshot.mdp.theta_shape))
    result_CRD = np.empty((len(lines), replicates, size))
    by_plan: dict[bytes, list[int]] = {}
    for index, line in enumerate(lines):
        by_plan.setdefault(line.n_N.tobytes(), []).append(index)
    for replicate in range(replicates):
        uniform_NJT = random(1, replicate).random((prompts, most, places))
        token_NJT, right_NJ = sample(snapshot.mdp, snapshot.pi_NTUV, uniform_NJT)
        for members in by_plan.values():
            n_N = lines[members[0]].n_N
            prompt_B, rollout_B = np.nonzero(np.arange(most) < n_N[:, None])
            group_B, right_B = torch.from_numpy(prompt_B), torch.from_numpy(right_NJ[prompt_B, rollout_B])
            coefficient_CBT = np.stack([coefficients(lines[c], group_B, right_B, places) for c in members])
            tokens_BT = token_NJT[prompt_B, rollout_B]
            sums = score_gradients(snapshot.mdp, snapshot.pi_NTUV, prompt_B, tokens_BT, coefficient_CBT)
            result_CRD[members, replicate] = sums.reshape(len(members), -1)
    return result_CRD


def prompt_weights(line: Line, p_N: Floats) -> Floats:
    """W [N]: E g = mean_i W_i grad p_i, exactly."""
    share_N = np.ones(p_N.size) if line.weighting == "prompt-mean" else line.n_N / line.n_N.mean()
    weight_N = np.empty(p_N.size)
    for n in np.unique(line.n_N):
        here = line.n_N == n
        weight_N[here] = share_N[here] * kappa(torch.from_numpy(p_N[here]), int(n), line.estimator).numpy()
    return weight_N
