"""Which places of a source count: code that computes, not the text around it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Position = tuple[int, int]  # line from 1, column from 0
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """Spans of a file: what does not count, and who owns a line."""

    ignored: tuple[tuple[Position, Position], ...]
    functions: tuple[tuple[int, int, str], ...]

    def counts(self, start: Position) -> bool:
        """False in docstrings, annotations, `__all__`, imports and the texts of error messages."""
        return not any(first <= start < last for first, last in self.ignored)

    def function(self, line: int) -> str:
        """Qualified name of the innermost function or class around the line, or "module"."""
        around = [(first, name) for first, last, name in self.functions if first <= line <= last]
        return max(around)[1] if around else "module"


def read(source: str) -> Source:
    """The spans of a Python source."""
    tree = ast.parse(source)
    ignored = tuple(_span(node) for node in _ignored(tree))
    return Source(ignored, tuple(_functions(tree, "")))


def _span(node: ast.expr | ast.stmt) -> tuple[Position, Position]:
    last = (node.end_lineno or node.lineno, node.end_col_offset or node.col_offset)
    return (node.lineno, node.col_offset), last


def _ignored(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node
            case ast.Expr(value=ast.Constant(value=str())):
                yield node
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                yield node
            case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                yield annotation
            case ast.FunctionDef(returns=ast.expr() as returns):
                yield returns
            case ast.Raise(exc=ast.Call(args=texts)):
                yield from texts
            case ast.Call(func=ast.Name(id="fail"), args=texts):
                yield from texts
            case ast.Call(func=ast.Name(id="require"), args=[_, *texts]):
                yield from texts


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[int, int, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield first, child.end_lineno or child.lineno, f"{prefix}{child.name}"
            yield from _functions(child, f"{prefix}{child.name}.")
        else:
            yield from _functions(child, prefix)
