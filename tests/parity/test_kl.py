"""KL: reference values, the gradient that each form really has, controllers."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from dynamo_core.algorithms import kl

from .oracle import agree, cases, f64, load


@pytest.mark.parametrize("case", cases("kl"))
def test_oracle(case: dict[str, Any]) -> None:
    lp, ref = f64(case["log_prob"]), f64(case["ref_log_prob"])
    p = lp.exp()
    agree((p * kl.estimate(lp, ref, "k1")).sum(), case["kl_exact"])
    for kind in kl.KINDS:
        agree(kl.estimate(lp, ref, kind), case[kind])
        agree((p * kl.estimate(lp, ref, kind)).sum(), case[f"E_{kind}"])


def test_extremes_are_not_clamped() -> None:
    for case in load("kl")["extreme"]:
        lp, ref = f64(case["log_prob"]), f64(case["ref_log_prob"])
        delta = case["ref_log_prob"] - case["log_prob"]
        agree(kl.estimate(lp, ref, "k3"), float(np.expm1(delta) - delta))
        assert kl.estimate(lp, ref, "k3") > case["k3_clamped"]


def _policies(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits, ref, old = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), ref.log_softmax(-1), old.log_softmax(-1)


def _exact_gradient(logits: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    lp = logits.log_softmax(-1)
    return torch.autograd.grad((lp.exp() * (lp - ref)).sum(), logits)[0]


@pytest.mark.parametrize("kind", kl.KINDS)
@pytest.mark.parametrize("on_policy", [True, False])
def test_the_loss_has_the_gradient_of_the_reverse_kl(kind: str, on_policy: bool) -> None:
    """Expected over every action of the sampling policy, against autograd of KL(pi||ref)."""
    for seed in range(5):
        logits, ref, old = _policies(seed)
        lp = logits.log_softmax(-1)
        sampler = lp.detach() if on_policy else old
        loss = kl.loss(
            lp.unsqueeze(0), ref.unsqueeze(0), sampler.exp().unsqueeze(0), kind=kind,
            old_log_prob=None if on_policy else old.unsqueeze(0),
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(gradient, _exact_gradient(logits, ref), rtol=1e-9, atol=1e-12)
        # the value is the KL too, whoever sampled (k2 only estimates it)
        if kind != "k2":
            agree(loss, float((lp.exp() * (lp - ref)).sum().detach()))


def test_the_reward_penalty_has_the_same_gradient_and_bare_estimates_have_not() -> None:
    logits, ref, _ = _policies(0)
    lp = logits.log_softmax(-1)
    p = lp.detach().exp()
    mask = torch.ones(1, 6)
    reward = kl.reward_penalty(lp.unsqueeze(0), ref.unsqueeze(0), mask, coefficient=1.0)[0]
    assert not reward.requires_grad
    (gradient,) = torch.autograd.grad(-(p * reward * lp).sum(), logits, retain_graph=True)
    exact = _exact_gradient(logits, ref)
    torch.testing.assert_close(gradient, exact, rtol=1e-9, atol=1e-12)
    bare = {}
    for kind in kl.KINDS:
        expected = (p * kl.estimate(lp, ref, kind)).sum()
        (bare[kind],) = torch.autograd.grad(expected, logits, retain_graph=True)
    torch.testing.assert_close(bare["k1"], torch.zeros(6, dtype=torch.float64), atol=1e-15, rtol=0)
    torch.testing.assert_close(bare["k2"], exact, rtol=1e-9, atol=1e-12)
    forward = torch.autograd.grad((ref.exp() * (ref - logits.log_softmax(-1))).sum(), logits)[0]
    torch.testing.assert_close(bare["k3"], forward, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", kl.KINDS)
def test_nothing_leaks_from_outside_the_mask(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    lp, ref, old = -torch.rand(3, 2, 4, generator=generator, dtype=torch.float64)
    weights = f64([[0.2, 0.3, 0, 0], [0.5, 0, 0, 0]])

    def evaluate(filler: float) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = [torch.where(weights == 0, filler, tensor) for tensor in (lp, ref, old)]
        leaf = tensors[0].requires_grad_()
        loss = kl.loss(leaf, tensors[1], weights, kind=kind, old_log_prob=tensors[2])
        return loss, torch.autograd.grad(loss, leaf)[0]

    clean, dirty = evaluate(0.0), evaluate(torch.nan)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    spoiled = torch.where(weights == 0, torch.nan, lp)
    penalty = kl.reward_penalty(spoiled, ref, weights, coefficient=0.5, kind=kind)
    agree(penalty, torch.where(weights != 0, -0.5 * kl.estimate(lp, ref, kind), 0.0))


def test_estimates_do_not_change_their_input() -> None:
    lp, ref = f64([-1.0, -2.0]), f64([-1.5, -0.5])
    for kind in kl.KINDS:
        kl.estimate(lp, ref, kind)
    kl.reward_penalty(lp.unsqueeze(0), ref.unsqueeze(0), torch.ones(1, 2), coefficient=3.0)
    agree(lp, [-1.0, -2.0])
    agree(ref, [-1.5, -0.5])


def test_controllers() -> None:
    fixed = kl.FixedController(0.05)
    fixed.update(100.0, 10)
    assert fixed.coefficient == 0.05
    adaptive = kl.AdaptiveController(0.15, target=6.0, horizon=10_000)
    adaptive.update(6.0, 256)
    assert adaptive.coefficient == 0.15
    adaptive.update(6.6, 256)
    assert adaptive.coefficient == pytest.approx(0.15 * (1 + 0.1 * 256 / 10_000))
    before = adaptive.coefficient
    adaptive.update(600.0, 256)  # clipped at +0.2
    assert adaptive.coefficient == pytest.approx(before * (1 + 0.2 * 256 / 10_000))
    before = adaptive.coefficient
    adaptive.update(-3.0, 256)  # clipped at -0.2
    assert adaptive.coefficient == pytest.approx(before * (1 - 0.2 * 256 / 10_000))
    sudden = kl.AdaptiveController(0.15, target=6.0, horizon=10)
    sudden.update(0.0, 256)  # 1 - 0.2 * 25.6 is negative: never a reward for distance
    assert sudden.coefficient == 0
    restored = kl.AdaptiveController(9.0, target=6.0, horizon=10_000)
    restored.load_state_dict(json.loads(json.dumps(adaptive.state_dict())))
    assert restored.coefficient == adaptive.coefficient
