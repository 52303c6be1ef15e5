"""Every method of the recipe in the whole loop, on the scripted rollouts of the golden trajectory."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from dynamo_core.algorithms.advantages import GROUP_ESTIMATORS
from dynamo_core.config.method import LEAST_GROUP
from dynamo_core.config.presets import PRESETS
from dynamo_core.training.critic import ValueLearner
from tests.golden import trajectory

UNIFORM = {"allocation__low": 1.0, "allocation__high": 1.0}
UNMODULATED = {"modulation__compensation": "false", "modulation__stabilisation": "false"}
GSPO = "{type: gspo, eps_low: 3e-4, eps_high: 4e-4, dual_clip: null}"
CISPO = "{type: cispo, eps_low: 1.0, eps_high: 0.28, dual_clip: null}"
METHODS = {
    "clip_cov": "{type: clip_cov, share: 0.2, low: -1.0, high: 5.0}",
    "kl_cov": "{type: kl_cov, share: 0.2, coefficient: 1.0}",
    "entropy_advantage": "{type: entropy_advantage}",
    "fork_tokens": "{type: fork_tokens, share: 0.4}",
}


run = cache(trajectory.run)
"""Runs are exact repeats: one with the same changes need not be done twice."""


def same(first, second) -> bool:
    """Bit for bit: all values of all steps, and all parameters."""
    return first[0] == second[0] and all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_exact_without_its_parts_is_rloo_bit_for_bit():
    steps = {"steps": 10}
    exact = run(preset="exact", **UNIFORM, **UNMODULATED, **steps)
    rloo = run(
        preset="rloo",
        aggregation="prompt-mean-token-sum-norm",
        loss__eps_high=0.28,
        loss__dual_clip=10.0,
        **UNMODULATED,
        **steps,
    )
    assert len(exact[0]) == 10
    assert all(step["policy/grad_norm"] > 0 for step in exact[0])
    assert same(exact, rloo)
    assert not same(exact, run(preset="exact", **UNMODULATED, **steps))


def test_alpha_zero_is_the_identity():
    off = run(**UNMODULATED)
    zero = {"modulation__compensation": "true", "modulation__stabilisation": "false"}
    assert same(run(modulation__alpha=0.0, **zero), off)
    assert not same(run(modulation__alpha=0.4, **zero), off)


def test_lambda_min_one_is_the_identity():
    stabilised = {"modulation__compensation": "false", "modulation__stabilisation": "true"}
    assert same(run(modulation__lambda_min=1.0, **stabilised), run(**UNMODULATED))


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_keeps_its_budget_and_learns_something(preset):
    steps, parameters = run(preset=preset)
    start = trajectory.tiny_model(trajectory.tiny_tokenizer(), seed=1, dtype=torch.float64).state_dict()
    assert all(step["allocation/budget"] == 36 for step in steps)
    warmup = 2 if "ppo" in preset else 0  # the policy waits for the critic
    assert [step.get("policy/grad_norm", 0) > 0 for step in steps] == [False] * warmup + [True] * (5 - warmup)
    assert any(not torch.equal(parameters[name], start[name]) for name in parameters)
    spread = max(step["allocation/std"] for step in steps)
    assert (spread > 0) == (preset in ("faithful", "exact", "exact_ppo"))


@pytest.mark.parametrize("estimator", [name for name in LEAST_GROUP if name != "gae"])
def test_every_estimator_gives_its_own_trajectory(estimator):
    found = run(estimator=estimator)
    assert same(found, run()) == (estimator == "rloo")


def test_estimators_that_compare_siblings_get_at_least_two():
    assert {name for name, least in LEAST_GROUP.items() if least == 2} == GROUP_ESTIMATORS


@pytest.mark.parametrize("changes", [{"loss": GSPO}, {"loss": CISPO}], ids=["gspo", "cispo"])
def test_every_loss_gives_its_own_trajectory(changes):
    found = run(**changes)
    assert not same(found, run(loss__dual_clip="null"))
    assert all(step["policy/dual_clipfrac"] == 0 for step in found[0])


def test_the_entropy_bonus_keeps_entropy_higher():
    plain, _ = run(**UNMODULATED, optimizer__lr=2e-3)
    helped, _ = run(**UNMODULATED, optimizer__lr=2e-3, loss__entropy_coefficient=1.0)
    assert helped[-1]["policy/entropy"] > plain[-1]["policy/entropy"] + 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_every_entropy_method_gives_its_own_trajectory(method):
    plain = run(**UNMODULATED)
    assert not same(run(entropy_method=METHODS[method], **UNMODULATED), plain)


@pytest.mark.parametrize(
    "neutral",
    ["{type: fork_tokens, share: 1.0}", "{type: clip_cov, low: 1e6, high: 1e7}"],
    ids=["all tokens are forks", "nothing in the band"],
)
def test_an_entropy_method_without_effect_changes_nothing(neutral):
    assert same(run(entropy_method=neutral), run())


@pytest.mark.parametrize(
    "changes",
    [{"loss": GSPO}, {"loss__entropy_coefficient": 0.1}, *({"entropy_method": text} for text in METHODS.values())],
    ids=str,
)
def test_micro_batches_change_nothing_but_rounding(changes):
    _, split = run(micro_batch_size=1, **changes)
    _, whole = run(micro_batch_size=64, **changes)
    for name, tensor in whole.items():
        assert split[name].numpy() == pytest.approx(tensor.numpy(), rel=1e-6, abs=1e-8), name


PPO = {"preset": "exact_ppo", "critic__optimizer__lr": 3e-3, "steps": 10}


def test_the_critic_learns_and_the_policy_uses_it():
    steps, _ = run(**PPO)
    explained = [step["critic/explained_variance"] for step in steps]
    assert explained[0] == pytest.approx(0)  # values start at exactly 0
    assert max(explained[-3:]) > 0.1
    assert all(step["critic/grad_norm"] > 0 for step in steps)
    again, _ = run(**PPO, critic__value_clip=0.01)
    assert again[-1]["critic/loss"] != steps[-1]["critic/loss"]


def test_what_the_critic_says_of_untried_prompts_moves_the_allocation(monkeypatch):
    """12 prompts in steps of 6, the policy waits one step: in the second, nothing is known but the critic's word."""
    seen = {}
    for title, values in {"alike": [0.5] * 6, "apart": [0.5, 0.99, 0.5, 0.01, 0.5, 0.99]}.items():
        monkeypatch.setattr(ValueLearner, "prompt_values", lambda self, prompts, v=values: np.array(v))
        steps, _ = trajectory.run(preset="exact_ppo", critic__warmup_steps=1, steps=2)
        seen[title] = steps[1]["allocation/std"]
    assert seen["alike"] == 0
    assert seen["apart"] > 1
    steps, _ = trajectory.run(preset="exact_ppo", critic__warmup_steps=1, critic__prior_strength="null", steps=2)
    assert steps[1]["allocation/std"] == 0


@pytest.mark.parametrize("place", ["reward", "loss"])
@pytest.mark.parametrize("preset", ["exact", "exact_ppo"])
def test_a_kl_penalty_holds_the_policy_back(preset, place):
    """At step 1 policy and reference are one: the penalty is zero, and only grows from there."""
    fast = {"preset": preset, "optimizer__lr": 2e-3, "steps": 8}
    fast |= {"critic__optimizer__lr": 1e-3} if preset == "exact_ppo" else {}
    free, _ = run(**fast, kl="{place: loss, kind: k3, coefficient: 1e-9}")
    held, _ = run(**fast, kl=f"{{place: {place}, kind: k1, coefficient: 0.5}}")
    assert max(free[0]["kl/reference"], held[0]["kl/reference"]) < 1e-20  # squares of rounding
    assert 0 < held[-1]["kl/reference"] < 0.8 * free[-1]["kl/reference"]


def test_the_kl_coefficient_follows_its_target():
    steps, _ = run(optimizer__lr=2e-3, kl="{place: loss, kind: k2, coefficient: 0.1, target: 1e-4, horizon: 100}")
    coefficients = [step["kl/coefficient"] for step in steps]
    assert coefficients[0] == 0.1
    assert coefficients[1] < 0.1  # no KL yet: below the target
    assert coefficients[-1] > coefficients[-2]  # far above it


@pytest.mark.parametrize("changes", [{**PPO, "steps": 4}, {"kl": "{place: loss, kind: k3, coefficient: 0.1}"}], ids=str)
def test_micro_batches_change_nothing_for_critic_and_kl(changes):
    _, split = run(micro_batch_size=1, **changes)
    _, whole = run(micro_batch_size=64, **changes)
    for name, tensor in whole.items():
        assert split[name].numpy() == pytest.approx(tensor.numpy(), rel=1e-6, abs=1e-8), name


def test_rollouts_that_were_cut_off_leave_the_loss_but_not_the_statistics():
    cut = {"sampling__max_new_tokens": 7}
    kept, masked = run(**cut), run(overlong="mask", **cut)
    assert 0 < kept[0][0]["rollout/truncated_share"] < 1
    assert not same(kept, masked)
    assert masked[0][0]["reward/mean"] == kept[0][0]["reward/mean"]
    assert masked[0][0]["rollouts_seen"] == kept[0][0]["rollouts_seen"] == 36


def test_a_penalty_for_the_cut_off_reaches_the_policy_and_not_the_statistics():
    cut = {"sampling__max_new_tokens": 7}
    kept, charged = run(**cut), run(truncation_penalty=0.5, **cut)
    assert not same(kept, charged)
    assert charged[0][0]["reward/mean"] == kept[0][0]["reward/mean"]
    assert [step["allocation/std"] for step in charged[0][:2]] == [step["allocation/std"] for step in kept[0][:2]]


def test_the_official_rule_follows_lifetime_counts():
    """Ranks need four visits of a prompt; then mastered prompts fall to the floor, and counts are never discounted."""
    steps, _ = run(allocation__rule="official", allocation__low=0.5, statistics__discount=0.0)
    assert steps[0]["allocation/std"] == 0  # nothing is known yet: everyone the same
    assert steps[-1]["allocation/std"] > 0
    assert min(step["allocation/min"] for step in steps) == 4
    lifetime, _ = run(allocation__rule="official", allocation__low=0.5, statistics__discount=1.0)
    assert [step["allocation/std"] for step in steps] == [step["allocation/std"] for step in lifetime]


def test_effective_weights_say_what_the_weighting_does():
    unbiased, _ = run()
    assert all(step["effective_weight/kappa_mean"] == pytest.approx(1) for step in unbiased)
    bands = {name for step in unbiased for name in step if name.startswith("effective_weight/p_")}
    assert len(bands) > 1
    assert all(step[name] == pytest.approx(1) for step in unbiased for name in bands & step.keys())
    curriculum, _ = run(aggregation="token-mean")
    assert any(abs(step[name] - 1) > 0.1 for step in curriculum for name in bands & step.keys())
    divided, _ = run(estimator="grpo")
    assert all(step["effective_weight/kappa_mean"] > 1.2 for step in divided)
