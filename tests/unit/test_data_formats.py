"""The strict reader and the row schemas: what is kept, what is quarantined, and with which reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_core.data.formats import read_messages
from dynamo_core.data.schema import CheckedRow, RawRow, Rejected, validate
from dynamo_core.errors import DataError

FILES = Path(__file__).parents[1] / "data" / "messages"


def load(path: Path) -> tuple[list[CheckedRow], dict[int, str], list[Rejected]]:
    """Sound rows, reason by row number, and the rejected rows."""
    found = list(read_messages(path))
    checked, invalid = validate([row for row in found if isinstance(row, RawRow)])
    rejected = [row for row in found if isinstance(row, Rejected)] + invalid
    return checked, {row.row: str(row.reason) for row in rejected}, rejected


@pytest.mark.parametrize(
    ("name", "kept", "reasons"),
    [
        ("assistant_first", 1, {1: "assistant_first"}),
        ("bad_bytes", 2, {1: "bad_utf8"}),
        ("blank_lines", 2, {}),
        ("bom", 2, {}),
        ("cut_last_line", 2, {2: "bad_json"}),
        ("deep_nesting", 2, {1: "bad_json"}),
        ("double_encoded", 0, {0: "not_an_object", 1: "not_an_object"}),
        ("duplicate_key", 1, {1: "duplicate_key"}),
        ("empty_answer", 1, {1: "empty_content"}),
        ("empty_list", 1, {1: "empty_messages"}),
        ("empty_user", 1, {1: "empty_content"}),
        ("line_separators", 2, {}),
        ("lone_surrogate", 1, {1: "bad_unicode"}),
        ("messages_null", 1, {1: "empty_messages"}),
        ("no_assistant", 1, {1: "no_assistant_turn"}),
        ("no_content_key", 1, {1: "null_content"}),
        ("nul_char", 1, {1: "control_chars"}),
        ("parts_content", 2, {}),
        ("role_case", 1, {1: "unknown_role"}),
        ("two_users", 1, {1: "consecutive_user"}),
        ("unknown_role", 1, {1: "unknown_role"}),
    ],
)
def test_rows_are_kept_or_quarantined(name: str, kept: int, reasons: dict[int, str]) -> None:
    checked, found, _ = load(FILES / f"{name}.jsonl")
    assert found == reasons
    assert len(checked) == kept


def test_golds_stay_text_and_unusable_ones_are_named() -> None:
    checked, reasons, _ = load(FILES / "golds.jsonl")
    assert [row.answer for row in checked] == ["033", "9007199254740993", "1e5"]
    assert [row.difficulty for row in checked] == ["", "", "3"]
    assert reasons == {
        3: "schema_mismatch",  # a float: its digits may already be rounded
        4: "nan_value",
        5: "missing_gold",  # null, and nothing to imitate either
        6: "missing_gold",  # blanks
        7: "schema_mismatch",  # true is not 1
        8: "schema_mismatch",
        9: "schema_mismatch",  # no messages
        10: "ends_with_user",
        11: "non_string_content",
        12: "misplaced_system",
        13: "no_user_turn",
        14: "special_token_in_content",
        15: "schema_mismatch",  # a turn that is a text
        16: "schema_mismatch",
        17: "unknown_role",
        18: "schema_mismatch",  # tool calls would be lost silently
    }


def test_the_offending_value_is_shown() -> None:
    _, _, rejected = load(FILES / "unknown_role.jsonl")
    assert [(row.row, row.value) for row in rejected] == [(1, "bot")]
    _, _, rejected = load(FILES / "golds.jsonl")
    values = {row.row: row.value for row in rejected}
    assert values[3] == "answer: 0.5"
    assert values[12] == "('user', 'system')"
    assert rejected[0].file.endswith("golds.jsonl")


def test_long_and_unprintable_values_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"messages": [{"role": "' + "x" * 5000 + '", "content": "a"}], "answer": "1"}\n')
    _, reasons, rejected = load(path)
    assert reasons == {0: "unknown_role"}
    assert len(rejected[0].value) == 203
    _, _, rejected = load(FILES / "lone_surrogate.jsonl")
    assert rejected[0].value == "odd \\ud83d text"


def test_a_row_may_be_demonstration_and_task(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"id": 7, "messages": [{"role": "user", "content": "3+4=?"}, {"role": "assistant", "content": "7"}],'
        ' "answer": "7", "extra": [1.5]}\n'
    )
    (row,), reasons, _ = load(path)
    assert reasons == {}
    assert (row.own_id, row.answer, row.source) == ("7", "7", "rows.jsonl")
    assert [message.role for message in row.prompt] == ["user"]
    assert row.reply is not None and row.reply.content == "7"


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        list(read_messages(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="is not a file"):
        list(read_messages(tmp_path))
    for content in (b"", b"\xef\xbb\xbf", b"\n \r\n"):
        path = tmp_path / "empty.jsonl"
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"empty\.jsonl holds no rows") as caught:
            list(read_messages(path))
        assert "\n" not in str(caught.value)


def test_pairs_are_kept_or_quarantined(tmp_path: Path) -> None:
    user, reply = '{"role": "user", "content": "3+4=?"}', '{"role": "assistant", "content": "7"}'
    cases = [
        (f'[{user}], "chosen": "7", "rejected": "8"', None),
        (f'[{user}], "chosen": [{reply}], "rejected": "8 ", "answer": null', None),
        (f'[{user}], "chosen": "7", "rejected": "8", "answer": "7", "id": "x"', None),
        (f'[{user}], "chosen": "7", "rejected": " 7"', "equal_pair"),
        (f'[{user}], "chosen": "7", "rejected": " "', "empty_content"),
        (f'[{user}], "chosen": "7"', "incomplete_pair"),
        (f'[{user}], "rejected": "7", "answer": "7"', "incomplete_pair"),
        (f'[{user}], "chosen": null, "rejected": "8"', "null_content"),
        (f'[{user}], "chosen": 7, "rejected": "8"', "non_string_content"),
        (f'[{user}], "chosen": "<|im_end|>", "rejected": "8"', "special_token_in_content"),
        (f'[{user}], "chosen": "\\ud83d", "rejected": "8"', "bad_unicode"),
        (f'[{user}], "chosen": [{user}, {reply}], "rejected": "8"', "schema_mismatch"),
        (f'[{user}], "chosen": [{user}], "rejected": "8"', "schema_mismatch"),
        (f'[{user}], "chosen": [], "rejected": "8"', "schema_mismatch"),
        (f'[{user}, {reply}], "chosen": "7", "rejected": "8"', "pair_after_assistant"),
        (f'[{user}, {user}], "chosen": "7", "rejected": "8"', "consecutive_user"),
        ('[], "chosen": "7", "rejected": "8"', "empty_messages"),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"messages": {row}}}\n' for row, _ in cases))
    checked, reasons, rejected = load(path)
    assert reasons == {index: reason for index, (_, reason) in enumerate(cases) if reason is not None}
    assert [row.pair for row in checked] == [("7", "8"), ("7", "8 "), ("7", "8")]
    assert [(row.answer, row.own_id) for row in checked] == [(None, None), (None, None), ("7", "x")]
    values = {row.row: row.value for row in rejected}
    assert values[3] == "('7', ' 7')" and values[5] == "only 'chosen'"
