"""Merging and splitting: stable under added rows, no prompt on both sides, copies and contradictions named."""

from __future__ import annotations

from dynamo_core.config.data import ArithmeticSource, Split
from dynamo_core.data.generators import generate
from dynamo_core.data.rows import order_key
from dynamo_core.data.schema import CheckedRow, validate
from dynamo_core.data.splits import merge_prompts, prompt_digest, split_of, split_rows
from dynamo_core.types import Message

SPLIT = Split(validation=0.1, test=0.2)


def row(
    number: int,
    question: str,
    reply: str | None = None,
    answer: str | None = None,
    own_id: str | None = None,
    pair: tuple[str, str] | None = None,
):
    return CheckedRow(
        file="f",
        row=number,
        source="f",
        prompt=(Message("user", question),),
        reply=None if reply is None else Message("assistant", reply),
        answer=answer,
        difficulty="",
        own_id=own_id,
        pair=pair,
    )


def arithmetic(problems: int) -> list[CheckedRow]:
    source = ArithmeticSource(type="arithmetic", problems=problems, terms=(5,), wrong_share=(0.5,))
    return validate(list(generate(source, seed=0)))[0]


def questions(rows: list[dict]) -> list[str]:
    return [stored["messages"][0]["content"] for stored in rows]


def test_added_rows_move_no_old_row() -> None:
    many = arithmetic(2000)
    few = split_rows(merge_prompts(many[::4])[0], SPLIT, None)
    all_rows = split_rows(merge_prompts(reversed(many))[0], SPLIT, None)
    for name, kept in few.items():
        assert len(kept) > 20
        assert set(questions(kept)) <= set(questions(all_rows[name]))


def test_shares_are_as_asked_and_no_prompt_is_in_two_splits() -> None:
    found = split_rows(merge_prompts(arithmetic(3000))[0], SPLIT, None)
    sizes = {name: len(rows) for name, rows in found.items()}
    # 3,000 prompts: three standard deviations are at most 3 * sqrt(3000 * .2 * .8) = 66.
    assert abs(sizes["test"] - 600) < 66 and abs(sizes["validation"] - 300) < 50
    assert sizes["rl"] == sizes["sft"] == 3000 - sizes["test"] - sizes["validation"]
    train = set(questions(found["sft"])) | set(questions(found["rl"]))
    assert train.isdisjoint(questions(found["test"])) and train.isdisjoint(questions(found["validation"]))
    assert set(questions(found["test"])).isdisjoint(questions(found["validation"]))


def test_variants_in_layout_share_a_split_but_not_an_id() -> None:
    for number in range(200):
        plain, spaced = (Message("user", f"caf\u00e9 {number}?"),), (Message("user", f" cafe\u0301  {number}?\n"),)
        assert split_of(plain, SPLIT) == split_of(spaced, SPLIT)
        assert prompt_digest(plain) != prompt_digest(spaced)


def test_rl_prompts_keeps_those_of_lowest_digest_and_grows() -> None:
    prompts, _ = merge_prompts(arithmetic(500))
    every = [stored["prompt_id"] for stored in split_rows(prompts, SPLIT, None)["rl"]]
    assert every == sorted(every, key=order_key)
    limited = split_rows(prompts, SPLIT, 50)
    assert [stored["prompt_id"] for stored in limited["rl"]] == every[:50]
    assert len(limited["sft"]) == len(every), "the limit concerns reinforcement alone"


def test_demonstration_and_task_of_one_prompt_share_id_and_split() -> None:
    rows = [row(0, "a", reply="x"), row(1, "a", reply="y"), row(2, "a", answer="1")]
    (prompt,), rejected = merge_prompts(rows)
    assert rejected == []
    assert prompt.prompt_id == prompt_digest(rows[0].prompt, "1")
    assert (list(prompt.replies), prompt.answer) == (["x", "y"], "1")
    found = split_rows([prompt], Split(validation=0.0, test=0.0), None)
    assert {stored["prompt_id"] for stored in found["sft"] + found["rl"]} == {prompt.prompt_id}
    assert (len(found["sft"]), len(found["rl"])) == (2, 1)
    held_out = split_rows([prompt], Split(validation=0.0, test=0.999999), None)
    assert (len(held_out["sft"]), len(held_out["rl"]), len(held_out["test"])) == (0, 0, 1)


def test_copies_are_named_and_the_first_stays() -> None:
    rows = [row(0, "a", "x", "1"), row(1, "a", "x", "1"), row(2, "a", "y", "1"), row(3, "a", None, "1")]
    (prompt,), rejected = merge_prompts(rows)
    assert [(one.row, str(one.reason)) for one in rejected] == [(1, "duplicate_exact"), (3, "duplicate_exact")]
    assert list(prompt.replies) == ["x", "y"]


def test_conflicting_golds_go_both() -> None:
    rows = [row(0, "a", None, "1"), row(1, "b", None, "1"), row(2, "a", "x", "2"), row(3, "a", "x")]
    prompts, rejected = merge_prompts(rows)
    assert [(one.row, str(one.reason), one.value) for one in rejected] == [
        (0, "conflicting_gold", "1 / 2"),
        (2, "conflicting_gold", "1 / 2"),
    ]
    assert [(prompt.answer, list(prompt.replies)) for prompt in prompts] == [(None, ["x"]), ("1", [])]


def test_one_id_for_two_prompts_is_refused() -> None:
    rows = [row(0, "a", None, "1", own_id="7"), row(1, "b", None, "2", own_id="7"), row(2, "c", None, "3", own_id="8")]
    prompts, rejected = merge_prompts(rows)
    assert [prompt.prompt_id for prompt in prompts] == ["7", "8"]
    assert [(one.row, str(one.reason), one.value) for one in rejected] == [(1, "conflicting_id", "7")]


def test_pairs_stay_with_the_training_prompts_and_copies_are_named() -> None:
    prompts, rejected = merge_prompts(
        [
            row(0, "1+1?", answer="2"),
            row(1, "1+1?", pair=("2", "3")),
            row(2, "1+1?", pair=("2", "4")),
            row(3, "1+1?", pair=("2", "3")),
        ]
    )
    assert [(found.row, str(found.reason)) for found in rejected] == [(3, "duplicate_exact")]
    splits = split_rows(prompts, Split(validation=0.0, test=0.0), None)
    assert [(stored["chosen"], stored["rejected"]) for stored in splits["preference"]] == [("2", "3"), ("2", "4")]
    assert {stored["prompt_id"] for stored in splits["preference"]} == {splits["rl"][0]["prompt_id"]}
    everything = split_rows(merge_prompts(arithmetic(600))[0], SPLIT, None)
    assert questions(everything["preference"]) == questions(everything["sft"])
    assert set(questions(everything["preference"])).isdisjoint(questions(everything["test"]))
