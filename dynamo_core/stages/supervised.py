"""What sft and distill share, the starting model, and dpo with them: the loop with its metrics, the saved folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynamo_core.config.models import ScratchModel
from dynamo_core.config.stages import DistillStage, SftStage, SupervisedStage
from dynamo_core.data.rows import read_demonstrations
from dynamo_core.data.templates import train_tokenizer
from dynamo_core.stages.context import StageContext
from dynamo_core.stages.inputs import existing_model
from dynamo_core.stages.resume import checkpointer, resume, state
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.lora import parameter_counts, publish
from dynamo_core.training.models import DTYPES, build_scratch, load_tokenizer
from dynamo_core.training.supervised import Collation, EncodedRows, Loss, Row, train
from dynamo_core.types import Demonstration


def start_model(
    context: StageContext,
    stage: SftStage | DistillStage,
    ranks: Ranks,
    demonstrations: list[Demonstration],
    tokenizer_from: Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model that the stage starts from, on this rank's device, and its tokenizer.

    Args:
        tokenizer_from: folder of the tokenizer that a model from scratch uses; none: one is trained on the data.
    """
    if not isinstance(stage.model, ScratchModel):
        return existing_model(context, stage.model, stage, ranks)
    tokenizer: PreTrainedTokenizerBase
    if tokenizer_from is None:
        texts = (message.content for row in demonstrations for message in row.messages)
        tokenizer = train_tokenizer(texts, stage.model.vocab_size)
    else:
        tokenizer = load_tokenizer(tokenizer_from)
    model: Any = build_scratch(stage.model, tokenizer, context.spec.seed)
    return model.to(ranks.device, DTYPES[stage.engine.precision]), tokenizer


def fit(
    context: StageContext,
    stage: SupervisedStage,
    ranks: Ranks,
    *,
    loss: Loss,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    encoded: EncodedRows[Row],
    collation: Collation[Row],
) -> dict[str, float]:
    """Train `model` through `loss`, save it, and return the final metrics."""
    if stage.engine.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = parameter_counts(model)
    engine = TrainingEngine(
        loss, ranks, optimizer=stage.optimizer, engine=stage.engine, total_steps=stage.optimizer_steps
    )
    checkpoints = checkpointer(context, stage.checkpoints, ranks, {"model": engine}, steps=stage.steps)

    def report(step: int, values: Mapping[str, float], timings: Mapping[str, float]) -> None:
        context.metrics.write(step, values, timings)
        checkpoints.after_step(step, values, lambda: state(context, step))

    with checkpoints:
        start, _ = resume(context, checkpoints)
        context.tables.append(
            "left_out", [{"prompt_id": prompt_id, "reason": "too_long"} for prompt_id in encoded.too_long]
        )
        context.tables.flush(0)
        train(
            engine,
            encoded.rows,
            ranks,
            report,
            collation=collation,
            parts=loss.parts,
            steps=stage.steps,
            batch_size=stage.batch_size,
            micro_batch_size=stage.micro_batch_size,
            seed=context.spec.seed,
            start=start,
            prompt_ids=encoded.prompt_ids,
        )
        best = checkpoints.take_best()
        engine.check_weights()
        with engine.gathered():
            if ranks.first:
                publish(model, tokenizer, context.folder)
    ranks.barrier()
    return {
        **context.metrics.last,
        **best,
        "rows": float(len(encoded.rows)),
        "rows_too_long": float(len(encoded.too_long)),
        **parameters,
    }


def demonstrations_of(context: StageContext) -> list[Demonstration]:
    """The demonstrations of the stage's data input."""
    return read_demonstrations(context.input("data") / "data")
