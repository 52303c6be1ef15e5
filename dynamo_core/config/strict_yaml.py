"""YAML without surprises: 5e-6 is a number, only true and false are booleans, dates stay text, keys appear once.

PyYAML follows YAML 1.1, where 5e-6 is text, `on` is true, 010 is eight and 12:30 is 750. The loader and the dumper
here share the YAML 1.2 core rules, so that what is dumped reads back as the same values.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any, Final

import yaml

from dynamo_core.errors import RecipeError

_RULES: Final = (
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?[0-9]+$"), list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
    ("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"]),
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with the rules above and no repeated keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own name)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        first: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                text = self.construct_object(key) if isinstance(key, yaml.ScalarNode) else "a collection"
                raise yaml.constructor.ConstructorError(None, None, f"key {text!r} must be text", key.start_mark)
            if key.value in first:
                line = first[key.value].line + 1
                problem = f"key '{key.value}' is given twice, first in line {line}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            first[key.value] = key.start_mark
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes whatever text the loader would take for something else."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True  # equal values are written out, never as anchors


for _tag, _pattern, _first in _RULES:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def parse_yaml(text: str, source: str) -> Any:
    """The value that `text` holds.

    Args:
        source: what to call the text in an error: a file name or an option.

    Raises:
        RecipeError: bad YAML, with line and column.
    """
    try:
        return yaml.load(text, _Loader)  # noqa: S506 (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        raise RecipeError(f"{source}{where}: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(f"{source}, line {line}: character #x{error.character:04x} is not allowed") from error
    except RecursionError as error:
        raise RecipeError(f"{source}: nested too deeply") from error
    except ValueError as error:  # a tag with a value it cannot hold (`!!int x`), or more digits than int() takes
        raise RecipeError(f"{source}: {error}") from error


def dump_yaml(value: Any) -> str:
    """`value` as YAML text that `parse_yaml` reads back as an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
