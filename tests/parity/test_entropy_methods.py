"""Entropy-method options: their formulas on small inputs and against loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynamo_core.algorithms.entropy_methods import (
    clip_cov,
    covariance,
    entropy_advantage,
    fork_tokens,
    kl_cov,
    kl_cov_penalty,
    w_reinforce,
)

from .oracle import agree, f64


def _inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    log_prob, advantages = 2 * torch.randn(2, 6, 8, generator=generator, dtype=torch.float64)
    mask = (torch.rand(6, 8, generator=generator) < 0.8).long()
    spoil = torch.where(mask != 0, 0.0, torch.nan)
    return log_prob + spoil, advantages + spoil, mask


def _covariance(log_prob: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    inside = [(float(a), float(b)) for a, b in zip(log_prob[mask != 0], advantages[mask != 0], strict=True)]
    mean_a = sum(a for a, _ in inside) / len(inside)
    mean_b = sum(b for _, b in inside) / len(inside)
    return [
        [(float(a) - mean_a) * (float(b) - mean_b) if m else 0.0 for a, b, m in zip(*rows, strict=True)]
        for rows in zip(log_prob, advantages, mask, strict=True)
    ]


def test_covariance() -> None:
    for seed in range(5):
        inputs = _inputs(seed)
        agree(covariance(*inputs), _covariance(*inputs))


def test_clip_cov_drops_random_tokens_of_the_band() -> None:
    inputs = _inputs(1)
    cov, mask = covariance(*inputs), inputs[2]
    band = (cov > 0.5) & (cov < 5) & (mask != 0)
    count = int(mask.sum())
    assert int(band.sum()) > 4
    dropped = torch.zeros_like(band)
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        keep = clip_cov(*inputs, generator=generator, share=2.5 / count, low=0.5, high=5.0)
        lost = (mask != 0) & ~keep
        assert int(lost.sum()) == 2
        assert bool(band[lost].all())
        assert not keep[mask == 0].any()
        dropped |= lost
    assert torch.equal(dropped, band)  # every token of the band has its turn
    # tokens outside the mask have covariance 0: they must not use up the draws of a band around 0
    around = [clip_cov(*inputs, generator=generator, share=8.5 / count, low=-0.5, high=0.5) for _ in range(20)]
    assert int(((cov.abs() < 0.5) & (mask != 0)).sum()) >= 8
    assert {int(((mask != 0) & ~keep).sum()) for keep in around} == {8}
    same = [clip_cov(*inputs, generator=torch.Generator().manual_seed(3), share=0.1) for _ in range(2)]
    assert torch.equal(*same)
    generator = torch.Generator().manual_seed(0)
    everything = clip_cov(*inputs, generator=generator, low=100.0, high=200.0)
    assert torch.equal(everything, mask != 0)
    one = clip_cov(*inputs, generator=generator, share=0.0)
    assert int(((mask != 0) & ~one).sum()) == 1


def test_kl_cov_takes_the_top_share() -> None:
    for seed in range(5):
        inputs = _inputs(seed)
        mask = inputs[2]
        wanted = int(0.2 * int(mask.sum()))
        top = kl_cov(*inputs, share=0.2)
        assert int(top.sum()) == wanted
        cov = np.asarray(_covariance(*inputs))
        cut = np.sort(cov[mask.numpy() != 0])[-wanted]
        assert np.array_equal(top.numpy(), (cov >= cut) & (mask.numpy() != 0))
    assert int(kl_cov(*inputs, share=0.0).sum()) == 1


def test_kl_cov_penalty_and_its_gradient() -> None:
    log_prob = f64([[-1.0, -2.0, torch.nan]]).requires_grad_()
    old = f64([[-1.5, -1.0, 0.0]])
    weights = f64([[0.5, 0.25, 0.0]])
    chosen = torch.tensor([[True, True, True]])
    loss = kl_cov_penalty(log_prob, old, weights, chosen, coefficient=2.0)
    agree(loss, 2 * (0.5 * 0.5 + 0.25 * 1.0))
    agree(torch.autograd.grad(loss, log_prob)[0], [[1.0, -0.5, 0.0]])
    agree(kl_cov_penalty(log_prob, old, weights, chosen & torch.tensor([[False, True, True]])), 0.25)


def test_kl_cov_pushes_nowhere_where_policies_agree_up_to_rounding() -> None:
    for dtype, rounding in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        old = torch.tensor([[-1.0, -2.0, -0.5]], dtype=dtype)
        log_prob = (old + torch.tensor([[rounding, -rounding, 1e-3]], dtype=dtype)).requires_grad_()
        loss = kl_cov_penalty(log_prob, old, torch.ones_like(old), torch.ones_like(old) > 0)
        assert loss.item() == pytest.approx(1e-3, rel=1e-3)
        agree(torch.autograd.grad(loss, log_prob)[0].double(), [[0.0, 0.0, 1.0]])


def test_entropy_advantage() -> None:
    advantages = f64([[1.0, -1.0, 4.0, torch.nan]])
    entropy = f64([[10.0, 10.0, 0.5, 1.0]]).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0]])
    shaped = entropy_advantage(advantages, entropy, mask)
    agree(shaped, [[1.5, -0.5, 4.2, 0.0]])
    assert not shaped.requires_grad


def test_w_reinforce() -> None:
    correct = torch.tensor([1, 0, 1])
    agree(w_reinforce(correct), [0.1, -1.0, 0.1])
    agree(w_reinforce(correct, positive=0.0), [0.0, -1.0, 0.0])
    agree(w_reinforce(torch.tensor([True, False]), positive=1.0), [1.0, -1.0])


def test_fork_tokens() -> None:
    entropy = f64([[0.1, 0.9, 0.5, 0.3], [0.7, 99.0, torch.nan, 0.2]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 1]])
    chosen = fork_tokens(entropy, mask, share=0.34)
    assert chosen.tolist() == [[False, True, False, False], [True, False, False, False]]
    assert fork_tokens(entropy, mask, share=1.0).tolist() == (mask != 0).tolist()
    by_hand = fork_tokens(entropy, mask, threshold=0.3)
    assert by_hand.tolist() == [[False, True, True, True], [True, False, False, False]]


def test_fork_tokens_keep_about_the_share() -> None:
    entropy = torch.rand(20, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(fork_tokens(entropy, torch.ones(20, 50)).double().mean()) == pytest.approx(0.2)
