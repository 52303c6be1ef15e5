"""Policy and value losses: reference values and gradients, twins, splits and masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dynamo_core.algorithms.losses import (
    AGGREGATIONS,
    aggregation_weights,
    cispo_loss,
    clip_metrics,
    entropy_bonus,
    gspo_loss,
    policy_loss,
    value_loss,
)

from . import twins
from .oracle import agree, cases, f64, load

LOSS_CASES = [
    pytest.param(case, name, id=f"{case['id']}-{name}")
    for case in load("ppo_loss")["cases"]
    for name in case["expected"]["loss"]
]
CLIP: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}


def _tensors(case: dict[str, Any]) -> list[torch.Tensor]:
    return [f64(case[name]) for name in ("log_prob", "old_log_prob", "advantages")]


def _clip(case: dict[str, Any]) -> dict[str, float]:
    return {
        "eps_low": case["eps_low"], "eps_high": case["eps_high"], "dual_clip": case["dual_clip_c"]
    }  # fmt: skip


def _weights(case: dict[str, Any], name: str) -> torch.Tensor:
    mask, group = torch.tensor(case["mask"]), torch.tensor(case["group"])
    return aggregation_weights(mask, group, aggregation=name, horizon=case["L"])


@pytest.mark.parametrize(("case", "name"), LOSS_CASES)
def test_oracle_policy_loss_and_gradient(case: dict[str, Any], name: str) -> None:
    log_prob, old, advantages = _tensors(case)
    log_prob.requires_grad_()
    loss = policy_loss(log_prob, old, advantages, _weights(case, name), **_clip(case))
    agree(loss, case["expected"]["loss"][name])
    (gradient,) = torch.autograd.grad(loss, log_prob)
    agree(gradient, case["expected"]["grad"][name])


def test_the_oracle_covers_every_aggregation() -> None:
    for case in load("ppo_loss")["cases"]:
        assert set(case["expected"]["loss"]) == set(AGGREGATIONS)


@pytest.mark.parametrize("case", cases("ppo_loss"))
def test_oracle_token_loss_gradient_and_metrics(case: dict[str, Any]) -> None:
    log_prob, old, advantages = _tensors(case)
    ones = (torch.tensor(case["mask"]) != 0).double()
    expected = case["expected"]
    log_prob.requires_grad_()
    for b in range(ones.shape[0]):
        for t in range(ones.shape[1]):
            if ones[b, t]:
                one = torch.zeros_like(ones)
                one[b, t] = 1
                loss = policy_loss(log_prob, old, advantages, one, **_clip(case))
                agree(loss, expected["token_loss"][b][t])
    loss = policy_loss(log_prob, old, advantages, ones, **_clip(case))
    (gradient,) = torch.autograd.grad(loss, log_prob)
    agree(gradient, expected["dloss_dlogp_token"])
    metrics = clip_metrics(log_prob, old, advantages, _weights(case, "token-mean"), **_clip(case))
    for name in ("clipfrac", "dual_clipfrac", "ppo_kl"):
        agree(metrics[name], expected[name])
        assert not metrics[name].requires_grad
    ratio = torch.where(ones != 0, f64(expected["ratio"]), 0.0)
    agree(metrics["ratio"], float((_weights(case, "token-mean") * ratio).sum()))
    log_r = (log_prob - old).detach()
    agree(metrics["approx_kl"], float(((log_r.exp() - 1 - log_r) * ones).sum() / ones.sum()))


@pytest.mark.parametrize("case", cases("ppo_loss", "value_loss"))
def test_oracle_value_loss(case: dict[str, Any]) -> None:
    value, old, returns = (f64(case[name]) for name in ("value", "old_value", "returns"))
    mask = f64(case["mask"])
    weights = mask / mask.sum()
    value.requires_grad_()
    loss = value_loss(value, old, returns, weights, clip=case["clip"])
    agree(loss, case["loss_token_mean"])
    for t in range(5):
        one = torch.eye(5, dtype=torch.float64)[t] * mask[t]
        agree(value_loss(value, old, returns, one, clip=case["clip"]), case["token_loss_half"][t])
    (gradient,) = torch.autograd.grad(loss, value)
    near = torch.minimum(torch.maximum(value, old - case["clip"]), old + case["clip"])
    moves = ((value - returns) ** 2 >= (near - returns) ** 2).double()
    agree(gradient, (weights * moves * (value - returns)).detach())


def _random(seed: int, B: int = 7, T: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(B, T, generator=generator, dtype=torch.float64)

    log_prob = -normal().abs() * 3
    lengths = torch.randint(0, T + 1, (B,), generator=generator)
    lengths[0] = T
    mask = (torch.arange(T) < lengths.unsqueeze(-1)).long()
    return {
        "log_prob": log_prob,
        "old_log_prob": log_prob + 0.4 * normal(),
        "advantages": normal(),
        "mask": mask,
        "group": torch.randint(-3, 3, (B,), generator=generator),
    }


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_aggregation_weights_equal_their_twin(name: str) -> None:
    for seed in range(20):
        tensors = _random(seed)
        mask, group = tensors["mask"], tensors["group"]
        weights = aggregation_weights(mask, group, aggregation=name, horizon=9)
        assert weights.dtype == torch.float64
        twin = twins.aggregation(mask.tolist(), group.tolist(), name, 9)
        np.testing.assert_allclose(weights.numpy(), twin, rtol=1e-12)


@pytest.mark.parametrize("name", AGGREGATIONS[:-1])
def test_weights_ignore_padding_rows_columns_and_order(name: str) -> None:
    tensors = _random(1)
    mask, group = tensors["mask"], tensors["group"]
    weights = aggregation_weights(mask, group, aggregation=name, horizon=9)
    padded_mask = torch.nn.functional.pad(mask, (0, 3, 0, 2))
    padded_group = torch.cat([group, torch.tensor([99, int(group[0])])])
    padded = aggregation_weights(padded_mask, padded_group, aggregation=name, horizon=9)
    assert torch.equal(padded[:7, :6], weights)
    assert not padded[7:].any()
    assert not padded[:, 6:].any()
    order = torch.tensor([3, 1, 0, 6, 5, 4, 2])
    moved = aggregation_weights(mask[order], group[order], aggregation=name, horizon=9)
    torch.testing.assert_close(moved, weights[order], rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_weights_of_full_batches_sum_to_what_the_name_says(name: str) -> None:
    mask = torch.ones(6, 4)
    group = torch.tensor([0, 0, 0, 1, 1, 2])
    weights = aggregation_weights(mask, group, aggregation=name, horizon=8)
    expected = {
        "token-mean": 1, "seq-mean-token-mean": 1, "prompt-mean-seq-mean-token-mean": 1,
        "prompt-mean-token-mean": 1, "seq-mean-token-sum": 4, "seq-mean-token-sum-norm": 0.5,
        "prompt-mean-token-sum-norm": 0.5, AGGREGATIONS[-1]: 6,
    }  # fmt: skip
    assert float(weights.sum()) == pytest.approx(expected[name])


@pytest.mark.parametrize("dual", [None, 1.5, 10.0])
def test_policy_loss_equals_its_twin(dual: float | None) -> None:
    for seed in range(15):
        x = _random(seed)
        weights = aggregation_weights(x["mask"], x["group"], aggregation="prompt-mean-token-sum-norm", horizon=6)
        tensors = (x["log_prob"], x["old_log_prob"], x["advantages"])
        loss = policy_loss(*tensors, weights, eps_low=0.2, eps_high=0.28, dual_clip=dual)
        lp, old, advantage = (tensor.tolist() for tensor in tensors)

        def token(b: int, t: int) -> float:
            return twins.surrogate(lp[b][t], old[b][t], advantage[b][t], 0.2, 0.28, dual)  # noqa: B023

        agree(loss, twins.weighted_sum(weights.tolist(), token))


def test_a_huge_log_ratio_is_clamped() -> None:
    log_prob, old = f64([[0.0, -90.0]]), f64([[-100.0, 0.0]])
    loss = policy_loss(log_prob, old, f64([[-1.0, 1.0]]), torch.ones(1, 2), eps_low=0.2, eps_high=0.2)
    agree(loss, math.exp(20) - math.exp(-20))


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "policy": lambda lp, old, adv, w: policy_loss(lp, old, adv, w, **CLIP),
    "cispo": lambda lp, old, adv, w: cispo_loss(lp, old, adv, w, eps_high=4.0),
    "gspo": lambda lp, old, adv, w: gspo_loss(lp, old, adv, w, eps_low=3e-4, eps_high=4e-4),
    "value": lambda lp, old, adv, w: value_loss(lp, old, adv, w, clip=0.2),
    "entropy": lambda lp, old, adv, w: entropy_bonus(lp, w, coefficient=0.3),
}


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_leaks_from_outside_the_mask(name: str) -> None:
    x = _random(3)
    weights = aggregation_weights(x["mask"], x["group"], aggregation="token-mean")
    outside = weights == 0
    assert outside.any()

    def evaluate(filler: float) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = [torch.where(outside, filler, x[key]) for key in ("log_prob", "old_log_prob", "advantages")]
        leaf = tensors[0].requires_grad_()
        loss = LOSSES[name](leaf, *tensors[1:], weights)
        return loss, torch.autograd.grad(loss, leaf)[0]

    loss, gradient = evaluate(0.0)
    assert torch.isfinite(loss)
    assert gradient[~outside].abs().sum() > 0
    for filler in (math.nan, math.inf, -math.inf, 3.0):
        other_loss, other_gradient = evaluate(filler)
        assert torch.equal(other_loss, loss)
        assert torch.equal(other_gradient, gradient)
    assert not gradient[outside].any()


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_a_split_add_up(name: str) -> None:
    x = _random(4)
    weights = aggregation_weights(x["mask"], x["group"], aggregation="prompt-mean-token-mean")
    tensors = (x["log_prob"], x["old_log_prob"], x["advantages"], weights)
    whole = LOSSES[name](*tensors)
    parts = sum(LOSSES[name](*(tensor[i : i + 2] for tensor in tensors)) for i in range(0, 7, 2))
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_precision_is_that_of_the_log_probs_and_at_least_float32(name: str) -> None:
    x = _random(5)
    weights = aggregation_weights(x["mask"], x["group"], aggregation="token-mean")
    tensors = (x["log_prob"], x["old_log_prob"], x["advantages"])
    exact = LOSSES[name](*tensors, weights)
    single = LOSSES[name](*(tensor.float() for tensor in tensors), weights)
    half = LOSSES[name](*(tensor.bfloat16() for tensor in tensors), weights)
    assert (exact.dtype, single.dtype, half.dtype) == (torch.float64, torch.float32, torch.float32)
    assert float(single) == pytest.approx(float(exact), abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_match_finite_differences(name: str) -> None:
    x = _random(6)
    weights = aggregation_weights(x["mask"], x["group"], aggregation="token-mean")
    leaf = x["log_prob"].clone().requires_grad_()
    rest = (x["old_log_prob"], x["advantages"], weights)
    (gradient,) = torch.autograd.grad(LOSSES[name](leaf, *rest), leaf)
    if name in ("cispo", "gspo"):  # stopped gradients: checked against the formulas below
        assert torch.isfinite(gradient).all()
        return
    for b, t in ((0, 0), (0, 3), (0, 5)):
        step = torch.zeros_like(leaf)
        step[b, t] = 1e-6
        up, down = (
            LOSSES[name](x["log_prob"] + step, *rest),
            LOSSES[name](x["log_prob"] - step, *rest),
        )
        assert float((up - down) / 2e-6) == pytest.approx(float(gradient[b, t]), rel=1e-5, abs=1e-8)
