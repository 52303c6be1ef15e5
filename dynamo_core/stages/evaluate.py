"""Evaluation: several models on the same prompts with the same draws, side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from dynamo_core.config.stages import EvaluateStage
from dynamo_core.data.rows import read_prompts
from dynamo_core.data.templates import encode_prompt
from dynamo_core.errors import DataError
from dynamo_core.evaluation.bootstrap import Estimate
from dynamo_core.evaluation.latency import LatencyReport, measure
from dynamo_core.evaluation.runner import Answers, QualityReport, quality
from dynamo_core.files import write_atomically
from dynamo_core.rewards.protocol import make_reward
from dynamo_core.rollout.collector import Collector, PromptTask, ScoredRollout
from dynamo_core.rollout.transformers_engine import TransformersEngine
from dynamo_core.stages.context import StageContext
from dynamo_core.training import distributed
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.models import DTYPES, eos_ids, load_model, load_tokenizer, parameter_count
from dynamo_core.types import PromptRow, RolloutRequest, Sampling

RESULTS = "results.json"


def run(context: StageContext) -> dict[str, float]:
    """Evaluate each model, write results.json and the answers; returns the pass rates."""
    stage = cast(EvaluateStage, context.spec.stage)
    with distributed.start(context.spec.resources) as ranks:
        rows = read_prompts(context.input("data") / "data", stage.split)[: stage.limit]
        models = []
        final: dict[str, float] = {}
        for number, name in enumerate(stage.models_from or (), start=1):
            report, values, timings = _evaluate(context, stage, ranks, name, rows)
            context.metrics.write(number, values, timings)
            context.tables.flush(number)
            models.append(report)
            final.update(values)
        if ranks.first:
            results = {"prompts": len(rows), "samples": stage.samples, "models": models}
            write_atomically(context.folder / RESULTS, json.dumps(results, indent=1) + "\n")
        ranks.barrier()
        return final


def _evaluate(
    context: StageContext, stage: EvaluateStage, ranks: Ranks, name: str, rows: list[PromptRow]
) -> tuple[dict[str, Any], dict[str, float], dict[str, float]]:
    """(entry of results.json, metrics, timings) of the model that stage `name` made."""
    folder = context.input(name) / "model"
    tokenizer = load_tokenizer(folder)
    model = load_model(folder, dtype=DTYPES[stage.precision], device=ranks.device).eval()
    engine = TransformersEngine(
        model, eos_token_ids=eos_ids(model, tokenizer), batch_tokens=stage.sampling.batch_tokens
    )
    tasks = {row.prompt_id: PromptTask(row, encode_prompt(tokenizer, row.messages)) for row in rows}
    collector = Collector(engine, tokenizer, make_reward(stage.reward), tasks, ranks)
    started = time.perf_counter()
    answers = _answers(stage, collector, list(tasks), context.spec.seed)
    seconds = time.perf_counter() - started
    unscored = _unscored(answers)
    difficulty = {row.prompt_id: row.difficulty for row in rows if row.prompt_id not in unscored}
    if not difficulty:
        raise DataError(
            f"none of the {len(rows)} prompts can be scored: {answers.sampled[0].verdict.reason}",
            "choose the reward.format that fits the answers of the data",
        )
    found = quality(answers, difficulty, ks=stage.ks, resamples=stage.bootstrap, seed=context.spec.seed)
    sampling = _sampling(stage, context.spec.seed, greedy=True)
    prompts = list(tasks.items())[: stage.latency.prompts]
    requests = [RolloutRequest(key, task.token_ids, 0, 1, sampling) for key, task in prompts]
    # One rank measures while the others wait: two at once would slow each other down.
    (speed,) = ranks.gather(measure(engine, requests) if ranks.first else None)
    tokens = sum(len(item.rollout.response_token_ids) for item in (*answers.sampled, *answers.greedy))
    context.tables.append("answers", [row for row in _answer_rows(name, answers, tasks)])
    timings = {
        f"{name}/latency_p50_ms": speed.p50_ms,
        f"{name}/latency_p95_ms": speed.p95_ms,
        f"{name}/tokens_per_second": tokens / seconds,
    }
    values = {f"{name}/{metric}": estimate.value for metric, estimate in found.overall.items()}
    values[f"{name}/unscored_prompts"] = float(len(unscored))
    return _entry(name, parameter_count(model), found, speed, tokens / seconds), values, timings


def _sampling(stage: EvaluateStage, seed: int, *, greedy: bool) -> Sampling:
    return Sampling(0.0 if greedy else stage.sampling.temperature, stage.sampling.max_new_tokens, seed)


def _answers(stage: EvaluateStage, collector: Collector, prompt_ids: list[str], seed: int) -> Answers:
    def collect(count: int, *, greedy: bool) -> list[ScoredRollout]:
        counts = np.full(len(prompt_ids), count, dtype=np.int64)
        return collector.collect(prompt_ids, counts, step=0, sampling=_sampling(stage, seed, greedy=greedy))

    return Answers(sampled=collect(stage.samples, greedy=False), greedy=collect(1, greedy=True))


def _unscored(answers: Answers) -> set[str]:
    """Prompts with an answer that has no verdict: they leave every pass rate, and are counted."""
    both = (*answers.sampled, *answers.greedy)
    return {item.rollout.prompt_id for item in both if item.verdict.correct is None}


def _entry(
    name: str, parameters: int, found: QualityReport, speed: LatencyReport, tokens_per_second: float
) -> dict[str, Any]:
    def cells(metrics: Mapping[str, Estimate]) -> dict[str, Any]:
        return {key: {"value": e.value, "low": e.low, "high": e.high} for key, e in metrics.items()}

    def plain(value: float) -> dict[str, Any]:
        return {"value": value, "low": None, "high": None}

    return {
        "name": name,
        "parameters": parameters,
        "metrics": {
            **cells(found.overall),
            "latency_p50_ms": plain(speed.p50_ms),
            "latency_p95_ms": plain(speed.p95_ms),
            "tokens_per_second": plain(tokens_per_second),
        },
        "bands": {band: cells(metrics) for band, metrics in found.bands.items()},
    }


def _answer_rows(name: str, answers: Answers, tasks: Mapping[str, PromptTask]) -> list[dict[str, Any]]:
    """One row an answer; sample -1 is the greedy one."""
    numbered = [(item.rollout.rollout, item) for item in answers.sampled] + [(-1, item) for item in answers.greedy]
    return [
        {
            "model": name,
            "prompt_id": item.rollout.prompt_id,
            "difficulty": tasks[item.rollout.prompt_id].row.difficulty,
            "answer": tasks[item.rollout.prompt_id].row.answer,
            "sample": number,
            "completion": item.completion,
            "correct": item.verdict.correct,
            "reason": item.verdict.reason,
            "finish_reason": item.rollout.finish_reason.value,
            "tokens": len(item.rollout.response_token_ids),
        }
        for number, item in numbered
    ]
