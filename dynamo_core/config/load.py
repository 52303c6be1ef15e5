"""From a YAML file to a checked, resolved recipe, and back.

    recipe = load_recipe(Path("configs/quickstart.yaml"), ["stages.reinforce.steps=50"])

Strict YAML, then overrides, then presets and shared resources, then the schema.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dynamo_core.config.overrides import apply_overrides
from dynamo_core.config.presets import with_preset
from dynamo_core.config.problems import describe
from dynamo_core.config.recipe import Recipe
from dynamo_core.config.strict_yaml import dump_yaml, parse_yaml
from dynamo_core.errors import RecipeError


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The resolved recipe in `path`, with `overrides` (`a.b=value`) applied first.

    Raises:
        RecipeError: no such file, not YAML, or anything that the schema refuses: one line that says what and where.
    """
    content = parse_yaml(_read(path), str(path))
    if content is None:
        raise RecipeError(f"{path}: the file is empty", "a recipe needs at least 'name' and 'stages'")
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys, not {type(content).__name__}")
    return parse_recipe(apply_overrides(content, overrides), str(path))


def parse_recipe(content: dict[str, Any], source: str) -> Recipe:
    """The resolved recipe that `content` describes; `source` names it in errors.

    Raises:
        RecipeError: the schema refuses it.
    """
    filled = _filled(content)
    try:
        text = json.dumps(filled)
    except (ValueError, TypeError) as error:  # a value that holds itself through an anchor, or a tagged type
        raise RecipeError(f"{source}: holds what a recipe cannot hold: {error}") from error
    try:
        # The schema is strict. Its JSON side accepts lists for tuples, as YAML has no others.
        return Recipe.model_validate_json(text).resolved()
    except ValidationError as error:
        raise RecipeError(f"{source}: {describe(error, filled)}") from error


def dump_recipe(recipe: Recipe) -> str:
    """`recipe` as YAML that loads back equal."""
    return dump_yaml(recipe.model_dump(mode="json"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"cannot read recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not UTF-8 text (byte {error.start})") from error


def _filled(content: dict[str, Any]) -> dict[str, Any]:
    """`content` with each stage's omitted switches from its preset, and omitted resources from the recipe's."""
    stages, shared = content.get("stages"), content.get("resources")
    if not isinstance(stages, dict):
        return content
    return {**content, "stages": {name: _filled_stage(stage, shared) for name, stage in stages.items()}}


def _filled_stage(stage: Any, shared: Any) -> Any:
    if not isinstance(stage, dict):
        return stage
    filled = with_preset(stage) if stage.get("type") == "reinforce" else stage
    own = filled.get("resources")
    if isinstance(own, dict) and isinstance(shared, dict):
        return {**filled, "resources": {**shared, **own}}
    return filled
