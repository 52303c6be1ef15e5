"""Models that a stage finds ready: made by an earlier stage, or named by the recipe."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynamo_core.config.base import Engine
from dynamo_core.config.models import PretrainedModel
from dynamo_core.stages.context import StageContext
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.models import DTYPES, load_model, load_pretrained, load_tokenizer


def existing_model(
    context: StageContext, spec: PretrainedModel | None, engine: Engine, ranks: Ranks
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that `spec` names, else that of the stage's model input, on this rank's device."""
    dtype = DTYPES[engine.precision]
    if spec is not None:
        return load_pretrained(spec, dtype=dtype, device=ranks.device)
    folder = context.input("model") / "model"
    return load_model(folder, dtype=dtype, device=ranks.device), load_tokenizer(folder)
