"""The answer checker on plain numbers: exact, quick, never paid by accident, and silent about unusable golds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_core.config.reinforce import MathAnswerReward
from dynamo_core.rewards.math_answer import after_marker, last_box, parse_number
from dynamo_core.rewards.protocol import make_reward
from dynamo_core.types import PromptRow, Verdict

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "reward_numbers.jsonl").read_text(encoding="utf-8").splitlines()
]


def judge(answer: str, completion: str, form: str = "gsm8k") -> Verdict:
    config = MathAnswerReward.model_validate({"format": form})
    return make_reward(config)(PromptRow("p", (), answer, "", ""), completion)


@pytest.mark.parametrize("case", CASES, ids=[str(number) for number in range(len(CASES))])
def test_public_cases(case: dict) -> None:
    completion = "".join(text * times for text, times in case["completion"])
    start = time.perf_counter()
    verdict = judge(case["answer"], completion, case["format"])
    assert time.perf_counter() - start < 1
    correct = {"correct": True, "incorrect": False, "invalid_gold": None}[case["expected"]]
    assert (verdict.correct, verdict.score) == (correct, None if correct is None else float(correct)), case["why"]


@pytest.mark.parametrize(
    ("answer", "completion", "reason"),
    [
        ("7", "3+4=7\n#### 7", "correct"),
        ("7", "#### 8\n#### 7", "correct"),
        ("7", "#### 7\n#### 8", "wrong"),
        ("7", "so 7", "no_answer"),
        ("7", "####", "no_answer"),
        ("7", "####\n7", "no_answer"),
        ("7", "", "no_answer"),
        ("7", "#### seven", "not_a_number"),
        ("7", "#### 7 or 8", "not_a_number"),
        ("7", "#### 7 8", "not_a_number"),
        ("78", "#### 7,8", "not_a_number"),
        ("52", "#### 5\u00b2", "not_a_number"),
        ("9007199254740992", "#### 9007199254740993", "wrong"),
        ("9007199254740993", "#### 9007199254740993.0", "correct"),
        ("1/3", "#### 0.3333333333333333", "wrong"),
        ("0.1", "#### 1/10", "correct"),
        ("-1/2", "#### -\\frac{1}{2}", "correct"),
        ("1250", "#### \uff11,\uff12\uff15\uff10", "correct"),
        ("-5", "#### -$5", "correct"),
        ("100000", "#### 1e5", "correct"),
        ("1", "#### 1e1001", "not_a_number"),
        ("1", "#### 1/0", "not_a_number"),
        ("1", "#### 0/0", "not_a_number"),
        ("1", "#### 1/2/2", "not_a_number"),
        ("7", "#### --7", "not_a_number"),
        ("about 7", "#### 7", "unverifiable_gold"),
        ("", "#### 7", "unverifiable_gold"),
        ("nan", "#### nan", "unverifiable_gold"),
        ("3+4=7\n#### 7", "#### 7", "correct"),
    ],
)
def test_gsm8k(answer: str, completion: str, reason: str) -> None:
    verdict = judge(answer, completion)
    assert verdict.reason == reason
    assert verdict.correct is (None if reason == "unverifiable_gold" else reason == "correct")


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}} then \boxed{\frac{3}{4}}.", r"\frac{3}{4}"),
        (r"\boxed{\boxed{7}}", r"\boxed{7}"),
        (r"\boxed{7", None),
        (r"\boxed{4} and \boxed{7", "4"),
        (r"\boxed{}", None),
        (r"a } b \boxed{7} c {", "7"),
        (r"{ \boxed{7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"<think>\boxed{9}</think> none", None),
        (r"<think>\boxed{9}", None),
        (r"<think>\boxed{9}</think>\boxed{7}", "7"),
    ],
)
def test_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


def test_a_number_in_nested_boxes_counts() -> None:
    assert judge("7", r"\boxed{\boxed{7}}", "boxed").correct is True


@pytest.mark.parametrize(
    "completion",
    [
        "#### 1e1000000000",
        "#### 1e-999999999",
        "#### " + "7" * 1_000_000,
        "#### " + "1," * 500_000,
        "#" * 1_000_000,
        "#### " + "/" * 1_000_000,
        "#### " + r"\text{" * 1_500 + "7" + "}" * 1_500,
        r"\boxed{" * 200_000,
        r"\boxed{" + "(" * 100_000 + "7" + ")" * 100_000 + "}",
        r"\boxed{\frac" + "{" * 200_000 + "}" * 200_001,
        r"\boxed" + " " * 1_000_000,
        "<think>" * 200_000,
    ],
)
def test_hostile_text_is_refused_at_once(completion: str) -> None:
    for form in ("gsm8k", "boxed"):
        start = time.perf_counter()
        assert judge("7", completion, form).correct is False
        assert time.perf_counter() - start < 2  # about 0.2 s on an idle core


def test_long_numbers_compare_exactly() -> None:
    digits = "7" * 9_000
    assert judge(digits, f"#### {digits}").correct is True
    assert judge(digits, f"#### {digits[:-1]}8").correct is False


@settings(max_examples=200, deadline=None)
@given(st.fractions(), st.booleans())
def test_fractions_and_their_written_forms_agree(value: Fraction, latex: bool) -> None:
    top, bottom = abs(value.numerator), value.denominator
    text = rf"\frac{{{top}}}{{{bottom}}}" if latex else f"{top:,}/{bottom:,}"
    assert parse_number(("-" if value < 0 else "") + text) == value


@settings(max_examples=200, deadline=None)
@given(st.integers(), st.integers(0, 12))
def test_decimals_are_exact(digits: int, places: int) -> None:
    text = f"{abs(digits):0{places + 1}d}"
    text = f"{text[: len(text) - places]}.{text[len(text) - places :]}" if places else text
    assert parse_number(("-" if digits < 0 else "") + text) == Fraction(digits, 10**places)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*"0123456789#.,/-+e${}\\ <>\n\u0661", "####", "\\boxed{", "\\frac", "</think>"])).map(
        "".join
    )
)
def test_no_text_raises(text: str) -> None:
    for form in ("gsm8k", "boxed"):
        assert judge("7", text, form).correct in (True, False)
        judge(text, "#### 7", form)
    after_marker(text)


def test_rewards_need_no_torch() -> None:
    code = "import sys, dynamo_core.rewards.protocol; print(sorted({'torch', 'pandas', 'sympy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
