"""Strict reading of messages files: one JSON object a line.

Lines are split at LF bytes only (Unicode line separators inside a text do not end a row), a byte-order mark is
skipped, blank lines are no rows. A line that cannot be used is returned as `Rejected` and the rest is read on.
Answers stay text: a type-guessing reader turns "033" into 33 and 9007199254740993 into 9007199254740992
(datasets #7664, pandera #664), so numbers are kept as the digits in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from dynamo_core.data.schema import RawRow, Reason, Rejected, excerpt
from dynamo_core.errors import DataError

_BOM: Final = b"\xef\xbb\xbf"
_BLANK: Final = b" \t\r\n"
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class JsonNumber:
    """A JSON number as it was written."""

    text: str
    whole: bool

    def __repr__(self) -> str:
        return self.text


class _Unusable(Exception):
    """This line cannot become a row."""

    def __init__(self, reason: Reason, value: object) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = excerpt(value)


def read_messages(path: Path) -> Iterator[RawRow | Rejected]:
    """The rows of a messages file, in order. Rows are numbered from 0; blank lines are not counted.

    Raises:
        DataError: the file is missing, is no regular file, or holds no rows.
    """
    if not path.is_file():
        kind = "is not a file" if path.exists() else "does not exist"
        raise DataError(f"{path} {kind}", "give the path of a messages file, one JSON object a line")
    row = 0
    with path.open("rb") as file:
        if file.read(len(_BOM)) != _BOM:
            file.seek(0)
        for line in file:
            if not line.strip(_BLANK):
                continue
            try:
                yield _raw_row(_parse_line(line), str(path), row)
            except _Unusable as fault:
                yield Rejected(str(path), row, fault.reason, fault.value)
            row += 1
    if row == 0:
        raise DataError(f"{path} holds no rows", "give a messages file, one JSON object a line")


def _parse_line(line: bytes) -> dict[str, Any]:
    """One line as an object whose numbers are `JsonNumber`s."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Unusable(Reason.BAD_UTF8, line[error.start : error.end]) from error
    try:
        value = json.loads(
            text,
            parse_int=lambda digits: JsonNumber(digits, whole=True),
            parse_float=lambda digits: JsonNumber(digits, whole=False),
            parse_constant=_refuse_constant,
            object_pairs_hook=_unique_keys,
        )
    except (json.JSONDecodeError, RecursionError) as error:
        raise _Unusable(Reason.BAD_JSON, text) from error
    if not isinstance(value, dict):
        raise _Unusable(Reason.NOT_AN_OBJECT, text)
    return value


def _refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity are not JSON, though Python writes them."""
    raise _Unusable(Reason.NAN_VALUE, name)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, unless a key occurs twice: taking the last one silently would change the question."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Unusable(Reason.DUPLICATE_KEY, next(key for key in keys if keys.count(key) > 1))
    return found


def _raw_row(fields: dict[str, Any], file: str, row: int) -> RawRow:
    """The fields that rows have; further keys are ignored."""
    if "messages" not in fields:
        raise _Unusable(Reason.SCHEMA_MISMATCH, f"no key 'messages', only {sorted(fields)}")
    messages = fields["messages"]
    if messages is None:
        raise _Unusable(Reason.EMPTY_MESSAGES, messages)
    if not isinstance(messages, list):
        raise _Unusable(Reason.SCHEMA_MISMATCH, messages)
    turns, pair = tuple(_turn(message) for message in messages), _pair(fields)
    if pair is not None and turns and turns[-1][0] == "assistant":
        raise _Unusable(Reason.PAIR_AFTER_ASSISTANT, turns[-1][1])
    return RawRow(
        file=file,
        row=row,
        source=Path(file).name,
        turns=turns,
        answer=_text_field(fields, "answer"),
        answer_given="answer" in fields,
        difficulty=_text_field(fields, "difficulty") or "",
        own_id=_text_field(fields, "id"),
        pair=pair,
    )


def _pair(fields: dict[str, Any]) -> tuple[object, object] | None:
    """(chosen, rejected) as found; None for a row with neither."""
    given = [key for key in ("chosen", "rejected") if key in fields]
    if len(given) == 1:
        raise _Unusable(Reason.INCOMPLETE_PAIR, f"only '{given[0]}'")
    return (_reply(fields["chosen"]), _reply(fields["rejected"])) if given else None


def _reply(value: object) -> object:
    """The text of one side of a pair; a list must hold one assistant message, whose content it is."""
    if not isinstance(value, list):
        return _encodable(value)
    turns = [_turn(message) for message in value]
    if len(turns) != 1 or turns[0][0] != "assistant":
        raise _Unusable(Reason.SCHEMA_MISMATCH, value)
    return turns[0][1]


def _text_field(fields: dict[str, Any], key: str) -> str | None:
    """A text, a whole number as its digits, or None where the field is absent or null."""
    value = fields.get(key)
    if isinstance(value, JsonNumber) and value.whole:
        return value.text
    if value is None:
        return None
    if isinstance(value, str):
        return _encodable(value)
    raise _Unusable(Reason.SCHEMA_MISMATCH, f"{key}: {value!r}")


def _turn(message: object) -> tuple[object, object]:
    """Role and content of one message; a content of text parts is joined."""
    if not isinstance(message, dict):
        raise _Unusable(Reason.SCHEMA_MISMATCH, message)
    if message.get("tool_calls"):
        raise _Unusable(Reason.SCHEMA_MISMATCH, "tool_calls: tool use is not supported")
    content = message.get("content")
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    return _encodable(message.get("role")), _encodable(content)


def _encodable(value: _Value) -> _Value:
    """`value`, unless it is a text with half a surrogate pair: valid JSON that neither UTF-8 nor parquet can hold."""
    if isinstance(value, str) and _SURROGATE.search(value):
        raise _Unusable(Reason.BAD_UNICODE, value)
    return value


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
