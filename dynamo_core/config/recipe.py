"""A recipe: an ordered mapping of stages, and the references between them."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from dynamo_core.config.base import Frozen, NonNegativeInt, Resources
from dynamo_core.config.models import ScratchModel
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.config.stages import DistillStage, DpoStage, EvaluateStage, PrepareDataStage, SftStage, Stage

StageName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
MODEL_STAGES = (SftStage, DistillStage, DpoStage, ReinforceStage)
_CONTINUING = (DpoStage, ReinforceStage)
"""Stages that go on from the latest model where the recipe names none."""


class Recipe(Frozen):
    """One staged run. Every reference is explicit after `resolved()`."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,79}$")]
    description: str = ""
    seed: NonNegativeInt = 0
    resources: Resources = Resources()
    stages: Annotated[dict[StageName, Stage], Field(min_length=1)]

    @model_validator(mode="after")
    def _references_hold(self) -> Self:
        for name, stage in self.stages.items():
            if name == "data" and not isinstance(stage, PrepareDataStage):
                raise ValueError("stages.data: this name is kept for a prepare_data stage")  # a role of `inputs`
            _check_stage(self, name, stage)
        return self

    def resolved(self) -> Recipe:
        """This recipe with each omitted reference and each stage's resources written out."""
        stages = {name: _resolve_stage(self, name, stage) for name, stage in self.stages.items()}
        return self.model_copy(update={"stages": stages})

    def inputs(self, name: str) -> dict[str, str]:
        """Input role -> producing stage, for a stage of a resolved recipe.

        Roles are `data`, `model`, `teacher`, and one role per model for evaluate stages: the producer's name.
        """
        stage = self.stages[name]
        found: dict[str, str] = {}
        if isinstance(stage, (*MODEL_STAGES, EvaluateStage)) and stage.data_from:
            found["data"] = stage.data_from
        if isinstance(stage, MODEL_STAGES) and stage.model_from:
            found["model"] = stage.model_from
        if isinstance(stage, DistillStage) and stage.teacher_from:
            found["teacher"] = stage.teacher_from
        if isinstance(stage, EvaluateStage) and stage.models_from:
            found.update({model: model for model in stage.models_from})
        return found


def _earlier(recipe: Recipe, name: str, kinds: type | tuple[type, ...]) -> list[str]:
    """Names of the stages before `name` that are of `kinds`, in order."""
    names = list(recipe.stages)
    return [other for other in names[: names.index(name)] if isinstance(recipe.stages[other], kinds)]


def _check_reference(recipe: Recipe, name: str, field: str, target: str | None, kinds: tuple[type, ...]) -> None:
    candidates = _earlier(recipe, name, kinds)
    if target is None and not candidates:
        raise ValueError(f"stages.{name}.{field}: no earlier stage produces what it needs")
    if target is not None and target not in candidates:
        raise ValueError(f"stages.{name}.{field}: '{target}' is not one of the earlier stages {candidates}")


def _check_stage(recipe: Recipe, name: str, stage: Stage) -> None:
    if isinstance(stage, PrepareDataStage):
        return
    _check_reference(recipe, name, "data_from", stage.data_from, (PrepareDataStage,))
    _check_data(recipe, name, stage)
    if isinstance(stage, EvaluateStage):
        for target in stage.models_from or (None,):
            _check_reference(recipe, name, "models_from", target, MODEL_STAGES)
        return
    if isinstance(stage, DistillStage):
        _check_reference(recipe, name, "teacher_from", stage.teacher_from, MODEL_STAGES)
    if isinstance(stage, _CONTINUING) and stage.model is None:
        _check_reference(recipe, name, "model_from", stage.model_from, MODEL_STAGES)
    elif (stage.model is None) == (stage.model_from is None):
        raise ValueError(
            f"stages.{name}: give exactly one of 'model' (a new start) and 'model_from' (an earlier stage)"
        )
    elif stage.model_from is not None:
        _check_reference(recipe, name, "model_from", stage.model_from, MODEL_STAGES)
    if stage.lora is not None and isinstance(stage.model, ScratchModel):
        raise ValueError(f"stages.{name}.lora: adapters need a trained model: one from scratch would stay random")


def _check_data(recipe: Recipe, name: str, stage: Stage) -> None:
    """What the data stage's own numbers already rule out."""
    source = recipe.stages[getattr(stage, "data_from", None) or _earlier(recipe, name, PrepareDataStage)[-1]]
    assert isinstance(source, PrepareDataStage)
    if isinstance(stage, ReinforceStage) and source.rl_prompts and source.rl_prompts < stage.prompts_per_step:
        raise ValueError(
            f"stages.{name}.prompts_per_step ({stage.prompts_per_step}) must not exceed"
            f" the data stage's rl_prompts ({source.rl_prompts})"
        )
    if isinstance(stage, EvaluateStage) and not getattr(source.split, stage.split):
        raise ValueError(f"stages.{name}.split: the data stage gives no rows to '{stage.split}'")
    if not isinstance(stage, (SftStage, DistillStage)) or not isinstance(stage.model, ScratchModel):
        return
    if stage.max_length > stage.model.context:
        raise ValueError(
            f"stages.{name}.max_length ({stage.max_length}) must not exceed model.context ({stage.model.context})"
        )


def _resolve_stage(recipe: Recipe, name: str, stage: Stage) -> Stage:
    update: dict[str, object] = {"resources": stage.resources or recipe.resources}
    if not isinstance(stage, PrepareDataStage):
        update["data_from"] = stage.data_from or _earlier(recipe, name, PrepareDataStage)[-1]
    models = _earlier(recipe, name, MODEL_STAGES)
    if isinstance(stage, EvaluateStage):
        update["models_from"] = stage.models_from or tuple(models)
    if isinstance(stage, DistillStage):
        update["teacher_from"] = stage.teacher_from or models[-1]
    if isinstance(stage, _CONTINUING) and stage.model is None:
        update["model_from"] = stage.model_from or models[-1]
    return stage.model_copy(update=update)
