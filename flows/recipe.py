"""The staged recipe as a Prefect flow: one cached task a stage, in the recipe's order."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from prefect import flow

from dynamo_core.config.load import dump_recipe, parse_recipe
from dynamo_core.files import write_atomically
from flows.servers import tracking_target
from tasks.cache import StageReference, stage_key
from tasks.distill import distill
from tasks.dpo import dpo
from tasks.evaluate import evaluate
from tasks.outbox import Tracker
from tasks.preflight import preflight
from tasks.prepare_data import prepare_data
from tasks.reinforce import reinforce
from tasks.sft import sft
from tasks.stage import Session, StageFunction
from tasks.store import Store

TASKS: Final[dict[str, StageFunction]] = {
    "prepare_data": prepare_data,
    "sft": sft,
    "distill": distill,
    "dpo": dpo,
    "reinforce": reinforce,
    "evaluate": evaluate,
}


@flow(name="recipe", flow_run_name="{recipe[name]}-{run_id}", persist_result=False)
def recipe_flow(recipe: dict[str, Any], store: str, run_id: str) -> dict[str, dict[str, Any]]:
    """Run every stage of `recipe` that has no verified result yet; returns each stage's reference.

    Args:
        recipe: the content of a recipe file, perhaps resolved already.
        store: the folder that everything goes into.
        run_id: names this run in the store and in MLflow.

    Raises:
        DynamoError: the recipe is refused or a stage failed; one line says why.
    """
    parsed, place = parse_recipe(recipe, "recipe"), Store(Path(store))
    preflight(parsed)
    place.prepare()
    place.run_folder(run_id).mkdir(exist_ok=True)
    write_atomically(place.run_folder(run_id) / "recipe.yaml", dump_recipe(parsed))
    with Tracker(place, parsed, run_id, tracking_target(place)) as tracker:
        session = Session(place, parsed, tracker)
        done: dict[str, StageReference] = {}
        for name, stage in parsed.stages.items():
            inputs = {role: done[producer] for role, producer in parsed.inputs(name).items()}
            key = stage_key(parsed, name, {role: reference.payload_digest for role, reference in inputs.items()})
            folders = {role: reference.folder for role, reference in inputs.items()}
            state = TASKS[stage.type](session, name, key, folders)
            done[name] = StageReference.model_validate(state.result())
    return {name: reference.model_dump(mode="json") for name, reference in done.items()}
