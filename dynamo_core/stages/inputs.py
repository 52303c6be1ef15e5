"""Models that a stage finds ready: made by an earlier stage, or named by the recipe."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynamo_core.config.models import PretrainedModel
from dynamo_core.config.stage_base import TrainingStage
from dynamo_core.stages.context import StageContext
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.lora import add_adapters
from dynamo_core.training.models import DTYPES, load_pretrained
from dynamo_core.training.quantisation import require_quantisation


def existing_model(
    context: StageContext, spec: PretrainedModel | None, stage: TrainingStage, ranks: Ranks
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that `spec` names, else that of the stage's model input, on this rank's device, with its adapters.

    Raises:
        RecipeError: no such model, or `lora` asks for what it or the machine does not have.
    """
    lora = stage.lora
    four_bit = lora is not None and lora.quantisation is not None
    if four_bit:
        require_quantisation("lora.quantisation", gpu=ranks.device.type == "cuda")
    source = spec or PretrainedModel(type="pretrained", path=str(context.input("model") / "model"))
    model, tokenizer = load_pretrained(
        source, dtype=DTYPES[stage.engine.precision], device=ranks.device, four_bit=four_bit
    )
    if lora is not None:
        add_adapters(model, lora, context.spec.seed)
    return model, tokenizer
