"""What a reinforce stage works with: models under their engines, the sampler of answers, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynamo_core.algorithms.prompt_stats import PromptStats
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.rewards.protocol import make_reward
from dynamo_core.rollout.collector import Collector, PromptTask
from dynamo_core.rollout.engine import RolloutEngine
from dynamo_core.rollout.transformers_engine import TransformersEngine
from dynamo_core.stages.alarms import Alarms
from dynamo_core.stages.context import StageContext
from dynamo_core.stages.resume import checkpointer
from dynamo_core.training.checkpoint import Checkpointer
from dynamo_core.training.critic import Critic, ValueLearner
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.lora import has_adapters
from dynamo_core.training.models import eos_ids
from dynamo_core.training.policy import TokenScorer, require_packing
from dynamo_core.training.reference import Reference, Scorer, WithoutAdapters


@dataclass(frozen=True)
class Parts:
    """The collaborators of the loop."""

    ranks: Ranks
    tasks: Mapping[str, PromptTask]
    collector: Collector
    rollout_engine: RolloutEngine
    policy: PreTrainedModel
    """The whole policy, as rollouts need it: the actor's own model, or a copy where that is sharded."""
    actor: TrainingEngine
    critic: ValueLearner | None
    reference: Reference | None
    checkpoints: Checkpointer
    alarms: Alarms

    def publish(self, step: int) -> None:
        """Rollouts come from the weights after `step` from here on."""
        if self.policy is not cast(TokenScorer, self.actor.module).model:
            self.actor.copy_into(self.policy)
        self.rollout_engine.weight_version = step

    @property
    def remembered(self) -> dict[str, Stateful]:
        """What a checkpoint's state.json holds of them."""
        found: dict[str, Stateful] = {"alarms": self.alarms}
        return found if self.reference is None else {**found, "reference": self.reference}

    def check_weights(self) -> None:
        """Before models are saved.

        Raises:
            NumericalFailure: a weight is not finite.
        """
        self.actor.check_weights()
        if self.critic is not None:
            self.critic.engine.check_weights()


class Stateful(Protocol):
    """Something whose state is JSON values."""

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        ...


def build(
    context: StageContext,
    stage: ReinforceStage,
    ranks: Ranks,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Mapping[str, PromptTask],
    rollout_engine: RolloutEngine | None = None,
) -> Parts:
    """Everything around `model`, the policy that the stage starts from.

    Args:
        rollout_engine: another one than that which samples from `model`.
    """
    # Copies of the model are made before anything trains. Sharded weights cannot decode: ranks would have to gather
    # them for every token, and as long as the slowest.
    require_packing(model, stage.batching)
    policy = copy.deepcopy(model) if stage.engine.zero_stage == 3 else model
    if rollout_engine is None:
        rollout_engine = TransformersEngine(
            policy, eos_token_ids=eos_ids(model, tokenizer), batch_tokens=stage.sampling.batch_tokens
        )
    collector = Collector(rollout_engine, tokenizer, make_reward(stage.reward), tasks, ranks)
    reference = None
    if stage.kl is not None:
        reference = Reference(
            _unchanging(model), stage.kl, ranks,
            temperature=stage.sampling.temperature, size=stage.micro_batch_size,
            packed=stage.batching == "packed",
        )  # fmt: skip
    critic = _critic(stage, ranks, model)
    if stage.engine.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    actor = TrainingEngine(
        TokenScorer(model), ranks, optimizer=stage.optimizer, engine=stage.engine, total_steps=stage.optimizer_steps
    )
    saved = {"actor": actor} if critic is None else {"actor": actor, "critic": critic.engine}
    checkpoints = checkpointer(context, stage.checkpoints, ranks, saved, steps=stage.steps)
    alarms = Alarms(0 if stage.critic is None else stage.critic.warmup_steps, quiet=not ranks.first)
    return Parts(ranks, tasks, collector, rollout_engine, policy, actor, critic, reference, checkpoints, alarms)


def _unchanging(model: PreTrainedModel) -> Scorer:
    """Scores of what `model` is now, whatever it learns: with adapters, those of their base."""
    if has_adapters(model):
        return WithoutAdapters(TokenScorer(model))
    return TokenScorer(copy.deepcopy(model).eval().requires_grad_(False))


def statistics(stage: ReinforceStage) -> PromptStats:
    """The posterior of every prompt, empty."""
    strength = None if stage.critic is None else stage.critic.prior_strength
    settings = stage.statistics
    return (
        PromptStats(settings.prior, settings.discount)
        if strength is None
        else PromptStats(settings.prior, settings.discount, critic_strength=strength)
    )


def _critic(stage: ReinforceStage, ranks: Ranks, model: PreTrainedModel) -> ValueLearner | None:
    config = stage.critic
    if config is None:
        return None
    module = Critic(model)
    if stage.engine.gradient_checkpointing:
        module.checkpoint_activations()
    engine = TrainingEngine(
        module, ranks, optimizer=config.optimizer, engine=stage.engine, total_steps=stage.optimizer_steps
    )
    return ValueLearner(engine, config, ranks, size=stage.micro_batch_size, packed=stage.batching == "packed")
