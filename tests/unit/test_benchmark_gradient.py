"""The gradient benchmark's arithmetic: exact gradient, vectorised estimator, exact expectation, and what it flags."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dynamo_core.algorithms.advantages import rloo
from dynamo_core.algorithms.losses import aggregation_weights, policy_loss
from dynamo_core.algorithms.prompt_stats import PromptStats
from tests.benchmarks.gradient_replicates import (
    AGGREGATION,
    Line,
    Snapshot,
    coefficients,
    gradients,
    prompt_weights,
    random,
)
from tests.benchmarks.gradient_variance import failures, measure
from tests.benchmarks.token_mdp import TokenMDP, difficulty_classes, exact, policy, sample, score_gradients

CLOSE = {"rtol": 1e-10, "atol": 1e-13}


def tiny(prompts: int = 3, places: int = 3, tokens: int = 3) -> tuple[TokenMDP, np.ndarray]:
    """An MDP and parameters far from uniform."""
    mdp = difficulty_classes(5, prompts=prompts, features=2, places=places, tokens=tokens, accepted=(1, tokens - 1))
    return mdp, np.random.default_rng(6).standard_normal(mdp.theta_shape)


def log_probs(mdp: TokenMDP, theta_TKV: torch.Tensor, prompt_B: torch.Tensor, token_BT: torch.Tensor) -> torch.Tensor:
    """log pi [B, T], token by token: an independent twin of `policy`."""
    features_NF = torch.from_numpy(mdp.features_NF)
    columns = []
    previous_B = torch.zeros_like(prompt_B)
    for t in range(token_BT.shape[1]):
        by_feature, by_token = theta_TKV[t, : features_NF.shape[1]], theta_TKV[t, features_NF.shape[1] :]
        logits_BV = features_NF[prompt_B] @ by_feature + by_token[previous_B]
        previous_B = token_BT[:, t]
        columns.append(logits_BV.log_softmax(-1).gather(1, previous_B[:, None])[:, 0])
    return torch.stack(columns, dim=1)


def sequences(places: int, tokens: int) -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(tokens), repeat=places)))


def accepted(mdp: TokenMDP, prompt: int, token_BT: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(mdp.accepted_NTV[prompt])[torch.arange(token_BT.shape[1]), token_BT].all(-1)


def test_exact_gradient_is_autograd_of_the_enumerated_objective():
    mdp, theta = tiny()
    truth = exact(mdp, policy(mdp, theta))
    every_BT = sequences(3, 3)
    for prompt in range(3):
        theta_TKV = torch.tensor(theta, requires_grad=True)
        log_BT = log_probs(mdp, theta_TKV, torch.full((27,), prompt), every_BT)
        p = (log_BT.sum(-1).exp() * accepted(mdp, prompt, every_BT)).sum()
        p.backward()
        np.testing.assert_allclose(truth.p_N[prompt], p.item(), **CLOSE)
        np.testing.assert_allclose(truth.gradient_NTKV[prompt], theta_TKV.grad.numpy(), **CLOSE)


@pytest.mark.parametrize("weighting", AGGREGATION)
def test_the_vectorised_estimator_is_minus_the_gradient_of_the_loss(weighting):
    mdp, theta = tiny()
    n_N = np.array([2, 5, 3])
    snapshot = Snapshot(mdp, policy(mdp, theta), exact(mdp, policy(mdp, theta)), PromptStats())
    line = Line("optimal", (2, 5), n_N, weighting)
    fast = gradients(snapshot, [line], 1)[0, 0].reshape(mdp.theta_shape)

    prompt_B, rollout_B = np.nonzero(np.arange(5) < n_N[:, None])
    token_NJT, right_NJ = sample(mdp, snapshot.pi_NTUV, random(1, 0).random((3, 5, 3)))
    group_B, right_B = torch.from_numpy(prompt_B), torch.from_numpy(right_NJ[prompt_B, rollout_B])
    assert 0 < right_B.sum() < right_B.numel()
    theta_TKV = torch.tensor(theta, requires_grad=True)
    log_BT = log_probs(mdp, theta_TKV, group_B, torch.from_numpy(token_NJT[prompt_B, rollout_B]))
    weights_BT = aggregation_weights(torch.ones(10, 3), group_B, aggregation=AGGREGATION[weighting], horizon=1.0)
    advantage_BT = rloo(right_B.double(), group_B)[:, None].expand(10, 3)
    policy_loss(log_BT, log_BT.detach(), advantage_BT, weights_BT, eps_low=0.2, eps_high=0.2).backward()
    assert np.abs(fast).max() > 0.01
    np.testing.assert_allclose(fast, -theta_TKV.grad.numpy(), **CLOSE)


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
@pytest.mark.parametrize("weighting", AGGREGATION)
def test_expectation_over_every_outcome(weighting, estimator):
    """Five rollouts of two prompts, each of 4 sequences: 1024 outcomes."""
    mdp, theta = tiny(prompts=2, places=2, tokens=2)
    pi_NTUV = policy(mdp, theta)
    truth = exact(mdp, pi_NTUV)
    line = Line("optimal", (2, 3), np.array([2, 3]), weighting, estimator)
    prompt_B = torch.tensor([0, 0, 1, 1, 1])
    every_ST = sequences(2, 2)
    log_NS = [log_probs(mdp, torch.tensor(theta), torch.full((4,), i), every_ST).sum(-1) for i in range(2)]
    right_NS = [accepted(mdp, i, every_ST) for i in range(2)]
    expected = np.zeros(mdp.theta_shape)
    for outcome in itertools.product(range(4), repeat=5):
        rows = list(zip(prompt_B.tolist(), outcome, strict=True))
        probability = np.exp(sum(float(log_NS[i][s]) for i, s in rows))
        right_B = torch.stack([right_NS[i][s] for i, s in rows])
        coefficient_BT = coefficients(line, prompt_B, right_B, 2)
        tokens_BT = every_ST[list(outcome)].numpy()
        expected += probability * score_gradients(mdp, pi_NTUV, prompt_B.numpy(), tokens_BT, coefficient_BT[None])[0]
    weight_N = prompt_weights(line, truth.p_N)
    np.testing.assert_allclose(expected, (weight_N[:, None, None, None] * truth.gradient_NTKV).mean(0), **CLOSE)
    unbiased = np.allclose(expected, truth.gradient_NTKV.mean(0), **CLOSE)
    assert unbiased == (weighting == "prompt-mean" and estimator == "rloo")


def test_samples_follow_the_policy():
    mdp, theta = tiny()
    pi_NTUV = policy(mdp, theta)
    token_NJT, right_NJ = sample(mdp, pi_NTUV, np.random.default_rng(0).random((3, 20000, 3)))
    p_N = exact(mdp, pi_NTUV).p_N
    assert (np.abs(right_NJ.mean(1) - p_N) < 4 * np.sqrt(p_N * (1 - p_N) / 20000)).all()
    for prompt in range(3):
        assert (accepted(mdp, prompt, torch.from_numpy(token_NJT[prompt])).numpy() == right_NJ[prompt]).all()


def synthetic(scales: dict[str, float], shift: float = 0.0) -> list[str]:
    """Failures of gradients drawn around their exact expectation, `scales` the noise of each allocation."""
    mdp, theta = tiny(prompts=4)
    pi_NTUV = policy(mdp, theta)
    truth = exact(mdp, pi_NTUV)
    plans = {"uniform": [6, 6, 6, 6], "official": [2, 10, 2, 10], "optimal": [2, 10, 4, 8]}
    lines = [Line(name, (2, 10), np.array(n), weighting) for name, n in plans.items() for weighting in AGGREGATION]
    slope_ND = truth.gradient_NTKV.reshape(4, -1)
    noise_RD = np.random.default_rng(1).standard_normal((400, slope_ND.shape[1])) * 0.02
    rows = [
        (prompt_weights(line, truth.p_N)[:, None] * slope_ND).mean(0) + scales[line.allocation] * noise_RD + shift
        for line in lines
    ]
    return failures(measure(Snapshot(mdp, pi_NTUV, truth, PromptStats()), lines, np.stack(rows), 400))


def test_what_the_check_flags():
    fine = {"uniform": 1.0, "official": 0.9, "optimal": 0.8}
    assert synthetic(fine) == []
    assert any("not below uniform's" in reason for reason in synthetic(fine | {"optimal": 1.1}))
    worse = synthetic(fine | {"optimal": 0.95})
    assert len(worse) == 1
    assert "more variance than the official plan" in worse[0]
    shifted = synthetic(fine, shift=0.01)
    assert any("prompt-mean: bias" in reason for reason in shifted)
    assert any("not the exact expectation" in reason for reason in shifted)
