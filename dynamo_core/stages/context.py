"""What a stage is given: its folder, its spec, and writers that only rank 0 uses."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dynamo_core.config.spec import StageSpec
from dynamo_core.errors import DataError
from dynamo_core.metrics import MetricsWriter


class TableWriter:
    """Collects rows and writes them as `tables/<name>-<step>.parquet`, one part a flush."""

    def __init__(self, folder: Path, enabled: bool) -> None:
        self._folder = folder
        self._enabled = enabled
        self._rows: dict[str, list[Mapping[str, Any]]] = defaultdict(list)

    def append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep `rows` until the next flush. All rows of one name have the same columns."""
        if self._enabled:
            self._rows[name].extend(rows)

    def flush(self, step: int) -> None:
        """Write what was kept, under a temporary name first: a reader never sees half a part."""
        self._folder.mkdir(exist_ok=True)
        for name, rows in self._rows.items():
            path = self._folder / f"{name}-{step:06d}.parquet"
            temporary = path.with_suffix(".tmp")
            pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), temporary)
            temporary.replace(path)
        self._rows.clear()

    def cut(self, step: int) -> None:
        """Remove the parts that an earlier attempt wrote after `step`."""
        if self._enabled:
            for path in self._folder.glob("*-*.parquet"):
                if int(path.stem.rpartition("-")[2]) > step:
                    path.unlink()


@dataclass(frozen=True)
class StageContext:
    """One rank's view of its stage."""

    folder: Path
    spec: StageSpec
    metrics: MetricsWriter
    tables: TableWriter
    rank: int
    world_size: int

    @classmethod
    def open(cls, folder: Path) -> StageContext:
        """The context of the stage in `folder`; the rank comes from the launcher's environment."""
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        first = rank == 0
        return cls(
            folder=folder,
            spec=StageSpec.read(folder),
            metrics=MetricsWriter(folder / "metrics.jsonl" if first else None),
            tables=TableWriter(folder / "tables", enabled=first),
            rank=rank,
            world_size=world_size,
        )

    def input(self, role: str) -> Path:
        """Folder of an input stage.

        Raises:
            DataError: the role is not among the inputs, or its folder is gone.
        """
        if role not in self.spec.inputs:
            raise DataError(f"stage '{self.spec.name}' has no input '{role}', only {sorted(self.spec.inputs)}")
        folder = Path(self.spec.inputs[role])
        if not folder.is_dir():
            raise DataError(f"input '{role}' of stage '{self.spec.name}' is missing: {folder}", "run the recipe again")
        return folder
