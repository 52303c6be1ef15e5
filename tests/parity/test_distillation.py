"""Distillation losses: twins, exact limits, gradients, masks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dynamo_core.algorithms.distillation import (
    cross_entropy,
    forward_kl,
    generalised_jsd,
    reverse_kl,
)

from . import twins
from .oracle import agree, f64

Loss = Callable[..., torch.Tensor]


def _inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = 2 * torch.randn(2, 3, 4, 7, generator=generator, dtype=torch.float64)
    weights = torch.rand(3, 4, generator=generator, dtype=torch.float64)
    weights[1, 2:] = 0
    return student, teacher, weights


def _twin(student: torch.Tensor, teacher: torch.Tensor, weights: torch.Tensor, beta: float, heat: float) -> float:
    q, p = student.tolist(), teacher.tolist()
    return twins.weighted_sum(
        weights.tolist(),
        lambda b, t: twins.jsd(twins.softmax(p[b][t], heat), twins.softmax(q[b][t], heat), beta),
    )


@pytest.mark.parametrize("heat", [1.0, 2.5])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_divergences_equal_their_twin(beta: float, heat: float) -> None:
    for seed in range(4):
        student, teacher, weights = _inputs(seed)
        expected = _twin(student, teacher, weights, beta, heat)
        agree(generalised_jsd(student, teacher, weights, beta=beta, temperature=heat), expected)
        if beta == 0:
            agree(forward_kl(student, teacher, weights, temperature=heat), expected)
        if beta == 1:
            agree(reverse_kl(student, teacher, weights, temperature=heat), expected)


def test_the_jsd_is_exact_at_its_three_named_points() -> None:
    student, teacher, weights = _inputs(1)
    forward = forward_kl(student, teacher, weights)
    reverse = reverse_kl(student, teacher, weights)
    assert torch.equal(generalised_jsd(student, teacher, weights, beta=0.0), forward)
    assert torch.equal(generalised_jsd(student, teacher, weights, beta=1.0), reverse)
    agree(forward, float(reverse_kl(teacher, student, weights)))
    half = generalised_jsd(student, teacher, weights, beta=0.5)
    agree(half, float(generalised_jsd(teacher, student, weights, beta=0.5)))
    assert 0 < half < math.log(2) * weights.sum()
    # the limits D / (beta (1 - beta))
    for beta, limit in ((1e-6, forward), (1 - 1e-6, reverse)):
        scaled = generalised_jsd(student, teacher, weights, beta=beta) / (beta * (1 - beta))
        assert float(scaled) == pytest.approx(float(limit), rel=1e-4)
    disjoint = f64([[[0.0, -torch.inf]]]), f64([[[-torch.inf, 0.0]]])
    agree(generalised_jsd(*disjoint, torch.ones(1, 1), beta=0.5), math.log(2))


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_an_equal_student_has_no_loss_and_no_gradient(beta: float) -> None:
    _, teacher, weights = _inputs(2)
    student = teacher.clone().requires_grad_()
    loss = generalised_jsd(student, teacher, weights, beta=beta)
    (gradient,) = torch.autograd.grad(loss, student)
    assert float(loss.detach()) == pytest.approx(0, abs=1e-14)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-14)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_gradients(beta: float) -> None:
    student, teacher, weights = _inputs(3)
    student.requires_grad_()
    teacher.requires_grad_()
    loss = generalised_jsd(student, teacher, weights, beta=beta, temperature=1.7)
    loss.backward()
    assert teacher.grad is None
    assert student.grad is not None
    for index in ((0, 0, 0), (1, 1, 3), (2, 3, 6)):
        step = torch.zeros_like(student)
        step[index] = 1e-6
        with torch.no_grad():
            up, down = (
                generalised_jsd(s, teacher, weights, beta=beta, temperature=1.7)
                for s in (student + step, student - step)
            )
        slope = float((up - down) / 2e-6)
        assert slope == pytest.approx(float(student.grad[index]), rel=1e-6, abs=1e-9)
    if beta == 0:  # w (q - p) / temperature
        gap = (student / 1.7).softmax(-1) - (teacher / 1.7).softmax(-1)
        agree(student.grad, (weights.unsqueeze(-1) * gap / 1.7).detach())


LOSSES: dict[str, Loss] = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "jsd": lambda s, t, w: generalised_jsd(s, t, w, beta=0.4),
    "cross_entropy": lambda s, t, w: cross_entropy(s, t.nan_to_num(-1).argmax(-1), w),
}


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_leaks_from_outside_the_mask_and_splits_add_up(name: str) -> None:
    student, teacher, weights = _inputs(4)
    outside = (weights == 0).unsqueeze(-1)
    results = []
    for filler in (0.0, torch.nan):
        leaf = torch.where(outside, filler, student).requires_grad_()
        loss = LOSSES[name](leaf, torch.where(outside, filler, teacher), weights)
        results.append((loss, torch.autograd.grad(loss, leaf)[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    parts = sum(LOSSES[name](student[i : i + 1], teacher[i : i + 1], weights[i : i + 1]) for i in range(3))
    torch.testing.assert_close(parts, results[0][0].detach(), rtol=1e-12, atol=1e-14)
    nothing = LOSSES[name](student, teacher, torch.zeros_like(weights))
    assert float(nothing) == 0


def test_cross_entropy_equals_its_twin() -> None:
    student, _, weights = _inputs(5)
    targets = torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(0))
    rows, labels = student.tolist(), targets.tolist()
    expected = twins.weighted_sum(weights.tolist(), lambda b, t: -math.log(twins.softmax(rows[b][t])[labels[b][t]]))
    targets[weights == 0] = -100
    agree(cross_entropy(student, targets, weights), expected)


def test_impossible_outcomes_of_the_teacher_add_nothing() -> None:
    teacher = f64([[[0.0, 0.0, -torch.inf]]])
    student = f64([[[0.0, 0.0, -torch.inf]]])
    weights = torch.ones(1, 1)
    for beta in (0.0, 0.5, 1.0):
        agree(generalised_jsd(student, teacher, weights, beta=beta), 0.0)
    agree(forward_kl(f64([[[0.0, 0.0, 0.0]]]), teacher, weights), math.log(1.5))
    assert forward_kl(teacher, f64([[[0.0, 0.0, 0.0]]]), weights) == torch.inf
