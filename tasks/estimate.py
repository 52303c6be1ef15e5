"""A rough size of a stage, worked out from its configuration alone."""

from __future__ import annotations

from typing import Final

from dynamo_core.config.models import Lora, ScratchModel
from dynamo_core.config.recipe import MODEL_STAGES, Recipe
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.config.stage_base import TrainingStage
from dynamo_core.config.stages import DistillStage, DpoStage
from tasks.launch import resources_of

_TRAINING_BYTES: Final = 16
"""A parameter in training: float32 weight, gradient, AdamW's two moments. bfloat16 with float32 masters: the same."""
_WEIGHT_BYTES: Final = 4

_SHARDED: Final = {0: 0, 1: 8, 2: 12, 3: 16}
"""Of these, the bytes that ZeRO spreads over ranks: moments; gradients; weights."""


def parameter_count(model: ScratchModel) -> int:
    """Parameters of a model from scratch, input and output embeddings shared; its vocabulary may turn out smaller."""
    attention = 2 * model.width * model.head_dim * (model.heads + model.kv_heads) + 2 * model.head_dim
    layer = attention + 3 * model.width * model.ffn_width + 2 * model.width
    return model.vocab_size * model.width + model.layers * layer + model.width


def adapter_count(model: ScratchModel, lora: Lora) -> int:
    """Parameters of its adapters: rank x (inputs + outputs) of each layer that has one."""
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sides = {
        "q_proj": model.width + queries,
        "k_proj": model.width + keys,
        "v_proj": model.width + keys,
        "o_proj": model.width + queries,
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), model.width + model.ffn_width),
    }
    names = sides if lora.target_modules == "all-linear" else sides.keys() & set(lora.target_modules)
    return model.layers * lora.rank * sum(sides[name] for name in names)


def model_of(recipe: Recipe, name: str) -> ScratchModel | None:
    """The model from scratch that stage `name` trains, perhaps begun by an earlier stage; None for a pretrained one."""
    stage = recipe.stages[name]
    if isinstance(stage, MODEL_STAGES) and stage.model is not None:
        return stage.model if isinstance(stage.model, ScratchModel) else None
    if isinstance(stage, MODEL_STAGES) and stage.model_from:
        return model_of(recipe, stage.model_from)
    return None


def training_bytes(recipe: Recipe, name: str) -> int | None:
    """Bytes a rank needs for weights, gradients and optimizer, activations not counted; None where it is unknown."""
    stage, model = recipe.stages[name], model_of(recipe, name)
    if model is None or not isinstance(stage, TrainingStage):
        return None
    frozen = 0 if stage.lora is None else parameter_count(model)
    parameters = parameter_count(model) if stage.lora is None else adapter_count(model, stage.lora)
    ranks = resources_of(stage).processes
    trained = parameters * (_TRAINING_BYTES - _SHARDED[stage.engine.zero_stage])
    trained += parameters * _SHARDED[stage.engine.zero_stage] // ranks
    total = frozen * _WEIGHT_BYTES + trained
    if isinstance(stage, ReinforceStage):
        total += 0 if stage.critic is None else trained
        copies = (stage.kl is not None and stage.lora is None) + (stage.engine.zero_stage == 3)
        total += copies * parameters * _WEIGHT_BYTES  # the reference, and the whole policy that rollouts need
    if isinstance(stage, DistillStage) and stage.teacher_from:
        teacher = model_of(recipe, stage.teacher_from)
        total += 0 if teacher is None else parameter_count(teacher) * _WEIGHT_BYTES
    if isinstance(stage, DpoStage):
        total += parameters * _WEIGHT_BYTES  # the reference
    return total
