"""Outcomes on disk, so that an interrupted run goes on and a second one repeats only what may have changed."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutation.forked import SURVIVED


@dataclass(frozen=True)
class Result:
    """An outcome, and what it was found with."""

    name: str
    source: str  # digest of the mutated module
    tests: str  # digest of the tests
    outcome: str
    seconds: float


class Results:
    """A file of one JSON row per outcome; the last row of a name holds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        rows = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._known = {row["name"]: Result(**row) for row in map(json.loads, rows)}

    def get(self, name: str, source: str, tests: str) -> Result | None:
        """What is known of the same mutant: a survivor only under the same tests, for new ones may kill it."""
        known = self._known.get(name)
        if known is None or known.source != source:
            return None
        return None if known.outcome == SURVIVED and known.tests != tests else known

    def add(self, result: Result) -> None:
        """Written at once."""
        self._known[result.name] = result
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")


def digest(*texts: str) -> str:
    """Short hash of the texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
