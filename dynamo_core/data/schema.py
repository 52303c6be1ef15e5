"""What a row must be, as pandera schemas, and what becomes of a row that is not.

Three frames are checked: one line per turn (role, content, order), one line per row (number of turns, how it ends) and
one line per preference pair (two texts that differ).
The name of each check is the reason code that the quarantine file shows. A rejected row is never dropped silently.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import pandas as pd
import pandera.pandas as pa
from pandera.errors import SchemaErrors

from dynamo_core.types import Message

ROLES: Final = ("system", "user", "assistant")
_OPENERS: Final = ("nothing", "system")
"""What may come before the first user turn."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
"""Control characters other than white space: no tokenizer has seen them, and NUL ends strings elsewhere."""

_SPECIAL_TOKEN: Final = re.compile(r"<\|\w+\|>")
"""A text that a tokenizer would read as a control token, and so as the end of a turn."""


class Reason(StrEnum):
    """Why a row is in quarantine. Where several hold, the first one in this order is given."""

    BAD_UTF8 = "bad_utf8"
    BAD_JSON = "bad_json"
    NOT_AN_OBJECT = "not_an_object"
    DUPLICATE_KEY = "duplicate_key"
    NAN_VALUE = "nan_value"
    BAD_UNICODE = "bad_unicode"
    SCHEMA_MISMATCH = "schema_mismatch"
    INCOMPLETE_PAIR = "incomplete_pair"
    PAIR_AFTER_ASSISTANT = "pair_after_assistant"
    EMPTY_MESSAGES = "empty_messages"
    UNKNOWN_ROLE = "unknown_role"
    NULL_CONTENT = "null_content"
    NON_STRING_CONTENT = "non_string_content"
    EMPTY_CONTENT = "empty_content"
    CONTROL_CHARS = "control_chars"
    SPECIAL_TOKEN_IN_CONTENT = "special_token_in_content"  # noqa: S105
    MISPLACED_SYSTEM = "misplaced_system"
    ASSISTANT_FIRST = "assistant_first"
    CONSECUTIVE_USER = "consecutive_user"
    CONSECUTIVE_ASSISTANT = "consecutive_assistant"
    NO_USER_TURN = "no_user_turn"
    MISSING_GOLD = "missing_gold"
    ENDS_WITH_USER = "ends_with_user"
    NO_ASSISTANT_TURN = "no_assistant_turn"
    EQUAL_PAIR = "equal_pair"
    CONFLICTING_ID = "conflicting_id"
    CONFLICTING_GOLD = "conflicting_gold"
    DUPLICATE_EXACT = "duplicate_exact"


_PRECEDENCE: Final = {str(reason): place for place, reason in enumerate(Reason)}


@dataclass(frozen=True)
class Rejected:
    """A row in quarantine: file, row number from 0, reason code, and the value that is at fault."""

    file: str
    row: int
    reason: Reason
    value: str


@dataclass(frozen=True)
class RawRow:
    """A row whose fields have the right types but whose turns are unchecked. Turns are (role, content) as found."""

    file: str
    row: int
    source: str
    turns: tuple[tuple[object, object], ...]
    answer: str | None
    answer_given: bool
    difficulty: str
    own_id: str | None
    pair: tuple[object, object] | None = None
    """(chosen, rejected) as found, answers to the turns up to the last user's."""


@dataclass(frozen=True)
class CheckedRow:
    """A sound row: a task (`answer`), a demonstration (`reply`), a preference (`pair`), or several of them.

    `prompt` ends with a user turn.
    """

    file: str
    row: int
    source: str
    prompt: tuple[Message, ...]
    reply: Message | None
    answer: str | None
    difficulty: str
    own_id: str | None
    pair: tuple[str, str] | None = None
    """(chosen, rejected)."""


def _check(reason: Reason, holds: Callable[[Any], bool]) -> pa.Check:
    """A check of single values, nulls included, whose failures carry `reason`."""
    return pa.Check(holds, element_wise=True, ignore_na=False, error=str(reason))


_CONTENT: Final = [
    _check(Reason.NULL_CONTENT, lambda content: content is not None),
    _check(Reason.NON_STRING_CONTENT, lambda content: content is None or isinstance(content, str)),
    _check(Reason.EMPTY_CONTENT, lambda content: not isinstance(content, str) or bool(content.strip())),
    _check(Reason.CONTROL_CHARS, lambda content: not isinstance(content, str) or _CONTROL.search(content) is None),
    _check(
        Reason.SPECIAL_TOKEN_IN_CONTENT,
        lambda content: not isinstance(content, str) or _SPECIAL_TOKEN.search(content) is None,
    ),
]
"""What every text must be that a model is to read or write."""

TURNS: Final = pa.DataFrameSchema(
    {
        "role": pa.Column(object, _check(Reason.UNKNOWN_ROLE, lambda role: role in ROLES), nullable=True),
        "content": pa.Column(object, _CONTENT, nullable=True),
        "step": pa.Column(
            object,
            [
                _check(Reason.MISPLACED_SYSTEM, lambda step: step[1] != "system" or step[0] == "nothing"),
                _check(Reason.ASSISTANT_FIRST, lambda step: step[1] != "assistant" or step[0] not in _OPENERS),
                _check(Reason.CONSECUTIVE_USER, lambda step: step != ("user", "user")),
                _check(Reason.CONSECUTIVE_ASSISTANT, lambda step: step != ("assistant", "assistant")),
            ],
        ),
    }
)
"""One line per turn; `step` is (role before, role), where the role before a first turn is "nothing"."""

ROWS: Final = pa.DataFrameSchema(
    {
        "turns": pa.Column(int, _check(Reason.EMPTY_MESSAGES, lambda turns: turns > 0)),
        "answer": pa.Column(
            object, _check(Reason.MISSING_GOLD, lambda answer: answer is None or bool(answer.strip())), nullable=True
        ),
        "own_id": pa.Column(
            object, _check(Reason.SCHEMA_MISMATCH, lambda own_id: own_id is None or bool(own_id.strip())), nullable=True
        ),
        "use": pa.Column(
            object,
            [
                _check(Reason.NO_USER_TURN, lambda use: use != "no user turn"),
                _check(Reason.MISSING_GOLD, lambda use: use != "a task whose answer is null"),
                _check(Reason.ENDS_WITH_USER, lambda use: use != "neither a task nor ending with the assistant"),
                _check(Reason.NO_ASSISTANT_TURN, lambda use: use != "neither answer nor assistant turn"),
            ],
        ),
    }
)
"""One line per row; `use` says in words what the row is good for."""

PAIRS: Final = pa.DataFrameSchema(
    {
        "chosen": pa.Column(object, _CONTENT, nullable=True),
        "rejected": pa.Column(object, _CONTENT, nullable=True),
        "both": pa.Column(object, _check(Reason.EQUAL_PAIR, lambda both: not _equal(*both))),
    }
)
"""One line per preference pair; `both` is (chosen, rejected)."""


def validate(rows: Sequence[RawRow]) -> tuple[list[CheckedRow], list[Rejected]]:
    """Check `rows` against TURNS, ROWS and PAIRS; both results keep the order of the rows."""
    if not rows:
        return [], []
    faults: dict[int, list[tuple[int, str]]] = {}
    owners, turns = _turn_frame(rows)
    for line, reason, value in _failures(TURNS, turns):
        faults.setdefault(owners[line], []).append((_PRECEDENCE[reason], value))
    for line, reason, value in _failures(ROWS, _row_frame(rows)):
        faults.setdefault(line, []).append((_PRECEDENCE[reason], value))
    owners, pairs = _pair_frame(rows)
    for line, reason, value in _failures(PAIRS, pairs):
        faults.setdefault(owners[line], []).append((_PRECEDENCE[reason], value))
    checked = [_checked(row) for index, row in enumerate(rows) if index not in faults]
    rejected = []
    for index in sorted(faults):
        place, value = min(faults[index], key=lambda fault: fault[0])
        rejected.append(Rejected(rows[index].file, rows[index].row, list(Reason)[place], value))
    return checked, rejected


def excerpt(value: object) -> str:
    """A value as one short printable text, for the quarantine file."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 200 else text[:200] + "..."


def _failures(schema: pa.DataFrameSchema, frame: pd.DataFrame) -> list[tuple[int, str, str]]:
    """(line, reason, value) of every failed check. The frame's index must be 0, 1, 2, ..."""
    try:
        schema.validate(frame, lazy=True)
    except SchemaErrors as errors:
        cases = errors.failure_cases
        found = zip(cases["index"], cases["column"], cases["check"], strict=True)
        # The value is taken from the frame: pandera's own copy turns null into nan.
        return [(int(line), str(check), excerpt(frame[column].iloc[int(line)])) for line, column, check in found]
    return []


def _turn_frame(rows: Sequence[RawRow]) -> tuple[list[int], pd.DataFrame]:
    """The row that owns each turn, and the frame that TURNS describes."""
    owners, roles, contents, steps = [], [], [], []
    for index, row in enumerate(rows):
        before: object = "nothing"
        for role, content in row.turns:
            owners.append(index)
            roles.append(role)
            contents.append(content)
            steps.append((before, role))
            before = role
    columns = {"role": roles, "content": contents, "step": steps}
    return owners, pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})


def _pair_frame(rows: Sequence[RawRow]) -> tuple[list[int], pd.DataFrame]:
    """The row that owns each pair, and the frame that PAIRS describes."""
    found = [(index, row.pair) for index, row in enumerate(rows) if row.pair is not None]
    columns = {
        "chosen": [chosen for _, (chosen, _) in found],
        "rejected": [rejected for _, (_, rejected) in found],
        "both": [pair for _, pair in found],
    }
    frame = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
    return [index for index, _ in found], frame


def _equal(chosen: object, rejected: object) -> bool:
    """Whether two texts differ in outer blanks at most, which is nothing to prefer."""
    return isinstance(chosen, str) and isinstance(rejected, str) and chosen.strip() == rejected.strip()


def _row_frame(rows: Sequence[RawRow]) -> pd.DataFrame:
    columns = {
        "answer": [row.answer for row in rows],
        "own_id": [row.own_id for row in rows],
        "use": [_use(row) for row in rows],
    }
    frame = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
    return frame.assign(turns=[len(row.turns) for row in rows])


def _use(row: RawRow) -> str:
    """What a row is good for, in words (see ROWS)."""
    roles = [role for role, _ in row.turns]
    if "user" not in roles:
        return "no user turn"
    if roles[-1] == "assistant":
        return "a demonstration" if row.answer is None else "a demonstration and a task"
    if row.answer is not None or row.pair is not None:
        return "a task or a preference"
    if row.answer_given:
        return "a task whose answer is null"
    if "assistant" in roles:
        return "neither a task nor ending with the assistant"
    return "neither answer nor assistant turn"


def _checked(row: RawRow) -> CheckedRow:
    messages = tuple(Message(str(role), str(content)) for role, content in row.turns)
    replied = messages[-1].role == "assistant"
    return CheckedRow(
        file=row.file,
        row=row.row,
        source=row.source,
        prompt=messages[:-1] if replied else messages,
        reply=messages[-1] if replied else None,
        answer=None if row.answer is None else row.answer.strip(),
        difficulty=row.difficulty,
        own_id=row.own_id,
        pair=None if row.pair is None else (str(row.pair[0]), str(row.pair[1])),
    )
