"""prepare_data: read -> validate -> merge -> quarantine -> split -> store.

Leaves `data/{sft,preference,rl,validation,test}.parquet` and `quarantine.jsonl` (file, row, reason, value). Needs no
torch. The outputs depend on the rows, the stage's configuration and, for generated rows, the seed: byte for byte.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from dynamo_core.config.data import Source
from dynamo_core.config.stages import PrepareDataStage
from dynamo_core.data.formats import read_messages
from dynamo_core.data.generators import generate
from dynamo_core.data.rows import write_split
from dynamo_core.data.schema import RawRow, Reason, Rejected, validate
from dynamo_core.data.splits import merge_prompts, split_rows
from dynamo_core.errors import DataError
from dynamo_core.stages.context import StageContext

QUARANTINE = "quarantine.jsonl"


def run(context: StageContext) -> dict[str, float]:
    """Prepare the rows of one source; returns the counts that are also written as metrics.

    Raises:
        DataError: the source is missing or empty, too many rows are unusable, or no training row is left.
    """
    stage = cast(PrepareDataStage, context.spec.stage)
    if context.rank != 0:
        return {}
    start = time.perf_counter()
    raw, unreadable = _read(stage.source, context.spec.seed)
    checked, invalid = validate(raw)
    prompts, repeated = merge_prompts(checked)
    rejected = sorted([*unreadable, *invalid, *repeated], key=lambda row: row.row)
    rows_read = len(raw) + len(unreadable)
    _write_quarantine(context.folder / QUARANTINE, rejected)
    _check_bad_share(rejected, rows_read, stage.max_bad_share, context.folder / QUARANTINE)
    splits = split_rows(prompts, stage.split, stage.rl_prompts)
    if not splits["sft"] and not splits["rl"] and not splits["preference"]:
        raise DataError("no row is left for training", "add rows, or lower split.validation and split.test")
    for name, rows in splits.items():
        write_split(context.folder / "data", name, rows)
    metrics = _counts(rows_read, rejected, {name: len(rows) for name, rows in splits.items()})
    context.metrics.write(1, metrics, {"seconds": time.perf_counter() - start})
    return metrics


def _read(source: Source, seed: int) -> tuple[list[RawRow], list[Rejected]]:
    """All rows of the source, and the lines that are no rows."""
    found: Iterable[RawRow | Rejected]
    found = generate(source, seed) if source.type == "arithmetic" else read_messages(Path(source.path).expanduser())
    raw: list[RawRow] = []
    unreadable: list[Rejected] = []
    for row in found:
        if isinstance(row, RawRow):
            raw.append(row)
        else:
            unreadable.append(row)
    return raw, unreadable


def _write_quarantine(path: Path, rejected: Sequence[Rejected]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rejected)


def _check_bad_share(rejected: Sequence[Rejected], rows_read: int, max_bad_share: float, listed: Path) -> None:
    """Copies do not count as bad: they are left out without loss, and public sets hold every row many times."""
    bad = [row for row in rejected if row.reason is not Reason.DUPLICATE_EXACT]
    if len(bad) <= max_bad_share * rows_read:
        return
    reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(row.reason for row in bad).most_common())
    raise DataError(
        f"{bad[0].file}: {len(bad)} of {rows_read} rows are unusable, more than max_bad_share {max_bad_share:g} allows:"
        f" {reasons}; the first is row {bad[0].row}: {bad[0].reason}, {bad[0].value!r}",
        f"see {listed}",
    )


def _counts(rows_read: int, rejected: Sequence[Rejected], stored: dict[str, int]) -> dict[str, float]:
    reasons = Counter(row.reason for row in rejected)
    return {
        "rows_read": float(rows_read),
        "rows_kept": float(rows_read - len(rejected)),
        "rows_quarantined": float(len(rejected)),
        **{f"quarantined_{reason}": float(reasons[reason]) for reason in Reason if reason in reasons},
        **{f"rows_{name}": float(count) for name, count in stored.items()},
    }
