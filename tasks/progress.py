"""How far a running stage is: a live bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from dynamo_core.config.spec import StageSpec
from dynamo_core.config.stage_base import TrainingStage
from dynamo_core.config.stages import EvaluateStage
from tasks.follow import MetricsLine
from tasks.terminal import out, say

LINE_SECONDS: Final = 5.0
_SHOWN: Final = {"reward/mean": "reward", "train/loss": "loss", "preference/accuracy": "accuracy"}


def total_steps(spec: StageSpec) -> int | None:
    """How many metrics lines a stage writes; None where one says it all."""
    if isinstance(spec.stage, TrainingStage):
        return spec.stage.steps
    if isinstance(spec.stage, EvaluateStage):
        return len(spec.stage.models_from or ())
    return None


def duration(seconds: float) -> str:
    """Minutes and seconds, for example `1:05`; hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """The progress of one stage while it runs. Use it as a context."""

    def __init__(self, spec: StageSpec) -> None:
        self._name = spec.name
        self._total = total_steps(spec)
        self._bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=out,
            transient=True,
            disable=not out.is_terminal,
        )
        self._task = self._bar.add_task(self._name, total=self._total, text="starting")
        self._first: tuple[int, float] | None = None
        self._next_line = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, lines: Sequence[MetricsLine]) -> None:
        """Show the newest of `lines`."""
        if not lines or self._total is None:
            return
        now, line = time.monotonic(), lines[-1]
        if self._first is None:
            self._first = (line.step, now)
        text = self._text(line, now, self._total)
        self._bar.update(self._task, completed=line.step, text=text)
        if not out.is_terminal and (now >= self._next_line or line.step == self._total):
            say(f"{self._name}: {text}")
            self._next_line = now + LINE_SECONDS

    def _text(self, line: MetricsLine, now: float, total: int) -> str:
        parts = [f"step {line.step}/{total}"]
        parts += [f"{label} {line.values[key]:.3f}" for key, label in _SHOWN.items() if key in line.values]
        if "tokens_per_second" in line.timings:
            parts.append(f"{line.timings['tokens_per_second']:.0f} tokens/s")
        first_step, first_time = self._first or (line.step, now)
        if line.step > first_step:
            left = (now - first_time) / (line.step - first_step) * (total - line.step)
            parts.append(f"{duration(left)} left")
        return "  ".join(parts)
