"""Entropy change and modulation: reference values, twins, finite differences, streaming."""

from __future__ import annotations

from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest
import torch

from dynamo_core.algorithms.modulation import (
    DECAY5,
    DECAY6,
    LogitSums,
    Modulation,
    change_scale,
    compensation,
    entropy_change,
    entropy_change_from_bracket,
    entropy_scope,
    logit_statistics,
    modulate,
    modulation_metrics,
    quantile,
    sequence_bracket,
    stabilisation,
)

from . import twins
from .oracle import agree, cases, f64

EXPECTATION = {"exact": "vocabulary", "official": "sequence"}


def _tensors(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    names = ("logits", "old_log_prob", "advantages")
    tensors = {name: f64(case[name]) for name in names}
    return tensors | {"actions": torch.tensor(case["actions"]), "mask": torch.tensor(case["mask"])}


@pytest.mark.parametrize("name", EXPECTATION)
@pytest.mark.parametrize("case", cases("modulation"))
def test_oracle(case: dict[str, Any], name: str) -> None:
    tensors, expected, p = _tensors(case), case["expected"], case["params"]
    mask = tensors["mask"]
    token = logit_statistics(tensors["logits"], tensors["actions"], chunk=3)
    for field in ("log_prob", "entropy"):
        agree(torch.where(mask != 0, getattr(token, field), 0.0), expected[field])
    agree(torch.where(mask != 0, token.pi_lambda, 0.0), expected["pi_Lambda"])
    e_vocab = torch.where(mask != 0, token.pi_lambda - token.bracket, 0.0)
    agree(e_vocab, expected["E_vocab"])
    e_mean = torch.where(mask != 0, token.pi_lambda - sequence_bracket(token.pi_lambda, mask), 0.0)
    agree(e_mean, expected["E_seqmean"])

    change = entropy_change(**tensors, eps_low=p["eps_low"], eps_high=p["eps_high"], expectation=EXPECTATION[name])
    agree(change, expected[f"dH_{name}"])
    advantages = tensors["advantages"]
    comp = compensation(token.entropy, advantages, mask, alpha=p["alpha"])
    agree(comp, expected["beta_comp"])
    constants = {key: p[key] for key in ("lambda_min", "gamma", "tau")}
    agree(stabilisation(change, mask, **constants), expected[f"beta_stab_{name}"])
    config = Modulation(alpha=p["alpha"], **constants)
    agree(modulate(advantages, token.entropy, change, mask, config=config), expected[f"adv_{name}"])
    low, high = entropy_scope(token.entropy, mask)
    assert float(low) == pytest.approx(expected["H_min"], rel=1e-9)
    assert float(high) == pytest.approx(expected["H_max"], rel=1e-9)


def test_presets_carry_the_released_constants() -> None:
    assert astuple(DECAY5) == (0.4, 0.6, 50.0, 0.9, "max", True, True)
    assert astuple(DECAY6) == (0.2, 0.6, 50.0, 0.99, "max", True, True)


def _random(seed: int, B: int = 4, T: int = 6, V: int = 11) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(B, T, 1, generator=generator, dtype=torch.float64) * 6
    logits = torch.randn(B, T, V, generator=generator, dtype=torch.float64) * scale
    actions = torch.randint(V, (B, T), generator=generator)
    log_prob = logits.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    noise = 0.3 * torch.randn(B, T, generator=generator, dtype=torch.float64)
    mask = (torch.rand(B, T, generator=generator) < 0.7).long()
    mask[0, 0] = 1
    return {
        "logits": logits,
        "actions": actions,
        "old_log_prob": log_prob + noise,
        "advantages": torch.randn(B, T, generator=generator, dtype=torch.float64),
        "mask": mask,
    }


@pytest.mark.parametrize("expectation", ["vocabulary", "sequence"])
def test_entropy_change_equals_its_twin(expectation: str) -> None:
    for seed in range(15):
        tensors = _random(seed)
        weight = torch.rand(4, 6, dtype=torch.float64) if seed % 2 else None
        options: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.28, "expectation": expectation}
        actual = entropy_change(**tensors, **options, weight=weight)
        lists = [tensor.tolist() for tensor in tensors.values()]
        twin = twins.entropy_change(*lists, **options, weight=None if weight is None else weight.tolist())
        np.testing.assert_allclose(actual.numpy(), twin, rtol=1e-9, atol=1e-12)


def test_bracket_of_the_decoder_gives_the_same_change() -> None:
    tensors = _random(3)
    token = logit_statistics(tensors["logits"], tensors["actions"])
    rest = [tensors[name] for name in ("old_log_prob", "advantages", "mask")]
    clip = {"eps_low": 0.2, "eps_high": 0.28}
    weight = torch.rand(4, 6, dtype=torch.float64)
    actual = entropy_change_from_bracket(token.bracket, token.log_prob, *rest, **clip, weight=weight)
    expected = entropy_change(**tensors, **clip, expectation="vocabulary", weight=weight)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunk", [1, 2, 5, 11, 64])
def test_statistics_equal_their_twin_for_every_chunk(chunk: int) -> None:
    tensors = _random(1)
    actual = logit_statistics(tensors["logits"], tensors["actions"], chunk=chunk)
    for b in range(4):
        for t in range(6):
            twin = twins.token_statistics(tensors["logits"][b, t].tolist(), int(tensors["actions"][b, t]))
            got = [float(field[b, t]) for field in actual]
            assert got == pytest.approx(twin, rel=1e-9, abs=1e-12)


def test_statistics_of_large_and_impossible_logits() -> None:
    logits = f64([[1e4, 1e4 - 1, -1e4, 3.0], [-torch.inf, 2.0, -torch.inf, 1.0], [0.0, -800.0, 0, 0]])
    actions = torch.tensor([0, 1, 2])
    for chunk in (1, 2, 4):
        actual = logit_statistics(logits, actions, chunk=chunk)
        for row in range(3):
            twin = twins.token_statistics(logits[row].tolist(), int(actions[row]))
            assert [float(field[row]) for field in actual] == pytest.approx(twin, rel=1e-9, abs=1e-12)
    impossible = logit_statistics(logits[1:2], torch.tensor([0]), chunk=2)
    assert float(impossible.log_prob) == -torch.inf
    assert float(impossible.pi_lambda) == 0
    assert torch.isfinite(impossible.bracket).all()


def test_half_precision_logits_are_reduced_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(20, 3000, generator=generator)).bfloat16()
    actions = torch.randint(3000, (20,), generator=generator)
    half = logit_statistics(logits, actions, chunk=256)
    exact = logit_statistics(logits.double(), actions)
    for low, high in zip(half, exact, strict=True):
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), high, rtol=3e-5, atol=3e-6)


def test_statistics_are_differentiable() -> None:
    logits = _random(2)["logits"].requires_grad_()
    actions = _random(2)["actions"]
    streamed = logit_statistics(logits, actions, chunk=4)
    log_p = logits.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    plain = log_p.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
    for ours, reference in ((streamed.log_prob, plain), (streamed.entropy, entropy)):
        (a,) = torch.autograd.grad(ours.sum(), logits, retain_graph=True)
        (b,) = torch.autograd.grad(reference.sum(), logits, retain_graph=True)
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("overwrite", [False, True])
def test_sums_fed_by_hand(overwrite: bool) -> None:
    """In the logits' own memory or not: the same sums, an impossible token included."""
    logits = _random(4)["logits"]
    logits[..., 6] = -torch.inf
    sums = LogitSums(overwrite=overwrite)
    for part in (logits[..., 5:], logits[..., :5]):
        sums.update(part.clone())
    actual = sums.statistics(logits[..., 2])
    torch.testing.assert_close(sums.log_normaliser(), logits.logsumexp(-1), rtol=1e-11, atol=1e-13)
    expected = logit_statistics(logits, torch.full((4, 6), 2))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_entropy_change_is_the_derivative_along_the_surrogate_step() -> None:
    """dH/d eta of H(z - eta grad loss), with the gradient from autograd, eta -> 0."""
    tensors = _random(7)
    options: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.28}
    logits = tensors["logits"].requires_grad_()
    log_prob = logits.log_softmax(-1).gather(-1, tensors["actions"].unsqueeze(-1)).squeeze(-1)
    ratio = (log_prob - tensors["old_log_prob"]).exp()
    advantages = tensors["advantages"]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    (gradient,) = torch.autograd.grad((surrogate * tensors["mask"]).sum(), logits)

    def entropy(z: torch.Tensor) -> torch.Tensor:
        log_p = z.log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1)

    with torch.no_grad():
        change = entropy_change(**tensors, **options, expectation="vocabulary")
        for eta in (1e-4, 1e-5):
            step = entropy(logits + eta * gradient) - entropy(logits - eta * gradient)
            torch.testing.assert_close(step / (2 * eta), change, rtol=1e-5, atol=1e-7)


def test_a_constant_advantage_leaves_entropy_unchanged_on_average() -> None:
    logits = _random(5, B=1, T=1)["logits"].expand(11, 1, 11)
    actions = torch.arange(11).view(11, 1)
    p = logits[:, 0].softmax(-1)[0]
    bracket = logit_statistics(logits, actions).bracket[:, 0]
    assert float((p * bracket).sum()) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("normaliser", ["max", 0.5, 0.999])
def test_modulate_equals_its_twin(normaliser: str | float) -> None:
    for seed in range(8):
        tensors = _random(seed)
        mask, advantages = tensors["mask"], tensors["advantages"]
        entropy = logit_statistics(tensors["logits"], tensors["actions"]).entropy
        change = entropy_change(**tensors, eps_low=0.2, eps_high=0.2, expectation="vocabulary")
        for switches in ((True, True), (True, False), (False, True), (False, False)):
            config = replace(DECAY5, normaliser=normaliser, compensation=switches[0], stabilisation=switches[1])
            actual = modulate(advantages, entropy, change, mask, config=config)
            inputs = [tensor.tolist() for tensor in (advantages, entropy, change, mask)]
            twin = twins.modulate(*inputs, config)
            np.testing.assert_allclose(actual.numpy(), twin, rtol=1e-9, atol=1e-12)


def test_alpha_zero_is_the_identity_bit_for_bit() -> None:
    tensors = _random(11)
    mask = tensors["mask"]
    advantages = torch.where(mask != 0, tensors["advantages"], 0.0)
    entropy = logit_statistics(tensors["logits"], tensors["actions"]).entropy
    change = entropy_change(**tensors, eps_low=0.2, eps_high=0.2, expectation="vocabulary")
    off = replace(DECAY5, alpha=0.0, lambda_min=1.0)
    for dtype in (torch.float64, torch.float32):
        before = advantages.to(dtype)
        for config in (off, replace(DECAY5, alpha=0.0, stabilisation=False)):
            after = modulate(before, entropy, change, mask, config=config)
            assert after.dtype == dtype
            assert torch.equal(after, before)
    ones = compensation(entropy, advantages, mask, alpha=0.0)
    assert torch.equal(ones, (mask != 0).double())


def test_scope_and_scale_make_the_split_irrelevant() -> None:
    tensors = _random(12, B=8)
    mask, advantages = tensors["mask"], tensors["advantages"]
    mask[:, 0] = 1
    entropy = logit_statistics(tensors["logits"], tensors["actions"]).entropy
    change = entropy_change(**tensors, eps_low=0.2, eps_high=0.2, expectation="vocabulary")
    for normaliser in ("max", 0.9):
        config = replace(DECAY5, normaliser=normaliser)
        whole = modulate(advantages, entropy, change, mask, config=config)
        scope = entropy_scope(entropy, mask)
        scale = change_scale(change, mask, normaliser=normaliser)
        parts = [
            modulate(*(x[i : i + 1] for x in (advantages, entropy, change, mask)),
                     config=config, scope=scope, scale=scale)
            for i in range(8)
        ]  # fmt: skip
        assert torch.equal(torch.cat(parts), whole)
        alone = [
            modulate(*(x[i : i + 1] for x in (advantages, entropy, change, mask)), config=config) for i in range(8)
        ]
        assert not torch.equal(torch.cat(alone), whole)


def test_nothing_leaks_from_outside_the_mask() -> None:
    tensors = _random(13)
    mask = tensors["mask"]
    outside = mask == 0
    options: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.28}
    for expectation in ("vocabulary", "sequence"):
        clean = entropy_change(**tensors, **options, expectation=expectation)
        dirty = {name: tensor.clone() for name, tensor in tensors.items()}
        for name in ("logits", "old_log_prob", "advantages"):
            dirty[name][outside] = torch.nan
        dirty["actions"][outside] = -100
        assert torch.equal(entropy_change(**dirty, **options, expectation=expectation), clean)
    entropy = torch.rand(4, 6, dtype=torch.float64)
    bad = torch.where(outside, torch.nan, entropy)
    plain = modulate(tensors["advantages"], entropy, clean, mask, config=DECAY5)
    spoiled = modulate(dirty["advantages"], bad, torch.where(outside, torch.nan, clean), mask, config=DECAY5)
    assert torch.equal(plain, spoiled)
    assert torch.equal(plain[outside], torch.zeros_like(plain[outside]))


def test_quantile_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 7, 100, 999):
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        mask = torch.ones(size)
        mask[: size // 3] = 0
        inside = values[mask != 0]
        spoiled = torch.where(mask != 0, values, torch.nan)
        for q in (0.0, 0.1, 0.5, 0.999, 1.0):
            expected = np.quantile(inside.numpy(), q)
            assert float(quantile(spoiled, mask, q)) == pytest.approx(expected, rel=1e-12)
            assert twins.quantile(inside.tolist(), q) == pytest.approx(expected, rel=1e-12)


def test_metrics_of_modulation() -> None:
    before = f64([[1.0, -1.0, 2.0, 0.0], [4.0, 9.0, 9.0, 9.0]])
    after = f64([[1.5, -0.5, 2.0, 0.0], [6.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
    metrics = modulation_metrics(before, after, mask)
    assert metrics["before_mean"] == pytest.approx(6 / 5)
    assert metrics["after_mean"] == pytest.approx(9 / 5)
    assert metrics["before_std"] == pytest.approx(np.std([1, -1, 2, 0, 4]))
    assert metrics["share_boosted"] == pytest.approx(2 / 5)
    assert metrics["share_attenuated"] == pytest.approx(1 / 5)
    assert metrics["factor_q0"] == pytest.approx(0.5)
    assert metrics["factor_q50"] == pytest.approx(1.0)
    assert metrics["factor_q100"] == pytest.approx(1.5)
