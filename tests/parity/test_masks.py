"""Masks count by being non-zero, losses are linear in their weights, whatever sign or type these have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynamo_core.algorithms import distillation, kl, losses
from dynamo_core.algorithms import entropy_methods as methods
from dynamo_core.algorithms import modulation as mod
from dynamo_core.algorithms.advantages import gae, moments, whiten

CLIP: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.28}
_GENERATOR = torch.Generator().manual_seed(0)
A, B, C = torch.randn(3, 3, 4, generator=_GENERATOR, dtype=torch.float64)
LOGITS, TEACHER = 2 * torch.randn(2, 3, 4, 5, generator=_GENERATOR, dtype=torch.float64)
ACTIONS = torch.randint(5, (3, 4), generator=_GENERATOR)
GROUP = torch.tensor([4, 4, 1])
MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 1, 0]])
OTHERS = {
    "bool": MASK != 0,
    "negative": -MASK,
    "large": MASK * torch.tensor([2, 1, 5, 3]),
    "fraction": MASK * torch.tensor([0.5, -0.25, 1e-9, 2.0]),
}
Masked = Callable[[torch.Tensor], Any]
MASKED: dict[str, Masked] = {
    "gae": lambda m: gae(A, B, m, gamma=0.9, lam=0.8),
    "moments": lambda m: moments(A, m),
    "weighted moments": lambda m: moments(A, m, B.abs()),
    "whiten": lambda m: whiten(A, m),
    "whiten, scope": lambda m: whiten(A, m, scope=(0.1, 2.0)),
    "aggregation": lambda m: losses.aggregation_weights(m, GROUP, aggregation="prompt-mean-token-mean"),
    "entropy change": lambda m: mod.entropy_change(LOGITS, ACTIONS, A, B, m, **CLIP, expectation="vocabulary"),
    "by sequence": lambda m: mod.entropy_change(LOGITS, ACTIONS, A, B, m, **CLIP, expectation="sequence"),
    "from bracket": lambda m: mod.entropy_change_from_bracket(A, B, C, B, m, **CLIP),
    "sequence bracket": lambda m: mod.sequence_bracket(A, m),
    "quantile": lambda m: mod.quantile(A, m, 0.3),
    "entropy scope": lambda m: mod.entropy_scope(A, m),
    "change scale": lambda m: mod.change_scale(A, m),
    "compensation": lambda m: mod.compensation(A, B, m, alpha=0.3),
    "stabilisation": lambda m: mod.stabilisation(A, m, lambda_min=0.5, gamma=5.0, tau=0.5),
    "modulate": lambda m: mod.modulate(A, B, C, m, config=mod.DECAY5),
    "metrics": lambda m: list(mod.modulation_metrics(A, A * B, m).values()),
    "covariance": lambda m: methods.covariance(A, B, m),
    "clip_cov": lambda m: methods.clip_cov(A, B, m, generator=torch.Generator().manual_seed(1), share=0.3, low=0.01),
    "kl_cov": lambda m: methods.kl_cov(A, B, m, share=0.3),
    "entropy advantage": lambda m: methods.entropy_advantage(A, B.abs(), m),
    "fork tokens": lambda m: methods.fork_tokens(A, m, share=0.4),
    "fork tokens, threshold": lambda m: methods.fork_tokens(A, m, threshold=0.1),
    "explained variance": lambda m: losses.explained_variance(A, B, m),
    "importance": lambda m: losses.truncated_importance_weights(A, B, m),
    "sequence ratio": lambda m: losses.sequence_log_ratio(A, B, m),
    "reward penalty": lambda m: kl.reward_penalty(A, B, m, coefficient=0.3),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_counts_by_being_non_zero(name: str, other: str) -> None:
    expected, actual = MASKED[name](MASK), MASKED[name](OTHERS[other])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


WEIGHTED: dict[str, Masked] = {
    "policy": lambda w: losses.policy_loss(A, B, C, w, **CLIP, dual_clip=2.0),
    "gspo": lambda w: losses.gspo_loss(A, B, C, w, **CLIP),
    "cispo": lambda w: losses.cispo_loss(A, B, C, w, eps_high=0.3),
    "metrics": lambda w: torch.stack([*losses.clip_metrics(A, B, C, w, **CLIP, dual_clip=2.0).values()]),
    "value": lambda w: losses.value_loss(A, B, C, w, clip=0.3),
    "entropy": lambda w: losses.entropy_bonus(A, w, coefficient=0.3),
    "k1": lambda w: kl.loss(A, B, w, kind="k1", old_log_prob=C),
    "k2": lambda w: kl.loss(A, B, w, kind="k2", old_log_prob=C),
    "kl_cov penalty": lambda w: methods.kl_cov_penalty(A, B, w, MASK != 0),
    "forward": lambda w: distillation.forward_kl(LOGITS, TEACHER, w),
    "reverse": lambda w: distillation.reverse_kl(LOGITS, TEACHER, w),
    "jsd": lambda w: distillation.generalised_jsd(LOGITS, TEACHER, w, beta=0.3),
    "cross entropy": lambda w: distillation.cross_entropy(LOGITS, ACTIONS, w),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_loss_is_odd_in_its_weights(name: str) -> None:
    weights = MASK * C.abs()
    expected = -WEIGHTED[name](weights)
    assert expected.abs().max() > 0
    torch.testing.assert_close(WEIGHTED[name](-weights), expected, rtol=1e-14, atol=0)
