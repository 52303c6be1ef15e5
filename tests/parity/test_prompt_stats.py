"""Prompt statistics: reference values, the visit-by-visit twin, order, discount, restoring."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dynamo_core.algorithms.prompt_stats import (
    PromptStats,
    fit_critic_strength,
    official_rank,
    posterior_variance,
    unbiased_variance,
)

from . import allocation_twins as twins
from .oracle import ATOL, RTOL, cases, load

PRIORS = {"jeffreys": (0.5, 0.5), "uniform_prior": (1, 1), "strong_prior_2_6": (2, 6)}


@pytest.mark.parametrize("case", cases("estimators"))
def test_oracle_estimators(case: dict[str, Any]) -> None:
    k, G = case["k"], case["G"]
    value = unbiased_variance(k, G)
    if case["P_unbiased"] is None:
        assert np.isnan(value)
    else:
        assert value == pytest.approx(case["P_unbiased"], rel=RTOL, abs=ATOL)
    for name, prior in PRIORS.items():
        expected = case[name]["var_bernoulli"]
        assert posterior_variance(k, G, prior) == pytest.approx(expected, rel=RTOL, abs=ATOL)
    assert posterior_variance(k, G) == posterior_variance(k, G, PRIORS["jeffreys"])


def test_oracle_unbiasedness() -> None:
    for case in load("estimators")["unbiasedness"]:
        p, G = Fraction(str(case["p"])), case["G"]
        k = np.arange(G + 1)
        chances = [float(p**i * (1 - p) ** (G - i)) for i in range(G + 1)]
        choose = np.array([_choose(G, i) for i in range(G + 1)], dtype=float)
        mean = float(np.dot(choose * chances, unbiased_variance(k, G)))
        assert mean == pytest.approx(case["E_P"], rel=RTOL)
        assert mean == pytest.approx(case["p_times_1mp"], rel=RTOL)


def _choose(n: int, k: int) -> int:
    value = Fraction(1)
    for i in range(k):
        value *= Fraction(n - i, i + 1)
    return int(value)


def test_oracle_histories() -> None:
    seen = 0
    for case in load("allocation")["cases"]:
        if "history" not in case:
            continue
        history = case["history"]
        c = posterior_variance(history["k"], history["G"], history["prior"])
        assert c.dtype == np.float64
        np.testing.assert_allclose(c, case["c"], rtol=RTOL)
        np.testing.assert_allclose(
            unbiased_variance(history["k"], history["G"]),
            [np.nan if value is None else value for value in history["P_unbiased"]],
            rtol=RTOL,
            atol=ATOL,
        )
        seen += 1
    assert seen == 3


def test_oracle_official_rank_and_its_twin() -> None:
    for case in load("allocation")["official_rule"]:
        rank = official_rank(case["positive_count"], case["sample_count"])
        np.testing.assert_allclose(rank, case["rank"], rtol=RTOL)
    for G in range(30):
        k = np.arange(G + 1)
        twin = [twins.official_rank(i, G) for i in k]
        np.testing.assert_allclose(official_rank(k, np.full(G + 1, G)), twin, rtol=1e-12)
    assert official_rank(17, 20) == 0.01  # 0.85 is mastered
    assert official_rank(3, 3) == -1


def test_posterior_equals_its_twin() -> None:
    rng = np.random.default_rng(0)
    G = rng.uniform(0, 50, 200)
    k = G * rng.random(200)
    for prior in ((0.5, 0.5), (2, 7), (0.01, 3)):
        twin = [twins.bernoulli_variance(a, b, *prior) for a, b in zip(k, G, strict=True)]
        np.testing.assert_allclose(posterior_variance(k, G, prior), twin, rtol=1e-12)


Visits = dict[str, list[list[bool]]]


def _random_history(seed: int, steps: int = 6) -> list[list[tuple[str, bool, float]]]:
    """Per step the observations (prompt, correct, energy); some prompts are left out."""
    rng = random.Random(seed)
    history = []
    for _ in range(steps):
        step = []
        for prompt in "abcdef":
            if rng.random() < 0.6:
                for _ in range(rng.randint(1, 8)):
                    step.append((prompt, rng.random() < 0.4, rng.random() * 10 ** rng.randint(-9, 9)))
        history.append(step)
    return history


def _play(history: list[list[tuple[str, bool, float]]], shuffle: int | None = None, **settings: Any) -> PromptStats:
    stats = PromptStats(**settings)
    for step in history:
        records = list(step)
        if shuffle is not None:
            random.Random(shuffle).shuffle(records)
        for prompt, correct, energy in records:
            stats.observe(prompt, correct, energy)
        stats.end_step()
    return stats


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9, 1.0])
def test_counts_equal_the_visit_by_visit_twin(discount: float) -> None:
    for seed in range(20):
        history = _random_history(seed)
        stats = _play(history, discount=discount, prior=(0.7, 1.3))
        visits: Visits = {prompt: [] for prompt in "abcdefz"}
        for step in history:
            for prompt in "abcdef":
                visit = [correct for name, correct, _ in step if name == prompt]
                if visit:
                    visits[prompt].append(visit)
        expected = [twins.discounted_counts(visits[prompt], discount) for prompt in "abcdefz"]
        k, G = stats.counts("abcdefz")
        np.testing.assert_allclose(k, [pair[0] for pair in expected], rtol=1e-12)
        np.testing.assert_allclose(G, [pair[1] for pair in expected], rtol=1e-12)
        twin = [twins.bernoulli_variance(*pair, 0.7, 1.3) for pair in expected]
        c = stats.variance("abcdefz")
        assert c.dtype == np.float64
        np.testing.assert_allclose(c, twin, rtol=1e-12)
        lifetime_k, lifetime_G = stats.lifetime_counts("abcdefz")
        assert lifetime_k.dtype == np.int64
        assert lifetime_k.tolist() == [sum(map(sum, visits[prompt])) for prompt in "abcdefz"]
        assert lifetime_G.tolist() == [sum(map(len, visits[prompt])) for prompt in "abcdefz"]


def test_energies_equal_the_visit_by_visit_twin() -> None:
    for seed in range(10):
        history = _random_history(seed)
        stats = _play(history, source="energy", energy_strength=2.0)
        means = {}
        sums = {}
        for prompt in "abcdef":
            visits = [[e for name, _, e in step if name == prompt] for step in history]
            visits = [visit for visit in visits if visit]
            ages = list(enumerate(reversed(visits)))
            total = sum(0.5**age * sum(visit) for age, visit in ages)
            count = sum(0.5**age * len(visit) for age, visit in ages)
            sums[prompt] = (total, count)
            if count:
                means[prompt] = total / count
        typical = sum(means.values()) / len(means)
        expected = [(2 * typical + t) / (2 + n) for t, n in (sums[p] for p in "abcdef")]
        np.testing.assert_allclose(stats.variance("abcdef"), expected, rtol=1e-9)
        assert stats.variance(["never"])[0] == pytest.approx(typical, rel=1e-9)


@pytest.mark.parametrize("source", ["posterior", "energy"])
def test_order_within_a_step_does_not_matter(source: str) -> None:
    history = _random_history(3)
    plain = _play(history, source=source)
    for shuffle in range(10):
        other = _play(history, shuffle, source=source)
        assert other.variance("abcdef").tolist() == plain.variance("abcdef").tolist()
        assert json.dumps(other.state_dict()) == json.dumps(plain.state_dict())
        assert other.metrics() == plain.metrics()


def test_the_discount_applies_once_per_visit_and_not_to_prompts_left_alone() -> None:
    stats = PromptStats(discount=0.5)
    for _ in range(4):
        stats.observe("a", True)
    stats.observe("b", False)
    stats.end_step()
    for _ in range(5):
        stats.end_step()
    assert [float(x[0]) for x in stats.counts("a")] == [4, 4]
    for correct in (False, False, True):
        stats.observe("a", correct)
    # the visit in progress counts already, as it will after the step
    assert [float(x[0]) for x in stats.counts("a")] == [3, 5]
    stats.end_step()
    assert [float(x[0]) for x in stats.counts("a")] == [3, 5]
    assert [float(x[0]) for x in stats.counts("b")] == [0, 1]


def test_critic_prior_for_unseen_prompts_only() -> None:
    stats = PromptStats(critic_strength=6.0)
    stats.observe("seen", True)
    prompts = ["seen", "unseen", "unknown", "sure", "beyond"]
    c = stats.variance(prompts, prior_mean=[0.3, 0.3, np.nan, 0.0, 1.7])
    assert c[0] == posterior_variance(1, 1)
    assert c[1] == pytest.approx(1.8 * 4.2 / (6 * 7))  # Beta(6 * 0.3, 6 * 0.7)
    assert c[2] == posterior_variance(0, 0)
    assert c[3] == pytest.approx(c[4])
    assert 0 < c[3] < 0.01
    assert (c > 0).all()


def test_variance_is_never_zero() -> None:
    stats = PromptStats()
    for _ in range(3):
        for _ in range(500):
            stats.observe("easy", True, 0.0)
            stats.observe("hard", False, 0.0)
        stats.end_step()
    assert (stats.variance(["easy", "hard", "new"]) > 0).all()
    energies = PromptStats(source="energy")
    assert (energies.variance(["new"]) > 0).all()
    energies.observe("quiet", None, 0.0)
    energies.observe("loud", None, 5.0)
    assert (energies.variance(["quiet", "loud", "new"]) > 0).all()


def test_unscored_rollouts_leave_the_statistics_and_are_counted() -> None:
    stats = PromptStats()
    stats.observe("a", None)
    stats.observe("a", True)
    stats.end_step()
    assert [float(x[0]) for x in stats.counts("a")] == [1, 1]
    metrics = stats.metrics()
    assert metrics["unscored"] == 1
    assert metrics["rollouts_seen"] == 1
    assert metrics["prompts_seen"] == 1
    assert metrics["success_rate_mean"] == pytest.approx(1.5 / 2)
    assert PromptStats().metrics() == {"prompts_seen": 0, "rollouts_seen": 0, "unscored": 0}


@pytest.mark.parametrize("source", ["posterior", "energy"])
def test_state_restores_exactly_also_in_the_middle_of_a_step(source: str) -> None:
    first, second = _random_history(8, 3), _random_history(9, 3)
    straight = _play(first, source=source)
    straight.observe("a", True, 0.1)
    straight.observe(7, False, 0.2)
    restored = PromptStats(source=source)
    restored.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for stats in (straight, restored):
        stats.observe("a", False, 0.3)
        stats.end_step()
        for step in second:
            for record in step:
                stats.observe(*record)
            stats.end_step()
    ids = [*"abcdef", 7]
    assert restored.variance(ids).tolist() == straight.variance(ids).tolist()
    assert restored.state_dict() == straight.state_dict()
    state = straight.state_dict()
    restored.observe("a", True, 0.4)
    assert straight.state_dict() == state  # no shared lists


def test_fit_critic_strength_finds_the_scale_of_the_noise() -> None:
    rng = np.random.default_rng(0)
    mean = rng.uniform(0.1, 0.9, 1500)
    for strength in (0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0):
        p = rng.beta(strength * mean, strength * (1 - mean))
        k = rng.binomial(64, p)
        assert fit_critic_strength(k, np.full(1500, 64), mean) == strength
