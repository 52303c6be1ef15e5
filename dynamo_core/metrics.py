"""metrics.jsonl: one object a line, `{step, attempt, values{}, timings{}}`.

Only `values` is ever compared between runs: two runs of one recipe have equal `values`. Anything that depends on
the clock or on the machine (seconds, tokens/s, memory) belongs in `timings`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from dynamo_core.errors import NumericalFailure


class MetricsWriter:
    """Appends lines to a metrics file; every line is flushed, so that a follower sees it at once."""

    def __init__(self, path: Path | None) -> None:
        """`path` None (ranks other than 0) makes `write` do nothing. The first write replaces an old file."""
        self._path = path
        self._attempt = 1
        self._file: TextIOWrapper | None = None
        self.last: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """What `resume` needs: how far the file goes, and its last values."""
        offset = 0 if self._file is None else self._file.tell()
        return {"offset": offset, "attempt": self._attempt, "last": self.last}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on after the checkpoint of `state`: lines that were written later are cut off."""
        self.last, self._attempt = dict(state["last"]), state["attempt"] + 1
        if self._path is None:
            return
        # A new file under the old name: a follower sees that it is another one, and reads it from its start.
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(self._path.read_bytes()[: state["offset"]])
        temporary.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """Write one step.

        Raises:
            NumericalFailure: a value or timing is NaN or infinite.
        """
        for name, value in (*values.items(), *timings.items()):
            if not math.isfinite(value):
                raise NumericalFailure(f"metric '{name}' is {value} at step {step}", step=step)
        self.last = {name: float(value) for name, value in values.items()}
        if self._path is None:
            return
        if self._file is None:
            self._path.unlink(missing_ok=True)
            self._file = self._path.open("w", encoding="utf-8")
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
