"""Every mutant of a folder, and the fixed random sample of them. The operators are cosmic-ray's.

Only replacements within a family count (arithmetic, bits, order, identity): `/` -> `<<` on floats is a
TypeError that any test notices, and would flatter the figure.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation import counted

SEED = "dynamo"
_FAMILIES = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"BitOr", "BitAnd", "BitXor"},
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"},
    {"Is", "IsNot"},
)
_OTHERS = {
    "AddNot", "NumberReplacer", "RemoveDecorator", "ReplaceAndWithOr", "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak", "ReplaceFalseWithTrue", "ReplaceOrWithAnd", "ReplaceTrueWithFalse",
    "ReplaceUnaryOperator_Delete_Invert", "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub",
    "ZeroIterationForLoop",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file. `name` (file, function, operator, occurrence) survives edits elsewhere."""

    name: str
    path: Path
    operator: str
    occurrence: int  # in the file, as cosmic-ray counts

    def source(self) -> str:
        """The mutated text of the file."""
        from cosmic_ray.mutating import mutate_code

        text = mutate_code(self.path.read_text(encoding="utf-8"), _operators()[self.operator](), self.occurrence)
        return str(text)

    def change(self) -> str:
        """The lines taken and put, for people."""
        before = self.path.read_text(encoding="utf-8").splitlines()
        lines = list(difflib.unified_diff(before, self.source().splitlines(), lineterm="", n=0))
        where = re.search(r"-(\d+)", lines[2])
        return "\n".join([f"{self.path.name}:{where[1] if where else '?'}", *lines[3:]])


def wanted(operator: str) -> bool:
    """Whether an operator of cosmic-ray counts here."""
    kind, *names = operator.split("_")
    if kind in ("ReplaceBinaryOperator", "ReplaceComparisonOperator"):
        return any(family.issuperset(names) for family in _FAMILIES)
    return operator in _OTHERS


def enumerate_mutants(folder: Path) -> list[Mutant]:
    """All mutants of the folder's files, sorted by name."""
    found = itertools.chain.from_iterable(_of_file(path) for path in sorted(folder.glob("*.py")))
    return sorted(found, key=lambda mutant: mutant.name)


def sample(mutants: list[Mutant], size: int) -> list[Mutant]:
    """`size` of the mutants by the hash of seed and name: an edit changes only the mutants that it touches."""
    ranked = sorted(mutants, key=lambda mutant: rank(mutant.name))
    return list(itertools.islice((mutant for mutant in ranked if _changes(mutant)), size))


def rank(name: str) -> str:
    """The place of a name in the random order."""
    return hashlib.sha256(f"{SEED} {name}".encode()).hexdigest()


def _changes(mutant: Mutant) -> bool:
    """False for a mutant that does not compile, or says the same in other words."""
    try:
        mutated = ast.dump(ast.parse(mutant.source()))
    except SyntaxError:
        return False
    return mutated != ast.dump(ast.parse(mutant.path.read_text(encoding="utf-8")))


def _operators() -> dict[str, type]:
    import parso.python.tree  # noqa: F401  (else cosmic-ray meets parso's circular import)
    from cosmic_ray.operators.provider import _OPERATORS

    return {name: operator for name, operator in _OPERATORS.items() if wanted(name)}


def _of_file(path: Path) -> Iterator[Mutant]:
    operators = _operators()
    from cosmic_ray.ast import ast_nodes, get_ast

    text = path.read_text(encoding="utf-8")
    source, nodes = counted.read(text), list(ast_nodes(get_ast(text)))
    for operator, make in operators.items():
        change, seen = make(), Counter[str]()
        positions = ((start, node) for node in nodes for start, _ in change.mutation_positions(node))
        for occurrence, (start, node) in enumerate(positions):
            if not source.counts(start):
                continue
            function = source.function(start[0])
            name = f"{path.stem}.{function} {operator} {seen[function]}"
            seen[function] += 1
            if not _bare_star(node):
                yield Mutant(name, path, operator, occurrence)


def _bare_star(node: Any) -> bool:
    """The `*` before keyword-only parameters, which cosmic-ray takes for a product."""
    return bool(node.type == "operator" and node.value == "*" and node.parent.type in ("param", "parameters"))
