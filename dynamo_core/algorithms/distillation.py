"""Distillation losses over whole distributions, each sum_it w_it D_it with `aggregation_weights`.

p teacher, q student, both softmax(z / temperature):
    forward_kl   sum_k p (log p - log q)        covers the teacher
    reverse_kl   sum_k q (log q - log p)        seeks its modes
    generalised_jsd(beta), 0 < beta < 1, m = beta p + (1 - beta) q:
                 beta KL(p||m) + (1 - beta) KL(q||m);   beta 0.5 is the Jensen-Shannon divergence
    beta = 0 and 1 are forward and reverse KL themselves, the limits of D / (beta (1 - beta)), since
    D itself vanishes there. Source: GKD, arXiv 2306.13649; the convention of huggingface/trl.

The losses are not multiplied by temperature^2. Slice both vocabularies to the common one before.

Shapes: B rows, T tokens, V vocabulary, M tokens with a weight.
"""

from __future__ import annotations

import math

import torch

from dynamo_core.algorithms.checks import at_least_float32, fail, number, require, zero_outside


def _log_probs(
    name: str, logits: torch.Tensor, weights: torch.Tensor, temperature: float
) -> torch.Tensor:
    """log softmax(z / temperature) [M, V] at the tokens with a weight."""
    if logits.shape[:-1] != weights.shape:
        fail(name, f"of shape {tuple(logits.shape)}", f"{tuple(weights.shape)} + (V,)")
    chosen = at_least_float32(logits[weights != 0])
    return torch.log_softmax(chosen / temperature, -1)


def _kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p||q) [M]; outcomes that p cannot take add nothing, whatever q says of them."""
    possible = log_p != -torch.inf
    log_ratio = zero_outside(possible, log_p) - zero_outside(possible, log_q)
    return (log_p.exp() * log_ratio).sum(-1)


def _pair(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    weights: torch.Tensor,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(student log-probs [M, V], teacher log-probs [M, V], weights [M])."""
    require(temperature > 0, "temperature", temperature, "positive")
    if student_logits.shape != teacher_logits.shape:
        bound = f"{tuple(student_logits.shape)}, the student's (slice to the common vocabulary)"
        fail("teacher_logits", f"of shape {tuple(teacher_logits.shape)}", bound)
    student = _log_probs("student_logits", student_logits, weights, temperature)
    teacher = _log_probs("teacher_logits", teacher_logits.detach(), weights, temperature)
    return student, teacher.to(student.dtype), weights[weights != 0].to(student.dtype)


def forward_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    weights: torch.Tensor,
    *,
    temperature: float = 1.0,
) -> torch.Tensor:
    """sum w KL(teacher||student), scalar; logits [B, T, V], weights [B, T].

    Only the student gets a gradient.

    Raises:
        AlgorithmError: shapes that do not match, temperature not positive.
    """
    student, teacher, weights_M = _pair(student_logits, teacher_logits, weights, temperature)
    return (weights_M * _kl(teacher, student)).sum()


def reverse_kl(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    weights: torch.Tensor,
    *,
    temperature: float = 1.0,
) -> torch.Tensor:
    """sum w KL(student||teacher), scalar; logits [B, T, V], weights [B, T].

    Only the student gets a gradient.

    Raises:
        AlgorithmError: shapes that do not match, temperature not positive.
    """
    student, teacher, weights_M = _pair(student_logits, teacher_logits, weights, temperature)
    return (weights_M * _kl(student, teacher)).sum()


def generalised_jsd(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    weights: torch.Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
) -> torch.Tensor:
    """sum w D_beta, scalar (module docstring): beta 0 forward KL, 1 reverse KL, 0.5 Jensen-Shannon.

    Raises:
        AlgorithmError: beta outside [0, 1], shapes that do not match, temperature not positive.
    """
    number("beta", beta, 0, 1)
    student, teacher, weights_M = _pair(student_logits, teacher_logits, weights, temperature)
    if beta == 0:
        divergence = _kl(teacher, student)
    elif beta == 1:
        divergence = _kl(student, teacher)
    else:
        mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
        divergence = beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
    return (weights_M * divergence).sum()


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """sum w (-log q_target), scalar; logits [B, T, V], targets and weights [B, T].

    Targets without a weight (-100, padding) are never read.

    Raises:
        AlgorithmError: shapes that do not match.
    """
    if targets.shape != weights.shape:
        fail("targets", f"of shape {tuple(targets.shape)}", f"{tuple(weights.shape)} like weights")
    log_q = _log_probs("logits", logits, weights, 1.0)
    chosen = weights != 0
    picked = log_q.gather(-1, targets[chosen].unsqueeze(-1)).squeeze(-1)
    return -(weights[chosen].to(picked.dtype) * picked).sum()
