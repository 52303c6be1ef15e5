"""What a run would do: each stage, whether its result is there, and how large it is. Runs and imports nothing heavy."""

from __future__ import annotations

from dynamo_core.config.recipe import Recipe
from dynamo_core.errors import RecipeError
from tasks.cache import Hit, look_up, stage_key
from tasks.estimate import model_of, parameter_count, training_bytes
from tasks.launch import process_count
from tasks.preflight import preflight
from tasks.report import plain_table, size
from tasks.store import Store
from tasks.terminal import out, say

_MEGABYTE = 1_000_000


def print_plan(recipe: Recipe, store: Store) -> None:
    """Print one line a stage, and what would keep the recipe from starting on this machine."""
    table = plain_table(
        f"{recipe.name}, store {store.root}", ["stage", "type", "processes", "model", "memory/rank", "state"]
    )
    for name, state in _states(recipe, store).items():
        model, memory = model_of(recipe, name), training_bytes(recipe, name)
        table.add_row(
            name,
            recipe.stages[name].type,
            str(process_count(recipe.stages[name])),
            "" if model is None else size(parameter_count(model)),
            "" if memory is None else f">= {memory / _MEGABYTE:.0f} MB",
            state,
        )
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    out.print(table)
    try:
        preflight(recipe)
    except RecipeError as error:
        say(f"it would not start here: {error}")


def _states(recipe: Recipe, store: Store) -> dict[str, str]:
    """Stage -> `cached`, or why it would run."""
    states: dict[str, str] = {}
    digests: dict[str, str] = {}
    for name in recipe.stages:
        inputs = recipe.inputs(name)
        if not digests.keys() >= set(inputs.values()):
            states[name] = "inputs not computed yet"
            continue
        try:
            key = stage_key(recipe, name, {role: digests[producer] for role, producer in inputs.items()})
        except RecipeError as error:
            states[name] = str(error)
            continue
        found = look_up(store, name, key)
        if isinstance(found, Hit):
            digests[name] = found.manifest.payload_digest
            own = found.folder == store.stage_folder(name, key)
            states[name] = "cached" if own else f"cached as {found.folder.name}"
        else:
            states[name] = found.reason
    return states
