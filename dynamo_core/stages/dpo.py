"""Direct preference optimisation: the baseline that learns from pairs of answers, without rollouts."""

from __future__ import annotations

from typing import cast

from dynamo_core.config.stages import DpoStage
from dynamo_core.data.rows import read_pairs
from dynamo_core.stages.context import StageContext
from dynamo_core.stages.inputs import existing_model
from dynamo_core.stages.supervised import fit
from dynamo_core.training import distributed
from dynamo_core.training.preference import PAIRS, PreferenceLoss, encode_pairs


def run(context: StageContext) -> dict[str, float]:
    """Train and save; returns the final metrics."""
    stage = cast(DpoStage, context.spec.stage)
    with distributed.start(context.spec.resources, always_group=True) as ranks:
        pairs = read_pairs(context.input("data") / "data")
        model, tokenizer = existing_model(context, stage.model, stage, ranks)
        return fit(
            context,
            stage,
            ranks,
            loss=PreferenceLoss(model, beta=stage.beta, label_smoothing=stage.label_smoothing),
            model=model,
            tokenizer=tokenizer,
            encoded=encode_pairs(tokenizer, pairs, stage.max_length),
            collation=PAIRS,
        )
