"""The terms of a mini-batch's loss, on numbers small enough to check by hand, and credit from rewards."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dynamo_core.config.method import ClipCov, ForkTokens, KlCov, PolicyLoss
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.data.batching import TokenRow
from dynamo_core.training.credit import credit, prompt_weights
from dynamo_core.training.critic import Values
from dynamo_core.training.objective import KlTerm, Objective, TokenTerms, clip_metrics, token_terms
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
    Objective(PPO, None)(log_prob, ENTROPY, terms()).backward()
    assert torch.equal(log_prob.grad, -WEIGHTS * ADVANTAGES)


def test_the_entropy_bonus_pulls_every_token_by_its_weight():
    bonus = PPO.model_copy(update={"entropy_coefficient": 0.3})
    log_prob, entropy = leaf(OLD), leaf(ENTROPY)
    total = Objective(bonus, None)(log_prob, entropy, terms())
    plain = Objective(PPO, None)(OLD, ENTROPY, terms())
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
    extra = Objective(PPO, method)(moved, ENTROPY, terms(method)) - Objective(PPO, None)(moved, ENTROPY, terms())
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
    assert not Objective(PPO, None).needs_every_row
    assert not Objective(PPO, ForkTokens(type="fork_tokens")).needs_every_row
    assert Objective(PPO.model_copy(update={"entropy_coefficient": 0.1}), None).needs_every_row
    assert Objective(PPO, KlCov(type="kl_cov")).needs_every_row


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
        truncated_B=torch.tensor([False, True, False, False, False]),
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
    found = credit(stage(f"estimator={estimator}"), batch(), VARIANCE).advantages_BL
    assert found.amax(-1).add(found.amin(-1)).tolist() == pytest.approx(expected)
    assert not found[~batch().mask_BL].any()


def test_reinforce_pp_whitens_over_tokens():
    found = credit(stage("estimator=reinforce_pp"), batch(), VARIANCE).advantages_BL
    tokens = found[batch().mask_BL]
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-6)
    assert float(tokens.std()) == pytest.approx(1, abs=1e-4)


def test_the_entropy_advantage_never_turns_a_sign():
    plain = credit(stage(), batch(), VARIANCE).advantages_BL
    changed = stage("entropy_method={type: entropy_advantage, alpha: 0.4, kappa: 2.0}")
    found = credit(changed, batch(), VARIANCE).advantages_BL
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


def ppo(*overrides: str) -> ReinforceStage:
    return stage("preset=ppo", "critic.warmup_steps=0", "critic.whiten=none", *overrides)


VALUES = Values(
    values_BL=torch.tensor([[0, 0.2, 0, 0], [0, 0.1, 0.3, 0], [0, 0.5, 0.5, 0.5], [0, 1, 0, 0], [0, 0.9, 0.8, 0.7]]),
    after_B=torch.tensor([0.9, 0.4, 0.9, 0.9, 0.9]),
)


def test_lambda_one_is_the_reward_minus_the_value():
    given = credit(ppo(), batch(), VARIANCE, values=VALUES)
    mask = batch().mask_BL
    expected = torch.where(mask, batch().rewards_B.unsqueeze(-1) - VALUES.values_BL, 0.0)
    assert torch.allclose(given.advantages_BL, expected, atol=1e-6)
    assert torch.allclose(given.returns_BL[mask], batch().rewards_B.unsqueeze(-1).expand(5, 4)[mask], atol=1e-6)


def test_lambda_zero_is_the_next_value_minus_this_one():
    given = credit(ppo("critic.lam=0"), batch(), VARIANCE, values=VALUES)
    assert given.advantages_BL[1].tolist() == pytest.approx([0, 0.2, -0.3, 0], abs=1e-6)
    assert given.advantages_BL[4].tolist() == pytest.approx([0, -0.1, -0.1, 0.3], abs=1e-6)


def test_a_rollout_that_was_cut_off_may_end_in_its_value():
    plain = credit(ppo(), batch(), VARIANCE, values=VALUES).returns_BL
    found = credit(ppo("overlong=bootstrap"), batch(), VARIANCE, values=VALUES).returns_BL
    difference = found - plain
    assert difference[1].tolist() == pytest.approx([0, 0.4, 0.4, 0], abs=1e-6)  # the one that was cut off
    assert not difference[[0, 2, 3, 4]].any()


@pytest.mark.parametrize(("whiten", "weight"), [("tokens", [1] * 5), ("prompts", [1 / 3] * 3 + [1 / 2] * 2)])
def test_whitening_is_over_the_whole_step(whiten, weight):
    found = credit(ppo(f"critic.whiten={whiten}"), batch(), VARIANCE, values=VALUES).advantages_BL.double()
    share = torch.where(batch().mask_BL, torch.tensor(weight).double().unsqueeze(-1), 0.0)
    share /= share.sum()
    assert float((share * found).sum()) == pytest.approx(0, abs=1e-6)
    assert float((share * found**2).sum()) == pytest.approx(1, abs=0.2 if whiten == "tokens" else 1e-5)  # ddof 1 or 0


def test_a_penalty_in_the_reward_reaches_every_estimator():
    penalty = torch.where(batch().mask_BL, -0.1, 0.0)
    tokens = credit(ppo(), batch(), VARIANCE, values=VALUES, penalty_BL=penalty).returns_BL
    assert tokens[2].tolist() == pytest.approx([0, -0.3, -0.2, -0.1], abs=1e-6)
    rollouts = credit(stage(), batch(), VARIANCE, penalty_BL=penalty).advantages_BL
    assert float(rollouts[3].sum()) == pytest.approx(-0.1 + 0.3, abs=1e-6)  # the shorter of two right answers


def test_the_kl_term_is_added_with_its_gradient():
    reference = OLD - 0.5
    log_prob = leaf(OLD)
    terms_with = replace(terms(), reference_BL=reference)
    total = Objective(PPO, None, KlTerm("k2", 0.7))(log_prob, ENTROPY, terms_with)
    plain = Objective(PPO)(OLD, ENTROPY, terms())
    assert float((total - plain).detach()) == pytest.approx(0.7 * 0.5 * 0.25 * float(WEIGHTS.sum()))
    total.backward()
    assert torch.allclose(log_prob.grad, -WEIGHTS * ADVANTAGES + 0.7 * 0.5 * WEIGHTS)
    assert Objective(PPO, None, KlTerm("k2", 0.7)).needs_every_row
