"""DynaMO policy optimisation, as the method reads: allocate, collect and score, credit, modulate, update, observe.

Left out here on purpose: no reference model and no critic (estimators compare siblings), and statistics live in the
trainer keyed by prompt id, never in the data loader.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dynamo_core.algorithms.allocation import allocate
from dynamo_core.algorithms.prompt_stats import PromptStats, official_rank
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.data.rows import read_prompts
from dynamo_core.data.templates import encode_prompt
from dynamo_core.errors import DataError
from dynamo_core.rewards.protocol import make_reward
from dynamo_core.rollout.batch import policy_batch
from dynamo_core.rollout.collector import Collector, PromptSampler, PromptTask, ScoredRollout
from dynamo_core.rollout.engine import RolloutEngine
from dynamo_core.rollout.transformers_engine import TransformersEngine
from dynamo_core.stages.context import StageContext
from dynamo_core.stages.inputs import existing_model
from dynamo_core.stages.reinforce_report import StepReport
from dynamo_core.training import distributed
from dynamo_core.training.checkpoint import Checkpointer
from dynamo_core.training.credit import credit, modulated, prompt_weights
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.models import eos_ids, parameter_count, save_model
from dynamo_core.training.policy import TokenScorer
from dynamo_core.training.policy_update import update
from dynamo_core.types import Sampling

TABLE_INTERVAL = 5
"""Steps between two parts of the allocation and sample tables."""


def run(context: StageContext) -> dict[str, float]:
    """Train and save the policy; returns the final metrics."""
    stage = cast(ReinforceStage, context.spec.stage)
    with distributed.start(context.spec.resources, always_group=True) as ranks:
        model, tokenizer = existing_model(context, stage.model, stage.engine, ranks)
        rows = read_prompts(context.input("data") / "data", "rl")
        tasks = {row.prompt_id: PromptTask(row, encode_prompt(tokenizer, row.messages)) for row in rows}
        if len(tasks) < stage.prompts_per_step:
            raise DataError(
                f"prompts_per_step is {stage.prompts_per_step} but the data holds {len(tasks)} training prompts",
                "a step needs distinct prompts: lower prompts_per_step or add data",
            )
        rollout_engine = TransformersEngine(
            model, eos_token_ids=eos_ids(model, tokenizer), batch_tokens=stage.sampling.batch_tokens
        )
        collector = Collector(rollout_engine, tokenizer, make_reward(stage.reward), tasks, ranks)
        if stage.engine.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        engine = TrainingEngine(
            TokenScorer(model), ranks, optimizer=stage.optimizer, engine=stage.engine, total_steps=stage.optimizer_steps
        )
        checkpoints = context.checkpointer(stage.checkpoints, ranks, {"actor": engine}, steps=stage.steps)
        with checkpoints:
            loop(
                context,
                stage,
                ranks,
                collector=collector,
                rollout_engine=rollout_engine,
                engine=engine,
                checkpoints=checkpoints,
                prompt_ids=sorted(tasks),
            )
            if ranks.first:
                save_model(model, tokenizer, context.folder / "model")
        ranks.barrier()
        return {**context.metrics.last, "parameters": float(parameter_count(model))}


def loop(
    context: StageContext,
    stage: ReinforceStage,
    ranks: Ranks,
    *,
    collector: Collector,
    rollout_engine: RolloutEngine,
    engine: TrainingEngine,
    checkpoints: Checkpointer,
    prompt_ids: list[str],
) -> None:
    """The method."""
    sampler = PromptSampler(prompt_ids, context.spec.seed)
    stats = PromptStats(stage.statistics.prior, stage.statistics.discount)
    sampling = Sampling(stage.sampling.temperature, stage.sampling.max_new_tokens, context.spec.seed)
    done, state = context.resume(checkpoints)
    if state:
        sampler.load_state_dict(state["sampler"])
        stats.load_state_dict(state["stats"])
        rollout_engine.weight_version = done
    for step in range(done + 1, stage.steps + 1):
        started = time.perf_counter()
        chosen = sampler.next(stage.prompts_per_step)
        variance = stats.variance(chosen)
        counts = allocated(stage, stats, chosen, variance)
        scored = collector.collect(chosen, counts, step=step, sampling=sampling)
        collected = time.perf_counter()
        batch = policy_batch(scored, chosen, overlong=stage.overlong)
        credit_BL = credit(stage, batch, variance)
        advantages_BL = modulated(stage, batch, credit_BL)
        updated = update(engine, batch, advantages_BL, stage, ranks, seed=(context.spec.seed, step))
        rollout_engine.weight_version = step
        observe(stats, scored)
        weights = prompt_weights(stage, batch, stats.success_rate(chosen), variance)
        report = StepReport(step, chosen, variance, counts, scored, batch, credit_BL, advantages_BL, updated, weights)
        context.metrics.write(
            step, {**report.values(), **stats.metrics()}, report.timings(started, collected, time.perf_counter())
        )
        context.tables.append("allocations", report.allocation_rows())
        context.tables.append("samples", report.sample_rows())
        if step % TABLE_INTERVAL == 0 or step == stage.steps:
            context.tables.flush(step)
        checkpoints.after_step(step, partial(_state, context, step, sampler, stats))


def _state(context: StageContext, step: int, sampler: PromptSampler, stats: PromptStats) -> dict[str, Any]:
    """What the loop remembers between steps, besides the engine."""
    return context.state(step, sampler=sampler.state_dict(), stats=stats.state_dict())


def allocated(
    stage: ReinforceStage, stats: PromptStats, prompt_ids: Sequence[str], variance: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Rollouts of each prompt, [N]: they sum to the step's budget and lie within its bounds."""
    rule, objective = stage.allocation.rule, stage.allocation.objective
    if rule == "official":
        rule, variance = "waterfall_variance", np.maximum(official_rank(*stats.lifetime_counts(prompt_ids)), 0)
    return allocate(variance, stage.budget, stage.n_low, stage.n_high, rule=rule, objective=objective)


def observe(stats: PromptStats, scored: list[ScoredRollout]) -> None:
    """Credit each rollout's raw correctness to its own prompt."""
    for item in scored:
        stats.observe(item.rollout.prompt_id, item.verdict.correct)
    stats.end_step()
