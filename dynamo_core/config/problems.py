"""What the schema refused, as one line: the path in the file, the value, what is allowed, the nearest valid key."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dynamo_core.config.recipe import Recipe

_ORDER: Final = {"extra_forbidden": 0, "missing": 2}
"""A misspelt key also leaves its right name missing, so say the former; an unknown preset leaves much missing."""
_SHOWN: Final = 60
_BOUNDS: Final = {
    annotated_types.Ge: ">=",
    annotated_types.Gt: ">",
    annotated_types.Le: "<=",
    annotated_types.Lt: "<",
}

Location = tuple[int | str, ...]


def describe(error: ValidationError, content: Mapping[str, Any]) -> str:
    """The first problem in `error` in words, and how many there are besides.

    Args:
        content: the mapping that was validated.
    """
    details = sorted(error.errors(include_url=False), key=lambda item: _ORDER.get(item["type"], 1))
    groups: dict[str, list[ErrorDetails]] = {}
    for item in details:
        groups.setdefault(_path(item, content), []).append(item)
    path, first = next(iter(groups.items()))
    given = f"is {_show(first[0]['input'])}, "
    texts = [_explain(item) for item in first]  # several only for a union, whose members all refused the value
    text = " or ".join([texts[0], *(other.removeprefix(given) for other in texts[1:])])
    more = len(groups) - 1
    rest = f" (and {more} more problem{'s' * (more > 1)})" if more else ""
    return f"{path}{': ' if path else ''}{text}{rest}"


def _path(item: ErrorDetails, content: Mapping[str, Any]) -> str:
    """Where in the file it is. pydantic's location also names union members, which are not keys: they are left out."""
    found: list[str] = []
    node: Any = content
    for part in item["loc"]:
        in_list = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if in_list or (isinstance(node, dict) and part in node):
            node = node[part]
            found.append(str(part))
    if item["type"] == "missing":
        found.append(str(item["loc"][-1]))
    if item["type"] in ("union_tag_invalid", "union_tag_not_found"):
        found.append("type")
    return ".".join(found)


def _explain(item: ErrorDetails) -> str:
    """One problem in words, without its path."""
    given, context, expected = item["input"], item.get("ctx", {}), _annotation(item["loc"])
    match item["type"]:
        case "extra_forbidden":
            text = f"unknown key; {_nearest_key(item['loc'])}"
        case "missing":
            text = "is required"
        case "union_tag_not_found":
            text = f"is required, one of {', '.join(_tags(expected))}"
        case "union_tag_invalid":
            text = f"is {_show(given['type'])}, {_nearest(str(given['type']), _tags(expected))}"
        case "literal_error":
            text = f"is {_show(given)}, {_nearest(str(given), [str(value) for value in _literals(expected)])}"
        case "value_error":
            text = str(context["error"])
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            text = f"is {_show(given)}, must be {_range(expected)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            text = f"is {_show(given)}, should be a mapping of keys"
        case "too_short":
            text = "must not be empty"
        case _:
            text = f"is {_show(given)}, {item['msg'].removeprefix('Input ').removeprefix('String ')}"
    return text


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _nearest(given: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(given, allowed, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{hint}allowed: {', '.join(allowed)}"


def _nearest_key(loc: Location) -> str:
    """The valid key that was probably meant: at the same place, else of the same name elsewhere."""
    given = str(loc[-1])
    owner = _annotation(loc[:-1])
    keys = list(owner.model_fields) if isinstance(owner, type) and issubclass(owner, BaseModel) else []
    near = difflib.get_close_matches(given, keys, n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    elsewhere = [path for path in _all_paths(Recipe) if path.rpartition(".")[2] == given]
    if elsewhere:
        return f"'{given}' belongs under {elsewhere[0].rpartition('.')[0] or 'the top level'}"
    return f"allowed: {', '.join(keys)}"


def _annotation(loc: Location) -> Any:
    """The type that the schema has at pydantic's location `loc`, bounds included."""
    found: Any = Recipe
    for part in loc:
        found = _step(found, part)
    return found


def _step(annotation: Any, part: int | str) -> Any:
    for option in _options(annotation):
        bare = _bare(option)
        if isinstance(bare, type) and issubclass(bare, BaseModel):
            if part in _tags(bare):
                return bare
            if part in bare.model_fields:
                return _field(bare.model_fields[str(part)])
        elif typing.get_origin(bare) is dict:
            return typing.get_args(bare)[1]
        elif typing.get_origin(bare) is tuple and isinstance(part, int):
            members = typing.get_args(bare)
            return members[0] if members[-1] is Ellipsis or part >= len(members) else members[part]
    return annotation  # the name of a union member that is not a model: stay where we are


def _field(field: FieldInfo) -> Any:
    return typing.Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation


def _bare(annotation: Any) -> Any:
    """`annotation` without Annotated."""
    return _bare(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is typing.Annotated else annotation


def _options(annotation: Any) -> Iterator[Any]:
    """The members of a union, at any depth, Annotated kept on each; the annotation itself where it is none."""
    bare = _bare(annotation)
    if typing.get_origin(bare) in (typing.Union, types.UnionType):
        for member in typing.get_args(bare):
            yield from _options(member)
    else:
        yield annotation


def _tags(annotation: Any) -> list[str]:
    """Values of `type` that choose a member of a tagged union."""
    found: list[str] = []
    for option in _options(annotation):
        bare = _bare(option)
        if isinstance(bare, type) and issubclass(bare, BaseModel) and "type" in bare.model_fields:
            found.extend(str(value) for value in _literals(bare.model_fields["type"].annotation))
    return found


def _literals(annotation: Any) -> list[Any]:
    return [
        value
        for option in _options(annotation)
        if typing.get_origin(_bare(option)) is Literal
        for value in typing.get_args(_bare(option))
    ]


def _range(annotation: Any) -> str:
    """The bounds on a number, for example `>= 0 and <= 2`."""
    found: list[str] = []
    for option in _options(annotation):
        if typing.get_origin(option) is not typing.Annotated:
            continue
        for note in typing.get_args(option)[1:]:
            for bound in note.metadata if isinstance(note, FieldInfo) else [note]:
                for kind, sign in _BOUNDS.items():
                    if isinstance(bound, kind):
                        found.append(f"{sign} {getattr(bound, kind.__name__.lower()):g}")
    return " and ".join(found)


def _all_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every path of the schema, with `*` for the name of a stage."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        for option in _options(field.annotation):
            bare = _bare(option)
            inner, step = bare, "."
            if typing.get_origin(bare) is dict:
                inner, step = typing.get_args(bare)[1], ".*."
            for member in _options(inner):
                kind = _bare(member)
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    yield from _all_paths(kind, f"{path}{step}")
