"""What can be known to fail before anything starts: the machine, files, models and the store."""

from __future__ import annotations

import os
from pathlib import Path

from dynamo_core.config.base import Resources
from dynamo_core.config.data import MessagesSource
from dynamo_core.config.models import PretrainedModel
from dynamo_core.config.recipe import MODEL_STAGES, Recipe
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.config.stages import PrepareDataStage, Stage, SupervisedStage
from dynamo_core.errors import RecipeError
from dynamo_core.training.quantisation import require_quantisation
from tasks.launch import resources_of


def preflight(recipe: Recipe) -> None:
    """Check that this machine can do what the resolved recipe asks.

    Raises:
        RecipeError: it cannot; the first reason.
    """
    for name, stage in recipe.stages.items():
        where = f"stages.{name}"
        _check_resources(f"{where}.resources", resources_of(stage))
        _check_ranks(where, stage)
        if isinstance(stage, PrepareDataStage) and isinstance(stage.source, MessagesSource):
            _check_data(f"{where}.source.path", stage.source.path)
        if isinstance(stage, MODEL_STAGES) and isinstance(stage.model, PretrainedModel):
            _check_model(f"{where}.model.path", stage.model.path)
        if isinstance(stage, MODEL_STAGES) and stage.lora is not None and stage.lora.quantisation:
            gpu = gpu_count() > 0 and resources_of(stage).device != "cpu"
            require_quantisation(f"{where}.lora.quantisation", gpu=gpu)


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpu_count() -> int:
    """NVIDIA GPUs that a stage process would see; found without torch, which takes seconds to load."""
    present = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    return min(present, len([entry for entry in chosen.split(",") if entry.strip() not in ("", "-1")]))


def _check_resources(where: str, resources: Resources) -> None:
    gpus, cores, processes = gpu_count(), core_count(), resources.processes
    if resources.device == "cuda" and not gpus:
        raise RecipeError(f"{where}.device: is cuda, but this machine has no GPU", "use auto or cpu")
    if resources.device != "cpu" and gpus:
        if processes > gpus:
            raise RecipeError(f"{where}.processes: is {processes}, but this machine has {gpus} GPUs")
    elif processes * resources.threads > cores:
        raise RecipeError(
            f"{where}: processes x threads is {processes} x {resources.threads} ="
            f" {processes * resources.threads}, but this machine has {cores} cores"
        )


def _check_ranks(where: str, stage: Stage) -> None:
    """Shares may be uneven, none may be empty: such a rank would only wait for the others."""
    if isinstance(stage, ReinforceStage):
        key, rows = "prompts_per_step", stage.prompts_per_step
    elif isinstance(stage, SupervisedStage):
        key, rows = "batch_size", stage.batch_size
    else:
        return
    processes = resources_of(stage).processes
    if processes > rows:
        *_, second, first = [0, *(count for count in range(1, rows + 1) if rows % count == 0)]
        nearest = f"{second} or {first}" if second else f"{first}"
        raise RecipeError(
            f"{where}.resources.processes: is {processes}, but {key} is {rows}: some ranks would get nothing",
            f"use {nearest} processes, which divide it, or raise {key}",
        )


def _check_data(where: str, given: str) -> None:
    path = Path(given).expanduser()
    if not path.is_file():
        raise RecipeError(f"{where}: there is no file {given}", f"relative to {Path.cwd()}")
    if path.stat().st_size == 0:
        raise RecipeError(f"{where}: {given} is empty")
    if not os.access(path, os.R_OK):
        raise RecipeError(f"{where}: {given} cannot be read", "check its permissions")


def _check_model(where: str, given: str) -> None:
    path = Path(given).expanduser()
    if path.is_dir():
        if (path / "adapter_config.json").is_file():
            raise RecipeError(
                f"{where}: {given} holds an adapter, not a whole model", "give the folder of the merged model"
            )
        if not (path / "config.json").is_file():
            raise RecipeError(f"{where}: {given} is no model folder: it has no config.json")
        return
    looks_local = given.startswith(("/", ".", "~")) or given.count("/") != 1 or Path(given).parts[0] in os.listdir()
    if looks_local:
        raise RecipeError(f"{where}: there is no model at {given}", "give a model folder or a hub id such as org/name")
    # Here, as most recipes name no hub model.
    from huggingface_hub import constants, try_to_load_from_cache  # noqa: PLC0415

    if constants.is_offline_mode() and not isinstance(try_to_load_from_cache(given, "config.json"), str):
        raise RecipeError(
            f"{where}: {given} is not in the local hub cache and HF_HUB_OFFLINE is set", "download it first"
        )
