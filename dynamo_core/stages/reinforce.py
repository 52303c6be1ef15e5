"""DynaMO policy optimisation, as the method reads: allocate, collect, score, credit, modulate, update, observe.

Statistics live in the trainer keyed by prompt id, never in the data loader.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from dynamo_core.algorithms.allocation import allocate
from dynamo_core.algorithms.prompt_stats import PromptStats, official_rank
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.data.rows import read_prompts
from dynamo_core.data.templates import encode_prompt
from dynamo_core.errors import DataError
from dynamo_core.rollout.batch import policy_batch
from dynamo_core.rollout.collector import PromptSampler, PromptTask, ScoredRollout
from dynamo_core.stages.context import StageContext
from dynamo_core.stages.inputs import existing_model
from dynamo_core.stages.reinforce_parts import Parts, Stateful, build, statistics
from dynamo_core.stages.reinforce_report import StepReport
from dynamo_core.stages.resume import resume, state
from dynamo_core.training import distributed, gates
from dynamo_core.training.credit import credit, modulated, prompt_weights
from dynamo_core.training.critic import Critic, Values
from dynamo_core.training.lora import parameter_counts, publish
from dynamo_core.training.objective import Objective
from dynamo_core.training.policy_update import PolicyBatch, UpdateReport, mini_batches, update
from dynamo_core.types import Sampling

TABLE_INTERVAL = 5
"""Steps between two parts of the allocation and sample tables."""


def run(context: StageContext) -> dict[str, float]:
    """Train and save the policy; returns the final metrics."""
    stage = cast(ReinforceStage, context.spec.stage)
    with distributed.start(context.spec.resources, always_group=True) as ranks:
        model, tokenizer = existing_model(context, stage.model, stage, ranks)
        rows = read_prompts(context.input("data") / "data", "rl")
        tasks = {row.prompt_id: PromptTask(row, encode_prompt(tokenizer, row.messages)) for row in rows}
        if len(tasks) < stage.prompts_per_step:
            raise DataError(
                f"prompts_per_step is {stage.prompts_per_step} but the data holds {len(tasks)} training prompts",
                "a step needs distinct prompts: lower prompts_per_step or add data",
            )
        parts = build(context, stage, ranks, model=model, tokenizer=tokenizer, tasks=tasks)
        with parts.checkpoints:
            loop(context, stage, parts)
            best = parts.checkpoints.take_best()
            parts.publish(stage.steps)
            parts.check_weights()
            if ranks.first:
                publish(parts.policy, tokenizer, context.folder)
            if parts.critic is not None:
                with parts.critic.engine.gathered():
                    if ranks.first:
                        cast(Critic, parts.critic.engine.module).save(context.folder / "critic")
        ranks.barrier()
        return {**context.metrics.last, **best, **parameter_counts(parts.policy)}


def loop(context: StageContext, stage: ReinforceStage, parts: Parts) -> None:
    """The method."""
    sampler = PromptSampler(sorted(parts.tasks), context.spec.seed)
    stats = statistics(stage)
    sampling = Sampling(stage.sampling.temperature, stage.sampling.max_new_tokens, context.spec.seed)
    remembered: dict[str, Stateful] = {"sampler": sampler, "stats": stats, **parts.remembered}
    done, before = resume(context, parts.checkpoints)
    for name in remembered if done else ():
        remembered[name].load_state_dict(before[name])
    parts.publish(done)
    for step in range(done + 1, stage.steps + 1):
        started = time.perf_counter()
        chosen = sampler.next(stage.prompts_per_step)
        variance = stats.variance(chosen, prior_means(stage, parts, chosen, step))
        counts = allocated(stage, stats, chosen, variance)
        scored = parts.collector.collect(chosen, counts, step=step, sampling=sampling)
        collected = time.perf_counter()
        batch = policy_batch(
            scored, chosen, overlong=stage.overlong, truncation_penalty=stage.truncation_penalty
        )
        values = None if parts.critic is None else parts.critic.values(batch)
        reference_BL = None if parts.reference is None else parts.reference.log_probs(batch)
        gates.check_finite(step, batch, values, reference_BL)
        gated = gates.start_gates(batch, values, reference_BL, stage.engine.precision) if step == 1 else {}
        given = credit(stage, batch, variance, values=values, penalty_BL=_penalty(parts, batch, reference_BL))
        advantages_BL = modulated(stage, batch, given.advantages_BL)
        taught = teach(stage, parts, batch, values, given.returns_BL)
        updated = improve(stage, parts, batch, advantages_BL, reference_BL, place=(context.spec.seed, step))
        parts.publish(step)
        observe(stats, scored)
        if parts.reference is not None and reference_BL is not None:
            taught.update(parts.reference.observe(batch, reference_BL))
        weights = prompt_weights(stage, batch, stats.success_rate(chosen), variance)
        report = StepReport(
            step, chosen, variance, counts, scored, batch, given.advantages_BL, advantages_BL, updated, weights
        )
        metrics = {**report.values(), **taught, **gated, **stats.metrics()}
        metrics.update(parts.alarms.observe(step, metrics))
        context.metrics.write(step, metrics, report.timings(started, collected, time.perf_counter()))
        context.tables.append("allocations", report.allocation_rows())
        context.tables.append("samples", report.sample_rows())
        if step % TABLE_INTERVAL == 0 or step == stage.steps:
            context.tables.flush(step)
        parts.checkpoints.after_step(step, metrics, partial(_state, context, step, remembered))


def _state(context: StageContext, step: int, remembered: Mapping[str, Stateful]) -> dict[str, Any]:
    """What the loop remembers between steps, besides models and optimizers."""
    return state(context, step, **{name: part.state_dict() for name, part in remembered.items()})


def prior_means(
    stage: ReinforceStage, parts: Parts, prompt_ids: Sequence[str], step: int
) -> npt.NDArray[np.float64] | None:
    """The critic's guess of each prompt's success rate, [N]: for prompts that were never tried.

    None without a critic, and while it warms up: a value head that starts at zero knows nothing.
    """
    critic = parts.critic
    if critic is None or critic.config.prior_strength is None or step <= max(critic.config.warmup_steps, 1):
        return None
    return critic.prompt_values([parts.tasks[prompt_id].token_ids for prompt_id in prompt_ids])


def allocated(
    stage: ReinforceStage, stats: PromptStats, prompt_ids: Sequence[str], variance: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Rollouts of each prompt, [N]: they sum to the step's budget and lie within its bounds."""
    rule, objective = stage.allocation.rule, stage.allocation.objective
    if rule == "official":
        rule, variance = "waterfall_variance", np.maximum(official_rank(*stats.lifetime_counts(prompt_ids)), 0)
    return allocate(variance, stage.budget, stage.n_low, stage.n_high, rule=rule, objective=objective)


def _penalty(parts: Parts, batch: PolicyBatch, reference_BL: torch.Tensor | None) -> torch.Tensor | None:
    if parts.reference is None or reference_BL is None:
        return None
    return parts.reference.penalty(batch, reference_BL)


def teach(
    stage: ReinforceStage, parts: Parts, batch: PolicyBatch, values: Values | None, returns_BL: torch.Tensor | None
) -> dict[str, float]:
    """The critic's update, where there is one, and its metrics."""
    if parts.critic is None or values is None or returns_BL is None:
        return {}
    return parts.critic.fit(batch, values, returns_BL, mini_batches(batch, stage))


def improve(
    stage: ReinforceStage,
    parts: Parts,
    batch: PolicyBatch,
    advantages_BL: torch.Tensor,
    reference_BL: torch.Tensor | None,
    *,
    place: tuple[int, int],
) -> UpdateReport:
    """The policy's update; nothing while the critic warms up.

    Args:
        place: the run's seed and the step.
    """
    warmup = 0 if stage.critic is None else stage.critic.warmup_steps
    if place[1] <= warmup:
        return UpdateReport({}, 0.0)
    term = None if parts.reference is None else parts.reference.term
    objective = Objective(stage.loss, stage.entropy_method, term)
    return update(
        parts.actor, batch, advantages_BL, stage, parts.ranks,
        objective=objective, seed=place, reference_BL=reference_BL, first=place[1] == warmup + 1,
    )  # fmt: skip


def observe(stats: PromptStats, scored: list[ScoredRollout]) -> None:
    """Credit each rollout's raw correctness to its own prompt."""
    for item in scored:
        stats.observe(item.rollout.prompt_id, item.verdict.correct)
    stats.end_step()
