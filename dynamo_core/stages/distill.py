"""Distillation: a student learns a teacher's token distribution on the demonstrations."""

from __future__ import annotations

from typing import cast

from dynamo_core.config.stages import DistillStage
from dynamo_core.errors import RecipeError
from dynamo_core.stages.context import StageContext
from dynamo_core.stages.supervised import demonstrations_of, fit, start_model
from dynamo_core.training import distributed
from dynamo_core.training.models import DTYPES, load_model, load_tokenizer, require_rows
from dynamo_core.training.policy import require_packing
from dynamo_core.training.supervised import DistillationLoss, encode_rows, tokens


def run(context: StageContext) -> dict[str, float]:
    """Train and save the student; returns the final metrics."""
    stage = cast(DistillStage, context.spec.stage)
    with distributed.start(context.spec.resources, always_group=True) as ranks:
        demonstrations = demonstrations_of(context)
        teacher_folder = context.input("teacher") / "model"
        student, tokenizer = start_model(context, stage, ranks, demonstrations, tokenizer_from=teacher_folder)
        _check_vocabulary(tokenizer.get_vocab(), load_tokenizer(teacher_folder).get_vocab())
        teacher = load_model(teacher_folder, dtype=DTYPES[stage.engine.precision], device=ranks.device).eval()
        require_rows(teacher, tokenizer, teacher_folder)
        require_packing(student, stage.batching)
        require_packing(teacher, stage.batching)
        loss = DistillationLoss(student, teacher, temperature=stage.temperature, kl_weight=stage.kl_weight)
        return fit(
            context,
            stage,
            ranks,
            loss=loss,
            model=student,
            tokenizer=tokenizer,
            encoded=encode_rows(tokenizer, demonstrations, stage.max_length),
            collation=tokens(stage.batching),
        )


def _check_vocabulary(student: dict[str, int], teacher: dict[str, int]) -> None:
    """Token distributions compare only over one vocabulary (TRL#2215).

    Raises:
        RecipeError: the tokenizers differ.
    """
    if student != teacher:
        differing = len(set(student.items()) ^ set(teacher.items()))
        raise RecipeError(
            f"student and teacher tokenizers differ in {differing} entries", "distil between models of one tokenizer"
        )
