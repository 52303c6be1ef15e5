"""GSPO, CISPO, truncated importance weights, overlong rows, entropy bonus, value loss without clip."""

from __future__ import annotations

import math

import pytest
import torch

from dynamo_core.algorithms.losses import (
    aggregation_weights,
    cispo_loss,
    entropy_bonus,
    explained_variance,
    gspo_loss,
    overlong_mask,
    sequence_log_ratio,
    soft_overlong_punishment,
    truncated_importance_weights,
    value_loss,
)

from .oracle import agree, f64
from .test_losses import _random


def test_gspo_has_the_gradient_of_the_sequence_objective() -> None:
    """d/d lp of mean_i min(s_i A_i, clip(s_i) A_i), s_i = exp(mean_t log r)."""
    x = _random(8)
    advantage = x["advantages"][:, :1].expand(7, 6)
    weights = aggregation_weights(x["mask"], x["group"], aggregation="seq-mean-token-mean")
    rows = x["mask"].sum(-1)
    old = torch.where(x["mask"] != 0, x["log_prob"] + 0.01 * (x["old_log_prob"] - x["log_prob"]), 0)

    def ours(log_prob: torch.Tensor) -> torch.Tensor:
        return gspo_loss(log_prob, old, advantage, weights, eps_low=3e-4, eps_high=4e-4)

    def paper(log_prob: torch.Tensor) -> torch.Tensor:
        log_s = ((log_prob - old) * x["mask"]).sum(-1) / rows.clamp(min=1)
        s, a = log_s.exp(), advantage[:, 0]
        value = torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a)
        return -(value * (rows > 0)).sum() / (rows > 0).sum()

    gradients = []
    for function in (ours, paper):
        leaf = x["log_prob"].clone().requires_grad_()
        loss = function(leaf)
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    torch.testing.assert_close(ours(x["log_prob"]), paper(x["log_prob"]), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
    assert (gradients[0].abs().sum(-1) == 0).any()  # some sequence is clipped
    log_s = sequence_log_ratio(x["log_prob"], old, x["mask"])
    agree(log_s, ((x["log_prob"] - old) * x["mask"]).sum(-1) / rows.clamp(min=1))


def test_cispo_equals_its_formula() -> None:
    x = _random(9)
    weights = aggregation_weights(x["mask"], x["group"], aggregation="token-mean")
    leaf = x["log_prob"].clone().requires_grad_()
    loss = cispo_loss(leaf, x["old_log_prob"], x["advantages"], weights, eps_high=0.1, eps_low=0.3)
    (gradient,) = torch.autograd.grad(loss, leaf)
    ratio = (x["log_prob"] - x["old_log_prob"]).exp()
    capped = torch.minimum(torch.maximum(ratio, f64(0.7)), f64(1.1))
    agree(gradient, -weights * capped * x["advantages"])
    agree(loss, float((gradient * x["log_prob"]).sum()))
    # no lower bound by default
    low = cispo_loss(f64([[-9.0]]), f64([[0.0]]), f64([[1.0]]), torch.ones(1, 1), eps_high=0.2)
    agree(low, 9 * math.exp(-9))


def test_entropy_bonus_lowers_the_loss_and_carries_a_gradient() -> None:
    entropy = f64([[0.5, 2.0]]).requires_grad_()
    weights = f64([[0.25, 0.75]])
    loss = entropy_bonus(entropy, weights, coefficient=0.1)
    agree(loss, -0.1 * (0.125 + 1.5))
    agree(torch.autograd.grad(loss, entropy)[0], [[-0.025, -0.075]])


def test_truncated_importance_weights() -> None:
    old = f64([[0.0, 0.0, 0.0, math.nan]])
    rollout = f64([[-math.log(4), -math.log(1.5), math.log(4), 0.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    agree(truncated_importance_weights(old, rollout, mask), [[2.0, 1.5, 0.25, 0.0]])
    agree(truncated_importance_weights(old, rollout, mask, cap=5.0), [[4.0, 1.5, 0.25, 0.0]])
    icepop = truncated_importance_weights(old, rollout, mask, cap=2.0, floor=0.5)
    agree(icepop, [[0.0, 1.5, 0.0, 0.0]])
    leaf = old.clone().requires_grad_()
    assert not truncated_importance_weights(leaf, rollout, mask).requires_grad


def test_overlong() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    kept = overlong_mask(mask, torch.tensor([False, True]))
    assert kept.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert kept.dtype == mask.dtype
    lengths = torch.tensor([1, 80, 85, 90, 100, 130])
    punishment = soft_overlong_punishment(lengths, max_length=100, buffer=20)
    assert punishment.tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
    # DAPO eq. 13, as it is written
    for length in range(1, 140):
        value = float(soft_overlong_punishment(torch.tensor([length]), max_length=100, buffer=20))
        paper = 0.0 if length <= 80 else ((80 - length) / 20 if length <= 100 else -1.0)
        assert value == pytest.approx(paper)


def test_value_loss_without_clip_and_explained_variance() -> None:
    values, returns = f64([[0.5, 1.0, math.nan]]), f64([[1.0, 0.0, 5.0]])
    weights = f64([[0.5, 0.5, 0.0]])
    agree(value_loss(values, values, returns, weights), 0.5 * (0.5 * 0.25 + 0.5 * 1.0))
    mask = torch.tensor([[1, 1, 0]])
    agree(explained_variance(values, returns, mask), 1 - 0.5625 / 0.25)
    agree(explained_variance(returns, returns, mask), 1.0)
    flat = torch.ones(1, 3, dtype=torch.float64)
    assert torch.isnan(explained_variance(values, flat, mask))
