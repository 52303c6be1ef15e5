"""Where a model's weights come from."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dynamo_core.config.base import Frozen, PositiveInt


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
    """A local folder or a hub id, loaded with transformers; Python code that comes with it is never run."""

    type: Literal["pretrained"]
    path: Annotated[str, Field(min_length=1)]


Model = Annotated[ScratchModel | PretrainedModel, Field(discriminator="type")]
