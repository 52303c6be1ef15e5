"""Bootstrap intervals and the quality of a set of answers, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dynamo_core.errors import AlgorithmError
from dynamo_core.evaluation.bootstrap import mean_interval
from dynamo_core.evaluation.latency import measure
from dynamo_core.evaluation.runner import Answers, quality
from dynamo_core.rollout.collector import ScoredRollout
from dynamo_core.rollout.engine import ScriptedEngine
from dynamo_core.types import RolloutRequest, Sampling, Verdict


def scored(counts: dict[str, tuple[int, int]]) -> list[ScoredRollout]:
    """prompt -> (rollouts, correct ones); rollout i has i + 1 tokens of 4 allowed."""
    requests = [RolloutRequest(key, (1,), 0, n, Sampling(1.0, 4, 0)) for key, (n, _) in counts.items()]
    rollouts = ScriptedEngine(lambda request, rollout: range(rollout + 1)).generate(requests)
    return [
        ScoredRollout(item, "", Verdict(float(right), right, ""))
        for item in rollouts
        for right in [item.rollout < counts[item.prompt_id][1]]
    ]


def test_quality_by_hand():
    answers = Answers(scored({"a": (4, 1), "b": (4, 4), "c": (4, 0)}), scored({"a": (1, 1), "b": (1, 1), "c": (1, 0)}))
    report = quality(answers, {"a": "easy", "b": "easy", "c": "hard"}, ks=(1, 2, 4), resamples=200, seed=0)
    overall = {name: estimate.value for name, estimate in report.overall.items()}
    # pass@2 of a: 1 - C(3,2)/C(4,2) = 1/2; of b: 1; of c: 0.
    assert overall == pytest.approx(
        {
            "sampled_pass@1": (1 / 4 + 1 + 0) / 3,
            "greedy_pass@1": 2 / 3,
            "pass@2": (1 / 2 + 1 + 0) / 3,
            "pass@4": 2 / 3,
            "truncated_share": 1 / 4,  # only the rollout of 4 tokens reaches the limit
            "response_tokens": 2.5,
        }
    )
    assert report.bands["easy"]["sampled_pass@1"].value == pytest.approx(0.625)
    assert report.bands["hard"]["sampled_pass@1"].value == 0.0


def test_an_interval_covers_the_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        estimate = mean_interval((generator.random(80) < 0.3).astype(np.float64), resamples=400, seed=seed)
        covered += estimate.low <= 0.3 <= estimate.high
    assert 0.88 <= covered / 200 <= 0.99


def test_intervals_repeat_and_shrink_with_more_problems():
    few, many = np.tile([0.0, 1.0], 20), np.tile([0.0, 1.0], 500)
    first = mean_interval(few, resamples=500, seed=1)
    assert first == mean_interval(few, resamples=500, seed=1)
    wide, narrow = first.high - first.low, mean_interval(many, resamples=500, seed=1)
    # The standard error falls by sqrt(1000 / 40) = 5.
    assert (narrow.high - narrow.low) == pytest.approx(wide / 5, rel=0.2)


@pytest.mark.parametrize(("scores", "resamples"), [(np.zeros(0), 10), (np.zeros((2, 2)), 10), (np.zeros(3), 0)])
def test_nothing_to_average_is_refused(scores, resamples):
    with pytest.raises(AlgorithmError):
        mean_interval(scores, resamples=resamples, seed=0)


def test_latency_answers_each_prompt_alone_and_greedily():
    seen = []

    def script(request, rollout):
        seen.append((request.prompt_id, request.n, request.sampling.temperature))
        return [1]

    requests = [RolloutRequest(key, (1,), 0, 5, Sampling(1.0, 4, 0)) for key in "ab"]
    report = measure(ScriptedEngine(script), requests)
    assert seen == [("a", 1, 0.0), ("a", 1, 0.0), ("b", 1, 0.0)]
    assert 0 < report.p50_ms <= report.p95_ms
