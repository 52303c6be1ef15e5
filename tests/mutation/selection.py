"""Which parity tests can notice a mutant: those that import its module, directly or through others."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

_SLOW = ("test_allocation.py", "test_allocation_properties.py")


@functools.cache
def tests_of(module: str, tests: Path, root: Path) -> tuple[str, ...]:
    """Files of the folder `tests` that reach `module`: those that import it first, then by cost."""
    direct = {path: set(_imports(path)) for path in sorted(tests.glob("test_*.py"))}
    # One file finds its modules by name while it runs.
    reached = {
        path: {*names, *_closure(names, root)} for path, names in direct.items() if path.name != "test_public_names.py"
    }
    chosen = [path for path, names in reached.items() if module in names]
    chosen.sort(key=lambda path: (module not in direct[path], path.name in _SLOW, path.name))
    return tuple(str(path) for path in [*chosen, tests / "test_public_names.py"])


def _closure(names: set[str], root: Path) -> set[str]:
    seen: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        seen.add(name)
        path = root / Path(*name.split(".")).with_suffix(".py")
        if path.exists():
            waiting |= set(_imports(path)) - seen
    return seen


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module
                yield from (f"{module}.{alias.name}" for alias in names)
