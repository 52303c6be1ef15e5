"""The results table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from tasks.results import read_results
from tasks.terminal import out

_TITLES: Final = {
    "sampled_pass@1": "sampled pass@1",
    "greedy_pass@1": "greedy",
    "truncated_share": "cut",
    "response_tokens": "tokens",
    "latency_p50_ms": "p50 ms",
    "latency_p95_ms": "p95 ms",
    "tokens_per_second": "tokens/s",
}
"""The metrics that the table shows, in order; the largest k of pass@k comes after greedy."""
_ONLY_WHERE_WIDE: Final = ("truncated_share", "response_tokens", "latency_p95_ms")
_WIDE: Final = 100
"""Width that holds all columns; a narrower terminal leaves some out, as results.json and MLflow have them anyway."""
_WITH_INTERVAL: Final = "sampled_pass@1"
_MILLION: Final = 1_000_000


def plain_table(title: str, columns: Sequence[str]) -> Table:
    """Aligned columns without lines: the first to the left, the others to the right, each row on one line."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def size(count: int) -> str:
    """A number of parameters, for example `0.34M`."""
    return f"{count / _MILLION:.3g}M" if count < 1000 * _MILLION else f"{count / _MILLION / 1000:.3g}B"


def print_results(folders: Mapping[str, Path]) -> None:
    """Print the table of every evaluation among the stage `folders`."""
    for name, folder in folders.items():
        results = read_results(folder)
        if results is not None:
            out.print(_results_table(name, results))


def _results_table(name: str, results: Mapping[str, Any]) -> Table:
    metrics = _shown(results)
    title = f"{name}: {results['prompts']} prompts x {results['samples']} samples, 95 % intervals"
    table = plain_table(title, ["model", "size", *(_TITLES.get(metric, metric) for metric in metrics)])
    for model in results["models"]:
        cells = [_cell(metric, model["metrics"][metric]) for metric in metrics]
        table.add_row(model["name"], size(model["parameters"]), *cells)
    return table


def _shown(results: Mapping[str, Any]) -> list[str]:
    found = results["models"][0]["metrics"]
    left_out = _ONLY_WHERE_WIDE if out.width < _WIDE else ()
    shown = [metric for metric in _TITLES if metric in found and metric not in left_out]
    passes = [metric for metric in found if metric.startswith("pass@")]
    if passes:
        shown.insert(2, max(passes, key=lambda metric: int(metric.partition("@")[2])))
    return shown


def _cell(metric: str, cell: Mapping[str, Any]) -> str:
    value: float = cell["value"]
    if metric == _WITH_INTERVAL and cell["low"] is not None:
        return f"{value:.3f} [{cell['low']:.3f}, {cell['high']:.3f}]"
    return f"{value:.3f}" if value <= 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
