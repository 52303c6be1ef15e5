"""The preference loss: twin, gradient, flipped labels, masks."""

from __future__ import annotations

import math

import pytest
import torch

from dynamo_core.algorithms.preference import dpo_loss, dpo_metrics, implicit_reward

from . import twins
from .oracle import agree, f64

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
SETTINGS = [(0.1, 0.0), (0.1, 0.2), (1.5, 0.0), (1.5, 0.49)]


def _inputs(seed: int = 0, pairs: int = 7) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    log_probs = -20 * torch.rand(4, pairs, generator=generator, dtype=torch.float64)
    weights = torch.rand(pairs, generator=generator, dtype=torch.float64)
    weights[2] = 0
    return (*log_probs, weights)


def _rewards(
    ours: torch.Tensor, theirs: torch.Tensor, reference: torch.Tensor, other: torch.Tensor,
    weights: torch.Tensor, beta: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of chosen and rejected answers."""
    chosen = implicit_reward(ours, reference, weights, beta=beta)
    return chosen, implicit_reward(theirs, other, weights, beta=beta)


def _loss(*inputs: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    return dpo_loss(*_rewards(*inputs, beta), inputs[4], label_smoothing=label_smoothing)


def _metrics(*inputs: torch.Tensor, beta: float) -> dict[str, torch.Tensor]:
    return dpo_metrics(*_rewards(*inputs, beta), inputs[4])


@pytest.mark.parametrize(("beta", "smoothing"), SETTINGS)
def test_the_loss_and_its_metrics_equal_their_twins(beta: float, smoothing: float) -> None:
    for seed in range(4):
        inputs = _inputs(seed)
        loss, metrics = twins.dpo(*(values.tolist() for values in inputs), beta=beta, smoothing=smoothing)
        agree(_loss(*inputs, beta=beta, label_smoothing=smoothing), loss)
        found = _metrics(*inputs, beta=beta)
        assert found.keys() == metrics.keys()
        for name, value in metrics.items():
            agree(found[name], value)


@pytest.mark.parametrize(("beta", "smoothing"), SETTINGS)
def test_the_gradient_is_that_of_the_formula(beta: float, smoothing: float) -> None:
    """dl/d log pi(chosen) = beta (s - sigmoid(-h)), the negative of it for rejected, none for the reference."""
    *log_probs, weights = _inputs(1)
    for tensor in log_probs:
        tensor.requires_grad_()
    _loss(*log_probs, weights, beta=beta, label_smoothing=smoothing).backward()
    ours, theirs, reference, other = log_probs
    margin = beta * ((ours - reference) - (theirs - other)).detach()
    expected = weights * beta * (smoothing - torch.sigmoid(-margin))
    agree(ours.grad, expected)
    agree(theirs.grad, -expected)
    assert reference.grad is None and other.grad is None
    (again,) = torch.autograd.grad(_plain(ours, theirs, reference, other, weights, beta, smoothing), ours)
    agree(ours.grad, again)


def _plain(
    ours: torch.Tensor, theirs: torch.Tensor, reference: torch.Tensor, other: torch.Tensor,
    weights: torch.Tensor, beta: float, smoothing: float,
) -> torch.Tensor:  # fmt: skip
    """The loss as it is written, without care for overflow."""
    probability = torch.sigmoid(beta * (ours - theirs) - beta * (reference - other))
    return -(weights * ((1 - smoothing) * probability.log() + smoothing * (1 - probability).log())).sum()


def test_an_untrained_policy_has_loss_log_2_and_no_margin() -> None:
    chosen, rejected, _, _, _ = _inputs(2)
    weights = torch.full((7,), 1 / 7, dtype=torch.float64)
    inputs = (chosen, rejected, chosen, rejected, weights)
    for smoothing in (0.0, 0.3):
        agree(_loss(*inputs, beta=0.7, label_smoothing=smoothing), math.log(2))
    assert {name: float(value) for name, value in _metrics(*inputs, beta=0.7).items()} == dict.fromkeys(
        ("margin", "accuracy", "chosen_reward", "rejected_reward"), 0.0
    )


def test_smoothing_is_a_mixture_with_flipped_labels() -> None:
    chosen, rejected, reference, other, weights = _inputs(3)
    kept = _loss(chosen, rejected, reference, other, weights, beta=0.5)
    flipped = _loss(rejected, chosen, other, reference, weights, beta=0.5)
    smooth = _loss(chosen, rejected, reference, other, weights, beta=0.5, label_smoothing=0.2)
    agree(smooth, float(0.8 * kept + 0.2 * flipped))


def test_nothing_leaks_from_pairs_without_weight_and_splits_add_up() -> None:
    *log_probs, weights = _inputs(4)
    results = []
    for filler in (0.0, math.nan, math.inf):
        leaves = [torch.where(weights == 0, filler, tensor).requires_grad_() for tensor in log_probs]
        loss = _loss(*leaves, weights, beta=0.5, label_smoothing=0.1)
        results.append((loss, *torch.autograd.grad(loss, leaves[:2])))
        assert all(math.isfinite(value) for value in _metrics(*leaves, weights, beta=0.5).values())
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))
    parts = [_loss(*(t[i : i + 1] for t in (*log_probs, weights)), beta=0.5, label_smoothing=0.1) for i in range(7)]
    torch.testing.assert_close(sum(parts), results[0][0].detach(), rtol=1e-12, atol=1e-14)


def test_large_margins_stay_finite_and_halves_become_float32() -> None:
    zero, weights = f64([0.0, 0.0]), f64([0.5, 0.5])
    agree(_loss(f64([1e4, -1e4]), zero, zero, zero, weights, beta=1.0), 5e3)
    half = _loss(*(torch.zeros(2, dtype=torch.bfloat16),) * 4, torch.ones(2), beta=1.0)
    assert half.dtype == torch.float32
