"""Advantages: reference values, twins, exact zeros, whitening, kappa and effective weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dynamo_core.algorithms.advantages import (
    ESTIMATORS,
    GROUP_ESTIMATORS,
    dr_grpo,
    gae,
    grpo,
    moments,
    posterior_std_grpo,
    reinforce_pp,
    rloo,
    whiten,
)
from dynamo_core.algorithms.effective_weights import by_band, effective_weights, kappa

from . import twins
from .oracle import agree, cases, f64, load

GROUP = {
    "grpo_ddof1": grpo,
    "grpo_ddof0": lambda rewards, group: grpo(rewards, group, ddof=0),
    "dr_grpo": dr_grpo,
    "rloo": rloo,
}


@pytest.mark.parametrize("case", cases("gae"))
def test_oracle_gae(case: dict[str, Any]) -> None:
    mask = torch.tensor(case["mask"])
    rewards, values = f64(case["rewards"]), f64(case["values"])
    advantages, returns = gae(rewards, values, mask, gamma=case["gamma"], lam=case["lam"])
    agree(advantages, case["advantages"])
    agree(torch.where(mask != 0, returns, 0.0), case["returns"])
    agree(whiten(advantages, mask), case["whitened"])
    mean, variance = moments(advantages, mask)
    agree(mean, case["mean"])
    agree(variance, case["var_ddof1"])
    weight = f64(case["rollout_weight"])
    for shaped in (weight, weight.unsqueeze(-1).expand_as(values)):
        agree(whiten(advantages, mask, weight=shaped), case["whitened_prompt_weighted"])
    mean, variance = moments(advantages, mask, weight)
    agree(mean, case["mean_w"])
    agree(variance, case["var_w"])


@pytest.mark.parametrize("name", GROUP)
@pytest.mark.parametrize("case", cases("group_advantage"))
def test_oracle_group_advantages(case: dict[str, Any], name: str) -> None:
    agree(GROUP[name](f64(case["rewards"]), torch.tensor(case["group"])), case["expected"][name])


def test_oracle_kappa() -> None:
    for case in load("group_advantage")["kappa"]:
        estimator = case["kind"].removesuffix("_ddof1")
        value = kappa(f64([case["p"]]), case["n"], estimator)
        agree(value, [case["kappa"]])


def _rewards(seed: int) -> tuple[list[float], list[int]]:
    rng = np.random.default_rng(seed)
    group = rng.integers(0, 6, 30)
    rewards = [rng.random(30), rng.integers(0, 2, 30), np.full(30, 0.1), rng.random(30) * 1e6]
    return rewards[seed % 4].astype(float).tolist(), group.tolist()


@pytest.mark.parametrize("name", GROUP)
def test_group_advantages_equal_their_twin(name: str) -> None:
    for seed in range(24):
        rewards, group = _rewards(seed)
        actual = GROUP[name](f64(rewards), torch.tensor(group))
        twin = twins.group_advantage(rewards, group, name)
        scale = max(map(abs, rewards))
        np.testing.assert_allclose(actual.numpy(), twin, rtol=1e-9, atol=1e-12 * scale)


@pytest.mark.parametrize("name", GROUP)
def test_equal_rewards_and_singletons_give_exactly_zero(name: str) -> None:
    for dtype in (torch.float32, torch.float64):
        # 0.1 * 3 groups of odd sizes: their means are not exactly 0.1 in floating point
        rewards = torch.tensor([0.1] * 7 + [0.3] * 3 + [123.456], dtype=dtype)
        group = torch.tensor([5] * 7 + [-2] * 3 + [9])
        advantages = GROUP[name](rewards, group)
        assert advantages.dtype == dtype
        assert torch.equal(advantages, torch.zeros(11, dtype=dtype))


def test_group_advantages_do_not_depend_on_the_order_of_rows_or_ids() -> None:
    rewards, group = _rewards(1)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0))
    for function in GROUP.values():
        plain = function(f64(rewards), torch.tensor(group))
        moved = function(f64(rewards)[order], torch.tensor(group)[order] * 7 - 3)
        torch.testing.assert_close(moved, plain[order], rtol=1e-13, atol=1e-14)


def test_reinforce_pp() -> None:
    rewards, group = [1.0, 0.0, 0.0, 1.0, 0.5], torch.tensor([0, 0, 1, 1, 1])
    mean = sum(rewards) / 5
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 4 + 1e-8)
    agree(reinforce_pp(f64(rewards), group), [(r - mean) / std for r in rewards])

    lengths = [1.0, 2.0, 3.0, 4.0, 5.0]
    tokens = [r for r, n in zip(rewards, lengths, strict=True) for _ in range(int(n))]
    mean = sum(tokens) / 15
    std = math.sqrt(sum((r - mean) ** 2 for r in tokens) / 14 + 1e-8)
    by_tokens = reinforce_pp(f64(rewards), group, lengths=f64(lengths))
    agree(by_tokens, [(r - mean) / std for r in rewards])

    centred = [0.5, -0.5, -0.5, 0.5, 0.0]
    std = math.sqrt(sum(a * a for a in centred) / 4 + 1e-8)
    grouped = reinforce_pp(f64(rewards), group, baseline="group")
    agree(grouped, [a / std for a in centred])
    zero = torch.zeros(5, dtype=torch.float64)
    assert torch.equal(reinforce_pp(f64([0.1] * 5), group), zero)
    dead = reinforce_pp(f64([0.1, 0.1, 0.0, 1.0, 1.0]), group, baseline="group")
    assert torch.equal(dead[:2], zero[:2])


def test_posterior_std_grpo() -> None:
    rewards, group = f64([1, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 1])
    variance = f64([0.25, 0.25, 0.25, 0.04, 0.04])
    actual = posterior_std_grpo(rewards, group, posterior_variance=variance)
    agree(actual, [2.0, -1.0, -1.0, 0.0, 0.0])
    flat = kappa(
        f64([0.1, 0.3]), 8,
        lambda r, g: posterior_std_grpo(r, g, posterior_variance=torch.full_like(r, 0.09)),
    )  # fmt: skip
    agree(flat, [1 / 0.3] * 2)


def test_gae_equals_its_twin() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        B, T = int(rng.integers(1, 6)), int(rng.integers(1, 9))
        rewards, values = rng.normal(size=(B, T)), rng.normal(size=(B, T))
        mask = (rng.random((B, T)) < 0.7).astype(int)
        mask[0, 0] = 1
        bootstrap = rng.normal(size=B) if seed % 2 else None
        gamma, lam = float(rng.uniform(0.5, 1)), float(rng.uniform(0, 1))
        dirty = np.where(mask, values, np.nan)
        advantages, returns = gae(
            f64(rewards), f64(dirty), torch.tensor(mask), gamma=gamma, lam=lam,
            bootstrap=None if bootstrap is None else f64(bootstrap),
        )  # fmt: skip
        twin = twins.gae(rewards.tolist(), values.tolist(), mask, gamma, lam, bootstrap)
        np.testing.assert_allclose(advantages.numpy(), twin, rtol=1e-9, atol=1e-12)
        expected = np.where(mask, np.asarray(twin) + values, 0)
        np.testing.assert_allclose(returns.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_gae_limits() -> None:
    """lambda 1, gamma 1: reward to go minus value."""
    rewards = f64([[0, 0, 1.0]])
    values = f64([[0.2, 0.5, 0.9]])
    mask = torch.ones(1, 3)
    advantages, returns = gae(rewards, values, mask, gamma=1, lam=1)
    agree(advantages, [[0.8, 0.5, 0.1]])
    agree(returns, [[1.0, 1.0, 1.0]])
    cut, _ = gae(rewards, values, mask, gamma=1, lam=1, bootstrap=f64([0.4]))
    agree(cut, [[1.2, 0.9, 0.5]])


def test_whiten_equals_its_twin_and_ignores_the_outside() -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        values, weight = rng.normal(size=(4, 5)), rng.random((4, 5))
        mask = (rng.random((4, 5)) < 0.6).astype(int)
        mask[0, :2] = 1
        dirty = np.where(mask, values, np.nan)
        for w in (None, weight):
            actual = whiten(f64(dirty), torch.tensor(mask), weight=None if w is None else f64(w))
            twin = twins.whiten(values.tolist(), mask, w)
            np.testing.assert_allclose(actual.numpy(), twin, rtol=1e-9, atol=1e-12)


def test_whiten_with_a_global_scope_is_independent_of_the_split() -> None:
    values = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(6, 5)
    scope = moments(values, mask)
    parts = [whiten(values[i : i + 2], mask[i : i + 2], scope=scope) for i in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), whiten(values, mask))
    single = whiten(f64([[3.0]]), torch.ones(1, 1))
    assert torch.equal(single, torch.zeros(1, 1, dtype=torch.float64))


def test_kappa_of_leave_one_out_is_one_for_every_group_size() -> None:
    p = f64([0.001, 0.02, 0.3, 0.5, 0.97])
    for n in (2, 3, 16, 64, 200):
        agree(kappa(p, n, "rloo"), [1.0] * 5)
        agree(kappa(p, n, "dr_grpo"), [(n - 1) / n] * 5)


def test_effective_weights() -> None:
    p = f64([0.02, 0.03, 0.5, 0.9, 0.99])
    n = torch.tensor([8, 8, 16, 8, 24])
    even = effective_weights(p, n, estimator="rloo", weighting="prompt-mean")
    assert set(even) == {"0-0.05", "0.2-0.8", "0.8-0.95", "0.95-1"}
    assert list(even.values()) == pytest.approx([1.0] * 4, rel=1e-9)
    flat = effective_weights(p, n, estimator="rloo", weighting="rollout-mean")
    share = 5 / 64
    assert list(flat.values()) == pytest.approx([8 * share, 16 * share, 8 * share, 24 * share])
    by_hand = (kappa(p[:2], 8, "grpo") * 8 * share).mean()
    grouped = effective_weights(p, n, estimator="grpo", weighting="rollout-mean")
    assert grouped["0-0.05"] == pytest.approx(float(by_hand))
    # the published table: kappa of p = .02 at n = 8, 16, 24, 64
    values = [float(kappa(f64([0.02]), size, "grpo")) for size in (8, 16, 24, 64)]
    assert values == pytest.approx([2.41, 3.49, 4.19, 5.82], abs=0.005)


def test_bands_own_their_lower_end_and_the_last_both() -> None:
    p = f64([0.0, 0.04, 0.05, 0.2, 0.79, 0.8, 0.95, 1.0])
    means = by_band(p, torch.arange(8, dtype=torch.float64))
    assert means == {"0-0.05": 0.5, "0.05-0.2": 2.0, "0.2-0.8": 3.5, "0.8-0.95": 5.0, "0.95-1": 6.5}


def test_effective_weights_of_a_bimodal_mixture() -> None:
    """.3 Beta(.25, 6) + .3 Beta(2, 2) + .4 Beta(8, .5): what GRPO groups of 16 train on."""
    rng = np.random.default_rng(0)
    shapes = np.array([(0.25, 6), (2, 2), (8, 0.5)])[rng.choice(3, 40_000, p=[0.3, 0.3, 0.4])]
    p = torch.from_numpy(np.clip(rng.beta(shapes[:, 0], shapes[:, 1]), 1e-9, 1 - 1e-9))
    n = torch.full((40_000,), 16)
    weights = effective_weights(p, n, estimator="grpo", weighting="prompt-mean")
    assert list(weights) == ["0-0.05", "0.05-0.2", "0.2-0.8", "0.8-0.95", "0.95-1"]
    assert list(weights.values()) == pytest.approx([3.62, 2.70, 2.00, 2.71, 3.55], rel=0.02)


def test_registry() -> None:
    assert set(ESTIMATORS) == {
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "posterior_std_grpo", "gae"
    }  # fmt: skip
    assert set(ESTIMATORS) > GROUP_ESTIMATORS
