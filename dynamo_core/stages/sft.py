"""Supervised fine-tuning on the assistant turns of the demonstrations."""

from __future__ import annotations

from typing import cast

from dynamo_core.config.stages import SftStage
from dynamo_core.stages.context import StageContext
from dynamo_core.stages.supervised import demonstrations_of, fit, start_model
from dynamo_core.training import distributed
from dynamo_core.training.policy import require_packing
from dynamo_core.training.supervised import NextTokenLoss, encode_rows, tokens


def run(context: StageContext) -> dict[str, float]:
    """Train and save; returns the final metrics."""
    stage = cast(SftStage, context.spec.stage)
    with distributed.start(context.spec.resources, always_group=True) as ranks:
        demonstrations = demonstrations_of(context)
        model, tokenizer = start_model(context, stage, ranks, demonstrations)
        require_packing(model, stage.batching)
        return fit(
            context,
            stage,
            ranks,
            loss=NextTokenLoss(model),
            model=model,
            tokenizer=tokenizer,
            encoded=encode_rows(tokenizer, demonstrations, stage.max_length),
            collation=tokens(stage.batching),
        )
