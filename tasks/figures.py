"""Figures for the tracking UI, drawn without a display."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_BLUE: Final = "#2a6fbb"
_SHOWN_METRICS: Final = ("sampled_pass@1", "greedy_pass@1")


def allocation_histogram(step: int, counts: Sequence[int]) -> npt.NDArray[np.uint8]:
    """How many prompts got how many rollouts in one step, as an RGBA image.

    Args:
        counts: rollouts of each prompt.
    """
    figure = Figure(figsize=(5, 3.2), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    prompts = Counter(counts)
    axes.bar(list(prompts), list(prompts.values()), width=0.8, color=_BLUE)
    axes.set_xlabel("rollouts a prompt")
    axes.set_ylabel("prompts")
    axes.set_title(f"step {step}: {sum(counts)} rollouts, {len(counts)} prompts, mean {np.mean(counts):.1f}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba()).copy()  # type: ignore[no-untyped-call]


def evaluation_bars(results: Mapping[str, Any]) -> Figure:
    """Pass rates of each model of a results.json, with their 95 % intervals."""
    models = results["models"]
    largest = max((name for name in models[0]["metrics"] if name.startswith("pass@")), key=_k_of, default=None)
    shown = [*_SHOWN_METRICS, *([largest] if largest else [])]
    figure = Figure(figsize=(1.5 + 1.6 * len(models), 3.8), dpi=110, layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(shown)
    for number, metric in enumerate(shown):
        cells = [model["metrics"][metric] for model in models]
        values = [cell["value"] for cell in cells]
        below = [0.0 if cell["low"] is None else cell["value"] - cell["low"] for cell in cells]
        above = [0.0 if cell["high"] is None else cell["high"] - cell["value"] for cell in cells]
        places = [index + (number - (len(shown) - 1) / 2) * width for index in range(len(models))]
        axes.bar(places, values, width=width, label=metric, yerr=[below, above], capsize=3)
    axes.set_xticks(range(len(models)), [model["name"] for model in models])
    axes.set_ylim(0, 1)
    axes.set_ylabel(f"pass rate on {results['prompts']} prompts")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(shown), frameon=False, fontsize="small")
    return figure


def _k_of(name: str) -> int:
    return int(name.partition("@")[2])
