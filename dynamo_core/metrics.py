"""metrics.jsonl: one object a line, `{step, attempt, values{}, timings{}}`.

Only `values` is ever compared between runs: two runs of one recipe have equal `values`. Anything that depends on
the clock or on the machine (seconds, tokens/s, memory) belongs in `timings`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from dynamo_core.errors import NumericalFailure


class MetricsWriter:
    """Appends lines to a metrics file; every line is flushed, so that a follower sees it at once."""

    def __init__(self, path: Path | None, attempt: int = 1) -> None:
        """`path` None (ranks other than 0) makes `write` do nothing."""
        self._file = None if path is None else path.open("a", encoding="utf-8")
        self._attempt = attempt
        self.last: dict[str, float] = {}

    def write(self, step: int, values: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """Write one step.

        Raises:
            NumericalFailure: a value or timing is NaN or infinite.
        """
        for name, value in (*values.items(), *timings.items()):
            if not math.isfinite(value):
                raise NumericalFailure(f"metric '{name}' is {value} at step {step}", step=step)
        self.last = {name: float(value) for name, value in values.items()}
        if self._file is None:
            return
        line = {
            "step": step,
            "attempt": self._attempt,
            "values": self.last,
            "timings": {name: float(value) for name, value in timings.items()},
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; further writes fail."""
        if self._file is not None:
            self._file.close()
