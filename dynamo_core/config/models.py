"""Where a model's weights come from, and which of them train."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dynamo_core.config.base import Frozen, NonNegativeFloat, PositiveFloat, PositiveInt


class ScratchModel(Frozen):
    """Random weights. The tokenizer is the teacher's where the stage has one, else trained on the data."""

    type: Literal["scratch"]
    architecture: Literal["qwen3"] = "qwen3"
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    ffn_width: PositiveInt
    context: PositiveInt = 512
    """Longest sequence in tokens."""
    vocab_size: Annotated[int, Field(ge=32)] = 128
    """Upper bound on the trained tokenizer's size, special tokens included."""

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class PretrainedModel(Frozen):
    """A local folder or a hub id of a whole model, not of an adapter.

    It is loaded with transformers; Python code that comes with it is never run.
    """

    type: Literal["pretrained"]
    path: Annotated[str, Field(min_length=1)]


Model = Annotated[ScratchModel | PretrainedModel, Field(discriminator="type")]


class Lora(Frozen):
    """Low-rank adapters train, the model's own weights stay frozen (Hu et al. 2021)."""

    rank: PositiveInt
    alpha: PositiveFloat
    """The adapters' product is multiplied by alpha / rank."""
    dropout: NonNegativeFloat = 0.0
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of linear layers, such as q_proj; all-linear: every one but the output layer."""
    quantisation: Literal["4bit"] | None = None
    """4bit: the frozen weights are held as NF4 (QLoRA, Dettmers et al. 2023); needs a CUDA GPU and bitsandbytes."""

    @field_validator("dropout")
    @classmethod
    def _none(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(f"is {dropout:g}, must be 0: dropout makes the ratio of the first update differ from 1")
        return dropout
