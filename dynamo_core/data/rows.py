"""The stored form of prepared rows: `<stage folder>/data/{sft,preference,rl,validation,test}.parquet`, fixed schemas.

Rows are ordered by the sha256 of their prompt_id, so that the first k rows are a fixed sample of the split, which
grows with k and does not depend on the order of the source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from dynamo_core.errors import DataError
from dynamo_core.types import Demonstration, Message, PreferencePair, PromptRow


def _text(name: str) -> pa.Field:
    return pa.field(name, pa.string(), nullable=False)


_MESSAGES: Final = pa.field("messages", pa.list_(pa.struct([_text("role"), _text("content")])), nullable=False)
_ANSWER: Final = pa.field("answer", pa.string())  # null for a demonstration whose prompt has no known answer
_ROW: Final = pa.schema([_text("prompt_id"), _MESSAGES, _ANSWER, _text("difficulty"), _text("source")])
_PAIR: Final = pa.schema(
    [_text("prompt_id"), _MESSAGES, _text("chosen"), _text("rejected"), _text("difficulty"), _text("source")]
)
SCHEMAS: Final = {"sft": _ROW, "preference": _PAIR, "rl": _ROW, "validation": _ROW, "test": _ROW}


def order_key(prompt_id: str) -> str:
    """What rows are sorted by."""
    return hashlib.sha256(prompt_id.encode()).hexdigest()


def write_split(data_folder: Path, split: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write `rows` (dicts with the columns of the split's schema, in their final order) as one split."""
    data_folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMAS[split]), data_folder / f"{split}.parquet")


def read_demonstrations(data_folder: Path) -> list[Demonstration]:
    """The demonstrations of the training split, in their stored order.

    Raises:
        DataError: there are none, or the file is missing or damaged.
    """
    rows = _read_split(data_folder, "sft")
    return [Demonstration(row["prompt_id"], _messages(row)) for row in rows]


def read_pairs(data_folder: Path) -> list[PreferencePair]:
    """The preference pairs of training prompts, in their stored order.

    Raises:
        DataError: there are none, or the file is missing or damaged.
    """
    rows = _read_split(data_folder, "preference")
    return [PreferencePair(row["prompt_id"], _messages(row), row["chosen"], row["rejected"]) for row in rows]


def read_prompts(data_folder: Path, split: Literal["rl", "validation", "test"]) -> list[PromptRow]:
    """The tasks of one split, in their stored order: no prompt_id twice, answers as written but for outer blanks.

    Raises:
        DataError: there are none, or the file is missing or damaged.
    """
    rows = _read_split(data_folder, split)
    return [
        PromptRow(row["prompt_id"], _messages(row), row["answer"], row["difficulty"], row["source"]) for row in rows
    ]


def _messages(row: dict[str, Any]) -> tuple[Message, ...]:
    return tuple(Message(message["role"], message["content"]) for message in row["messages"])


def _read_split(data_folder: Path, split: str) -> list[dict[str, Any]]:
    path = data_folder / f"{split}.parquet"
    try:
        table = pq.read_table(path)
    except FileNotFoundError as error:
        raise DataError(f"the split '{split}' is missing: {path}", "run prepare_data again") from error
    except pa.ArrowInvalid as error:
        raise DataError(f"the split '{split}' is damaged: {path}: {error}", "run prepare_data again") from error
    if not table.schema.equals(SCHEMAS[split]):
        raise DataError(f"the split '{split}' has other columns than expected: {path}", "run prepare_data again")
    if table.num_rows == 0:
        raise DataError(f"the split '{split}' holds no rows: {path}", "add rows or change the split's shares")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows
