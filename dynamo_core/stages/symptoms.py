"""What can be wrong with a training stage: symptom, likely causes in order, the keys that help.

One table for the alarms, for `dynamo-rl diagnose` and for configs/README.md. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Symptom:
    """One row of the table."""

    name: str
    """alarm/<name> or gate/<name> where there is such a metric."""
    title: str
    metric: str
    """What is measured; empty where an error says it all."""
    causes: tuple[str, ...]
    keys: tuple[str, ...]
    error: str = ""
    """Regular expression that finds it in the cause of an error."""


ALARMS: Final = (
    Symptom(
        "entropy_collapse", "entropy has collapsed: below 10 % of its first value, or below 0.005", "policy/entropy",
        ("the learning rate is too high", "few prompts, seen too often", "nothing holds entropy up"),
        ("lower `optimizer.lr`", "raise `loss.eps_high`", "`loss.entropy_coefficient: 0.001`", "`entropy_method`"),
    ),
    Symptom(
        "truncated", "more than 50 % of the rollouts are cut off", "rollout/truncated_share",
        ("max_new_tokens is too small for the task", "the model does not end its answers", "answers grow"),
        ("raise `sampling.max_new_tokens`", "train the model longer before (`sft`)", "`overlong: mask`"),
    ),
    Symptom(
        "equal_rewards", "no prompt has both right and wrong answers: nothing to learn from",
        "allocation/zero_variance_groups",
        ("the tasks are far too hard or too easy", "the reward does not understand the answers", "too few rollouts"),
        ("other data, or a longer `sft` before", "`reward.format`", "raise `rollouts_per_prompt`"),
    ),
    Symptom(
        "explained_variance", "the critic is worse than a constant: explained variance below -0.5",
        "critic/explained_variance",
        ("the critic's learning rate is too high", "it had no time before the policy moved", "it chases noisy returns"),
        ("lower `critic.optimizer.lr`", "raise `critic.warmup_steps`", "`critic.value_clip`, `critic.lam: 1.0`"),
    ),
    Symptom(
        "weights_still", "weights do not move although gradients are not zero", "policy/update_rms",
        ("updates are smaller than the precision of the weights", "the learning rate is far too small"),
        ("`engine.precision: float32`", "raise `optimizer.lr`"),
    ),
    Symptom(
        "unscored", "more than 20 % of the rollouts have no score", "reward/unscored",
        ("answers of the data are in another format", "the reward function fails"),
        ("`reward.format`", "the data's `answer` fields"),
    ),
    Symptom(
        "clipped", "more than 30 % of the tokens are clipped", "policy/clipfrac",
        ("the policy moves too far within one step", "too many mini-batches of one step's rollouts"),
        ("lower `optimizer.lr`", "lower `updates_per_step`", "`target_kl: 0.02`", "raise `loss.eps_high`"),
    ),
)  # fmt: skip
"""Found while the stage runs (alarms.py)."""

GATES: Final = (
    Symptom(
        "ratio", "the policy disagrees with its own sampler before the first update: ratios are not 1", "gate/ratio",
        ("the sampler rounds otherwise", "another temperature, or a stale cache or weights in the sampler"),
        ("`engine.precision: float32`", "`sampling.temperature`"), r"^gate/ratio:",
    ),
    Symptom(
        "log_ratio", "the policy disagrees with its own sampler before the first update: log ratios are not 0",
        "gate/log_ratio",
        ("the sampler rounds otherwise", "another temperature, or a stale cache or weights in the sampler"),
        ("`engine.precision: float32`", "`sampling.temperature`"), r"^gate/log_ratio:",
    ),
    Symptom(
        "reference_kl", "the KL to the reference is not 0 at the first step", "gate/reference_kl",
        ("the reference is not the model that the stage starts from", "precision"),
        ("`model`, `model_from`", "`engine.precision: float32`"), r"^gate/reference_kl:",
    ),
    Symptom(
        "critic_value", "the critic's values are not 0 at the first step", "gate/critic_value",
        ("its value head does not start at zero",), ("`critic`",), r"^gate/critic_value:",
    ),
)  # fmt: skip
"""They stop the stage at its first step (training/gates.py)."""

FAILURES: Final = (
    Symptom(
        "reward_not_finite", "a reward is not finite", "",
        ("the reward function divides by zero or overflows",), ("`reward`; give no score where there is none",),
        r"^the reward is (nan|-?inf)",
    ),
    Symptom(
        "not_finite", "a loss, gradient, value or weight is not finite", "",
        ("the learning rate is too high", "gradients of single batches are huge", "bfloat16 overflows somewhere"),
        ("lower `optimizer.lr`", "lower `optimizer.grad_clip`", "raise `optimizer.warmup_steps`",
         "`engine.precision: float32`"),
        r"is (not finite|nan|-?inf)|^metric '",
    ),
    Symptom(
        "memory", "memory ran out", "",
        ("too many rows at once", "too many cached tokens while sampling", "optimizer states on every rank"),
        ("lower `micro_batch_size`", "lower `sampling.batch_tokens`", "`engine.gradient_checkpointing: true`",
         "`engine.zero_stage: 2`"),
        r"^out of memory",
    ),
    Symptom(
        "disk", "the disk is full", "",
        ("old stages and checkpoints fill the store",), ("`checkpoints.keep_last`", "`--store` on another disk"),
        r"^the disk is full",
    ),
)  # fmt: skip
"""Found in the error that ended the stage."""

TRENDS: Final = (
    Symptom(
        "no_reward", "not one answer was right", "reward/correct",
        ("the model cannot do the task at all", "the reward does not understand the answers", "answers are cut off"),
        ("a longer `sft` before", "`reward.format`", "raise `sampling.max_new_tokens`"),
    ),
    Symptom(
        "flat_reward", "the share of right answers has not risen: last quarter of the steps against the first",
        "reward/prompt_mean_correct",
        ("the learning rate is too small", "few groups have mixed rewards", "too few steps", "the policy overshoots"),
        ("raise `optimizer.lr`", "easier data", "raise `steps`", "`target_kl: 0.02`"),
    ),
    Symptom(
        "skipped_updates", "most steps skip mini-batches, because the policy moves past target_kl",
        "policy/skipped_updates",
        ("the learning rate is too high", "target_kl is very small"),
        ("lower `optimizer.lr`", "raise `target_kl`"),
    ),
)  # fmt: skip
"""Seen over the whole run only."""

SYMPTOMS: Final = (*ALARMS, *GATES, *FAILURES, *TRENDS)


def markdown() -> str:
    """The table as it stands in configs/README.md."""
    rows = [
        f"| {item.title} | {f'`{item.metric}`' if item.metric else 'error'} | {_numbered(item.causes)} |"
        f" {', '.join(item.keys)} |"
        for item in SYMPTOMS
    ]
    return "\n".join(["| symptom | measured by | likely causes, in order | what helps |", "|---|---|---|---|", *rows])


def _numbered(causes: tuple[str, ...]) -> str:
    return "; ".join(f"{number}. {cause}" for number, cause in enumerate(causes, start=1))
