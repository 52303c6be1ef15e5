"""`--set a.b=value`: changes to a recipe before presets are filled in and the schema checks it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from dynamo_core.config.strict_yaml import parse_yaml
from dynamo_core.errors import RecipeError


def apply_overrides(recipe: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `recipe` with every `path=value` set, in order. Values follow the rules of the recipe file.

    A key that the file leaves out may be set: the schema decides whether it exists. A stage must be in the file.

    Raises:
        RecipeError: no `=`, a bad value, an unknown stage, or a path through something that is no mapping.
    """
    changed = recipe
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise RecipeError(f"--set {override!r}: write it as key=value, for example stages.sft.steps=50")
        _check_stage(recipe, keys, override)
        changed = _with_value(changed, keys, parse_yaml(text, f"--set {override!r}"), override)
    return changed


def _check_stage(recipe: dict[str, Any], keys: list[str], override: str) -> None:
    stages = recipe.get("stages")
    if keys[0] != "stages" or len(keys) == 1 or not isinstance(stages, dict) or keys[1] in stages:
        return
    names = [str(name) for name in stages]
    near = difflib.get_close_matches(keys[1], names, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(names)}"
    raise RecipeError(f"--set {override!r}: the recipe has no stage '{keys[1]}'; {hint}")


def _with_value(node: dict[str, Any], keys: list[str], value: Any, override: str) -> dict[str, Any]:
    """A copy of `node` with the value at `keys`; mappings on the way are made where they are missing or null."""
    key, rest = keys[0], keys[1:]
    if not rest:
        return {**node, key: value}
    child = node.get(key)
    if child is None:
        child = {}
    if not isinstance(child, dict):
        raise RecipeError(f"--set {override!r}: '{key}' is {child!r}, which has no keys")
    return {**node, key: _with_value(child, rest, value, override)}
