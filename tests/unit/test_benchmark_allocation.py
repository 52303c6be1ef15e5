"""The arithmetic of the allocation benchmark: mixtures, drift, ratios, targets, the certificate of optimality."""

from __future__ import annotations

import numpy as np
import pytest

from dynamo_core.algorithms.allocation import allocate
from tests.benchmarks import allocation_speed, estimated_rates, mixtures, true_rates
from tests.benchmarks.targets import Target, spread


def test_ratio_by_hand():
    c_N = np.array([0.25, 0.09])
    # uniform 4: .25/4 + .09/4 = .085; plan 5, 3: .05 + .03 = .08
    assert mixtures.ratio(c_N, [5, 3]) == pytest.approx(0.08 / 0.085, rel=1e-14)
    # over n-1: uniform .34/3; plan .25/4 + .09/2 = .1075
    assert mixtures.ratio(c_N, [5, 3], "rloo") == pytest.approx(0.1075 / (0.34 / 3), rel=1e-14)
    # n = 8 * (.5, .3) / .8 = 5, 3: the plan above is Neyman's
    assert mixtures.unbounded_ratio(c_N) == pytest.approx(0.08 / 0.085, rel=1e-14)


@pytest.mark.parametrize("name", mixtures.MIXTURES)
def test_mixtures_have_their_mean(name):
    mixture = mixtures.MIXTURES[name]
    assert sum(part.share for part in mixture) == pytest.approx(1)
    mean = sum(part.share * part.alpha / (part.alpha + part.beta) for part in mixture)
    p_N = mixtures.draw(mixture, 40_000, np.random.default_rng(0))
    assert ((p_N >= 0) & (p_N <= 1)).all()
    assert p_N.mean() == pytest.approx(mean, abs=4 * p_N.std() / 200)


def test_point_masses_are_exact():
    p_N = mixtures.draw(mixtures.MIXTURES["60 % exactly dead"], 10_000, np.random.default_rng(0))
    assert np.mean(p_N == 0) == pytest.approx(0.25, abs=0.02)
    assert np.mean(p_N == 1) == pytest.approx(0.35, abs=0.02)


def test_drift_moves_the_logit_by_a_quarter_per_visit():
    p_N, successes_VN = mixtures.visited(np.array([0.5, 0.0]), 3, 0.0, np.random.default_rng(0))
    assert successes_VN.shape == (3, 2)
    assert p_N[0] == pytest.approx(1 / (1 + np.exp(-0.75)))
    assert 0 < p_N[1] < 1e-5


def test_statistics_remember_the_visits(monkeypatch):
    monkeypatch.setattr(estimated_rates, "IDS", range(2))
    stats = estimated_rates.remembered(np.array([[16, 0], [8, 4]]))
    stats.end_step()
    k_N, G_N = stats.counts(range(2))
    assert k_N.tolist() == [16, 4]  # half of the older visit and all of the newer
    assert G_N.tolist() == [24, 24]


def test_staged_ratio_by_hand():
    c_N = np.array([0.25, 0.09])
    share_N = np.array([0.5, 0.25])
    noise_N = np.array([0.25 / 4 + 0.25 / 2, 0.0625 / 4 + 0.5625 / 8])
    expected = (c_N * noise_N).sum() / (0.34 / mixtures.MEAN)
    assert estimated_rates.staged_ratio(c_N, 4, np.array([2, 8]), share_N) == pytest.approx(expected, rel=1e-14)


def test_the_live_rule_stops_at_mastery_and_the_others_do_not():
    row = true_rates.columns(np.repeat([0.5, 0.86, 0.99], 8))
    assert row["optimum 8..24"] < row["floor+P 8..24"] < row["repo 8..24"]


def test_a_moved_unit_is_not_optimal():
    c_N = np.array([0.25, 0.16, 0.01])
    plan_N = allocate(c_N, 30, 2, 20, rule="optimal")
    assert allocation_speed.is_optimal(c_N, plan_N, 2, 20)
    assert not allocation_speed.is_optimal(c_N, plan_N + np.array([1, -1, 0]), 2, 20)


def test_targets_and_spread():
    assert Target("x", 1.0, 1.0).met
    assert not Target("x", 1.1, 1.0).met
    assert not Target("x", 0.4, 1.0, low=0.5).met
    assert spread([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
