"""Reading the results.json that an evaluate stage leaves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ALL = "all"


def read_results(folder: Path) -> dict[str, Any] | None:
    """The results of the stage in `folder`; None where it is no evaluation."""
    path = folder / "results.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def results_table(results: Mapping[str, Any]) -> dict[str, list[Any]]:
    """One row a model and difficulty (and one over all), one column a metric and each end of its interval."""
    rows = []
    for model in results["models"]:
        for band, metrics in ((ALL, model["metrics"]), *model["bands"].items()):
            row = {"model": model["name"], "parameters": model["parameters"], "difficulty": band}
            for name, cell in metrics.items():
                row[name] = cell["value"]
                if cell["low"] is not None:
                    row[f"{name} low"], row[f"{name} high"] = cell["low"], cell["high"]
            rows.append(row)
    columns = dict.fromkeys(key for row in rows for key in row)
    return {column: [row.get(column) for row in rows] for column in columns}
