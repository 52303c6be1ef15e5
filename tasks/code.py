"""The code digest of a stage: what its cache key knows about the program.

It covers the syntax trees, without comments and docstrings, of every module inside dynamo_core that the stage's
module imports, also inside functions and at any distance. Nothing is imported to find out, so torch stays unloaded.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dynamo_core

PACKAGE = "dynamo_core"
ROOT = Path(dynamo_core.__file__).parent.parent
"""The folder that holds the package: what PYTHONPATH needs."""


class _WithoutDocstrings(ast.NodeTransformer):
    """Drops every statement that is only a string: docstrings, and those under a field."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else node


@dataclass(frozen=True)
class _Module:
    """What one source file says: the digest of its syntax tree, and every module that it may import."""

    digest: str
    imports: tuple[str, ...]


def code_digest(module: str, root: Path = ROOT) -> str:
    """sha256 over the static import closure of `module` inside its top-level package.

    Args:
        root: the folder that holds the package.
    """
    digests = {name: _read(name, root).digest for name in closure(module, root)}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def closure(module: str, root: Path = ROOT) -> set[str]:
    """`module`, all that it imports from its own top-level package, and the packages around them."""
    top = module.partition(".")[0]
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if "." in name:
            waiting.append(name.rpartition(".")[0])  # importing a.b.c runs a and a.b first
        for other in _read(name, root).imports:
            if other.partition(".")[0] == top and _source(other, root).is_file():
                waiting.append(other)
    return found


def _source(name: str, root: Path) -> Path:
    """The file of module `name`: its package's __init__.py where it is a package."""
    path = root.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@functools.cache
def _read(name: str, root: Path) -> _Module:
    path = _source(name, root)
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imports = tuple(_imports(tree, package))
    dump = ast.dump(_WithoutDocstrings().visit(tree))
    return _Module(hashlib.sha256(dump.encode()).hexdigest(), imports)


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Names imported anywhere in `tree`; of `from a import b` both a and a.b, as b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _base(node: ast.ImportFrom, package: str) -> str:
    """The absolute name of what is imported from."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    parents = parts[: len(parts) - node.level + 1]
    return ".".join([*parents, node.module] if node.module else parents)
