"""The terms of a mini-batch's loss, on numbers small enough to check by hand, and credit from rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dynamo_core.config.method import ClipCov, ForkTokens, KlCov, PolicyLoss
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.data.batching import TokenRow
from dynamo_core.training.credit import credit, prompt_weights
from dynamo_core.training.objective import TokenTerms, clip_metrics, needs_every_row, objective, token_terms
from dynamo_core.training.policy_update import PolicyBatch
from tests.builders import smoke_recipe

PPO = PolicyLoss(type="ppo", eps_low=0.2, eps_high=0.2, dual_clip=None)
OLD = torch.tensor([[-1.0, -2.0, -0.5], [-0.2, -3.0, 0.0]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, 0.0]], dtype=torch.float64)
WEIGHTS = torch.tensor([[0.2, 0.2, 0.2], [0.2, 0.2, 0.0]], dtype=torch.float64)
ENTROPY = torch.tensor([[0.1, 0.9, 0.5], [0.2, 0.7, 9.0]], dtype=torch.float64)


def terms(method=None) -> TokenTerms:
    return token_terms(method, ADVANTAGES, OLD, ENTROPY, WEIGHTS, seed=0)


def leaf(values: torch.Tensor) -> torch.Tensor:
    return values.clone().requires_grad_()


def test_at_the_sampling_policy_the_gradient_is_weight_times_advantage():
    log_prob = leaf(OLD)
    objective(PPO, None, log_prob, ENTROPY, terms()).backward()
    assert torch.equal(log_prob.grad, -WEIGHTS * ADVANTAGES)


def test_the_entropy_bonus_pulls_every_token_by_its_weight():
    bonus = PPO.model_copy(update={"entropy_coefficient": 0.3})
    log_prob, entropy = leaf(OLD), leaf(ENTROPY)
    total = objective(bonus, None, log_prob, entropy, terms())
    plain = objective(PPO, None, OLD, ENTROPY, terms())
    assert float((total - plain).detach()) == pytest.approx(-0.3 * float((WEIGHTS * ENTROPY).sum()))
    total.backward()
    assert torch.allclose(entropy.grad, -0.3 * WEIGHTS)
    assert torch.equal(log_prob.grad, -WEIGHTS * ADVANTAGES)


def test_kl_cov_charges_the_tokens_of_largest_covariance_alone():
    method = KlCov(type="kl_cov", share=0.4, coefficient=2.0)
    chosen = terms(method).penalised_BL
    lp, a = OLD[WEIGHTS != 0], ADVANTAGES[WEIGHTS != 0]
    covariance = (lp - lp.mean()) * (a - a.mean())
    expected = torch.zeros(5, dtype=torch.bool).index_fill(0, covariance.topk(2).indices, True)
    assert torch.equal(chosen[WEIGHTS != 0], expected)
    moved = OLD + 0.05
    extra = objective(PPO, method, moved, ENTROPY, terms(method)) - objective(PPO, None, moved, ENTROPY, terms())
    assert float(extra) == pytest.approx(2.0 * 2 * 0.2 * 0.05)


def test_fork_tokens_keep_the_denominator():
    kept = terms(ForkTokens(type="fork_tokens", share=0.4)).weights_BL
    assert torch.equal(kept, torch.where((ENTROPY >= 0.7) & (WEIGHTS != 0), WEIGHTS, 0.0))


def test_clip_cov_drops_tokens_of_the_band_and_repeats():
    method = ClipCov(type="clip_cov", share=0.2, low=-10.0, high=10.0)
    first, again = terms(method).weights_BL, terms(method).weights_BL
    assert torch.equal(first, again)
    assert int((first != 0).sum()) == 4
    seeds = {
        tuple(token_terms(method, ADVANTAGES, OLD, ENTROPY, WEIGHTS, seed=seed).weights_BL.ne(0).flatten().tolist())
        for seed in range(20)
    }
    assert len(seeds) > 1


def test_rows_without_advantage_matter_only_where_another_term_acts():
    assert not needs_every_row(PPO, None)
    assert not needs_every_row(PPO, ForkTokens(type="fork_tokens"))
    assert needs_every_row(PPO.model_copy(update={"entropy_coefficient": 0.1}), None)
    assert needs_every_row(PPO, KlCov(type="kl_cov"))


def test_gspo_counts_clipped_sequences():
    gspo = PolicyLoss(type="gspo", eps_low=0.1, eps_high=0.1, dual_clip=None)
    moved = OLD.clone()
    moved[0, 0] += 0.6  # row 0 by exp(.2) on average: beyond 1.1 with positive advantage
    moved[1, 0] += 0.3
    moved[1, 1] -= 0.3  # row 1 stays at ratio 1, though each token leaves the range
    token_mean = (WEIGHTS != 0) / 5
    found = clip_metrics(gspo, moved, terms(), token_mean)
    assert float(found["clipfrac"]) == pytest.approx(3 / 5)
    assert float(found["ratio"]) == pytest.approx((3 * math.exp(0.2) + 2) / 5)
    tokens = clip_metrics(PPO, moved, terms(), token_mean)
    assert float(tokens["clipfrac"]) == pytest.approx(2 / 5)  # row 0's first, and row 1's second


def stage(*overrides: str) -> ReinforceStage:
    found = smoke_recipe([f"stages.reinforced.{item}" for item in overrides]).stages["reinforced"]
    assert isinstance(found, ReinforceStage)
    return found


def batch() -> PolicyBatch:
    """Prompt 0: right, wrong, wrong with 1, 2, 3 tokens; prompt 2: right, right with 1 and 3."""
    lengths = [1, 2, 3, 1, 3]
    mask = torch.tensor([[False] + [position < length for position in range(3)] for length in lengths])
    return PolicyBatch(
        rows=[TokenRow((1,) * 4, tuple(row)) for row in mask.tolist()],
        group_B=torch.tensor([0, 0, 0, 2, 2]),
        rewards_B=torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0]),
        mask_BL=mask,
        old_log_prob_BL=-mask.float(),
        entropy_BL=mask.float(),
        bracket_BL=mask.float(),
    )


VARIANCE = np.array([0.25, 0.2, 0.04])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("rloo", [1.0, -0.5, -0.5, 0.0, 0.0]),
        ("dr_grpo", [2 / 3, -1 / 3, -1 / 3, 0.0, 0.0]),
        ("posterior_std_grpo", [2.0, -1.0, -1.0, 0.0, 0.0]),
        ("w_reinforce", [0.1, -1.0, -1.0, 0.1, 0.1]),
        ("nsr", [0.0, -1.0, -1.0, 0.0, 0.0]),
    ],
)
def test_estimators_by_hand(estimator, expected):
    found = credit(stage(f"estimator={estimator}"), batch(), VARIANCE)
    assert found.amax(-1).add(found.amin(-1)).tolist() == pytest.approx(expected)
    assert not found[~batch().mask_BL].any()


def test_reinforce_pp_whitens_over_tokens():
    found = credit(stage("estimator=reinforce_pp"), batch(), VARIANCE)
    tokens = found[batch().mask_BL]
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-6)
    assert float(tokens.std()) == pytest.approx(1, abs=1e-4)


def test_the_entropy_advantage_never_turns_a_sign():
    plain = credit(stage(), batch(), VARIANCE)
    found = credit(stage("entropy_method={type: entropy_advantage, alpha: 0.4, kappa: 2.0}"), batch(), VARIANCE)
    assert torch.allclose(found, plain + torch.minimum(0.4 * batch().entropy_BL, plain.abs() / 2))


RATES = np.array([0.3, 0.5, 0.9])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["aggregation=prompt-mean-token-sum-norm"], [1.0, 1.0]),
        (["aggregation=token-mean"], [6 / 5, 4 / 5]),
        (["aggregation=token-mean", "estimator=nsr"], [6 / 5, 4 / 5]),
        (["aggregation=token-mean", "estimator=w_reinforce"], [1.1 * 6 / 5, 1.1 * 4 / 5]),
        (["aggregation=token-mean", "estimator=reinforce_pp"], [6 / 5, 4 / 5]),
        (["estimator=posterior_std_grpo"], [1 / 0.5, 1 / 0.2]),
        (["estimator=dr_grpo"], [2 / 3, 1 / 2]),
    ],
    ids=str,
)
def test_what_each_prompt_weighs(overrides, expected):
    found = prompt_weights(stage(*overrides), batch(), RATES, VARIANCE)
    assert found.success_rate_P.tolist() == [0.3, 0.9]
    assert found.weight_P.tolist() == pytest.approx(expected)
