"""The other stages: prepare_data, sft, distill, dpo, evaluate."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dynamo_core.config.base import Frozen, PositiveFloat, PositiveInt, Precision, Sampling, Share
from dynamo_core.config.data import Source, Split
from dynamo_core.config.models import Model, PretrainedModel
from dynamo_core.config.reinforce import MathAnswerReward, ReinforceStage
from dynamo_core.config.stage_base import BaseStage, Batching, TrainingStage


class PrepareDataStage(BaseStage):
    """Read, validate, split and store rows."""

    type: Literal["prepare_data"]
    source: Source
    split: Split = Split()
    rl_prompts: PositiveInt | None = None
    """Training prompts kept for reinforcement (those of lowest digest); none: all of them."""
    max_bad_share: Share = 0.05
    """The stage stops when a larger share of the rows is quarantined."""


class SupervisedStage(TrainingStage):
    """A stage that learns from stored rows, a batch a step."""

    model_from: str | None = None
    """An earlier stage whose model to start from; leave out with `model`."""
    data_from: str | None = None
    batch_size: PositiveInt
    """Rows (dpo: pairs) of one optimizer step, over all ranks."""
    max_length: PositiveInt = 512
    """Longer rows, and pairs that hold one, are left out, counted and listed."""


class SftStage(SupervisedStage):
    """Supervised fine-tuning on the assistant turns."""

    type: Literal["sft"]
    model: Model | None = None
    """The model to start from; leave out with `model_from`."""
    batching: Batching = "padded"
    """How rows stand in a micro-batch; changes memory and speed, not the result."""


class DistillStage(SupervisedStage):
    """A student learns a teacher's token distribution on the demonstrations."""

    type: Literal["distill"]
    model: Model | None = None
    """The student to start from; leave out with `model_from`."""
    batching: Batching = "padded"
    """How rows stand in a micro-batch; changes memory and speed, not the result."""
    teacher_from: str | None = None
    temperature: PositiveFloat = 1.0
    """Softens both distributions; the loss is multiplied by its square."""
    kl_weight: Share = 0.5
    """Weight of the forward KL; 1 - kl_weight goes to the cross-entropy with the data."""


class DpoStage(SupervisedStage):
    """Direct preference optimisation on pairs of answers, towards a frozen copy of the starting model."""

    type: Literal["dpo"]
    model: PretrainedModel | None = None
    """The policy to start from; leave out with `model_from`."""
    beta: PositiveFloat = 0.1
    """Strength of the tie to the starting model: a reward is beta times the log-ratio to it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed share of pairs that are the wrong way round (conservative DPO)."""


class Latency(Frozen):
    """How speed is measured: one prompt at a time, greedy."""

    prompts: PositiveInt = 20


class EvaluateStage(BaseStage):
    """Pass rates, intervals and latency of several models on the same prompts and seeds."""

    type: Literal["evaluate"]
    models_from: tuple[str, ...] | None = None
    """Stages whose models are compared; none: every earlier model."""
    data_from: str | None = None
    split: Literal["validation", "test"] = "test"
    limit: PositiveInt | None = None
    """Use only this many prompts (those of lowest digest); none: all."""
    samples: PositiveInt = 8
    ks: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (1, 2, 4, 8)
    sampling: Sampling
    reward: MathAnswerReward = MathAnswerReward()
    precision: Precision = "float32"
    """Of the weights while answering."""
    bootstrap: PositiveInt = 2000
    """Resamples of the prompts behind each 95 % interval."""
    latency: Latency = Latency()

    @model_validator(mode="after")
    def _ks_within_samples(self) -> Self:
        if max(self.ks) > self.samples:
            raise ValueError(f"ks {list(self.ks)} must not exceed samples ({self.samples})")
        return self


Stage = Annotated[
    PrepareDataStage | SftStage | DistillStage | DpoStage | ReinforceStage | EvaluateStage, Field(discriminator="type")
]
