"""Pass rates of one model: sampled and greedy, overall and by difficulty, with intervals over problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dynamo_core.evaluation.bootstrap import Estimate, mean_interval
from dynamo_core.evaluation.passk import pass_at_k
from dynamo_core.rollout.collector import ScoredRollout

Metrics = dict[str, Estimate]


@dataclass(frozen=True)
class Answers:
    """All answers of one model. `greedy` holds one a prompt, `sampled` the same number for each."""

    sampled: Sequence[ScoredRollout]
    greedy: Sequence[ScoredRollout]


@dataclass(frozen=True)
class QualityReport:
    """Metrics over all prompts, and over those of each difficulty."""

    overall: Metrics
    bands: Mapping[str, Metrics]


def quality(
    answers: Answers, difficulty: Mapping[str, str], *, ks: Sequence[int], resamples: int, seed: int
) -> QualityReport:
    """Quality of one model's answers.

    Args:
        difficulty: prompt_id -> difficulty band.
        ks: pass@k for each of these, unbiased (Chen et al. 2021, equation 1).
    """

    def of(prompt_ids: frozenset[str]) -> Metrics:
        return _metrics(answers, prompt_ids, ks, lambda scores: mean_interval(scores, resamples=resamples, seed=seed))

    bands = sorted(set(difficulty.values()))
    return QualityReport(
        of(frozenset(difficulty)),
        {band: of(frozenset(key for key, value in difficulty.items() if value == band)) for band in bands},
    )


def _metrics(
    answers: Answers, prompt_ids: frozenset[str], ks: Sequence[int], estimate: Callable[[np.ndarray], Estimate]
) -> Metrics:
    sampled = _by_prompt(answers.sampled, prompt_ids)
    greedy = _by_prompt(answers.greedy, prompt_ids)
    counts = [(len(group), sum(bool(item.verdict.correct) for item in group)) for group in sampled.values()]
    metrics = {
        "sampled_pass@1": estimate(np.array([correct / n for n, correct in counts])),
        "greedy_pass@1": estimate(np.array([float(bool(group[0].verdict.correct)) for group in greedy.values()])),
    }
    for k in ks:
        if k > 1:
            metrics[f"pass@{k}"] = estimate(np.array([float(pass_at_k(n, correct, k)) for n, correct in counts]))
    shares = [np.mean([item.rollout.truncated for item in group]) for group in sampled.values()]
    lengths = [np.mean([len(item.rollout.response_token_ids) for item in group]) for group in sampled.values()]
    metrics["truncated_share"] = estimate(np.array(shares))
    metrics["response_tokens"] = estimate(np.array(lengths))
    return metrics


def _by_prompt(rollouts: Sequence[ScoredRollout], prompt_ids: frozenset[str]) -> dict[str, list[ScoredRollout]]:
    """Grouped by prompt id, never by text (verl#3280), in order of id."""
    groups: dict[str, list[ScoredRollout]] = {prompt_id: [] for prompt_id in sorted(prompt_ids)}
    for item in rollouts:
        if item.rollout.prompt_id in groups:
            groups[item.rollout.prompt_id].append(item)
    return groups
