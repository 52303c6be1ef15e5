"""Reading what a running stage writes: new lines of metrics.jsonl and new parts of its tables."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MetricsLine:
    """One line of metrics.jsonl, and when it was first seen (milliseconds since the epoch)."""

    step: int
    values: dict[str, float]
    timings: dict[str, float]
    seen_ms: int


class StageFollower:
    """Yields each complete metrics line and each table part of a stage folder once."""

    def __init__(self, folder: Path) -> None:
        self._metrics = folder / "metrics.jsonl"
        self._tables = folder / "tables"
        self._file = 0
        self._offset = 0
        self._last_step = -1
        self._parts: set[Path] = set()

    def lines(self) -> list[MetricsLine]:
        """Lines that were completed since the last call."""
        if not self._metrics.exists():
            return []
        with self._metrics.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if number != self._file:  # a resumed stage writes another file, which begins with the steps it keeps
                self._file, self._offset = number, 0
            file.seek(self._offset)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._offset += len(complete)
        seen_ms = time.time_ns() // 1_000_000
        found = [json.loads(line) for line in complete.splitlines()]
        new_lines = [line for line in found if line["step"] > self._last_step]
        if new_lines:
            self._last_step = new_lines[-1]["step"]
        return [MetricsLine(line["step"], line["values"], line["timings"], seen_ms) for line in new_lines]

    def table_parts(self, name: str) -> list[Path]:
        """Parts of table `name` that appeared since the last call, in order. A part is complete once it is there."""
        new = sorted(set(self._tables.glob(f"{name}-*.parquet")) - self._parts)
        self._parts.update(new)
        return new
