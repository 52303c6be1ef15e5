"""The arithmetic source: right golds, noise of the asked share, and nothing random but the seed."""

from __future__ import annotations

import math
import re

import pytest

from dynamo_core.config.data import ArithmeticSource
from dynamo_core.data import generators
from dynamo_core.data.generators import Chain, generate
from dynamo_core.data.schema import RawRow, validate
from dynamo_core.errors import DataError

LINE = re.compile(r"(\d+)([+-])(\d+)=(\d+)")


def source(**changes: object) -> ArithmeticSource:
    return ArithmeticSource.model_validate({"type": "arithmetic", "problems": 3000, "terms": (3, 4, 5), **changes})


def texts(row: RawRow) -> tuple[str, str]:
    (_, question), (_, solution) = row.turns
    return str(question), str(solution)


def value(question: str) -> int:
    """The value of a question by Python's own rules: an independent reading of what a chain means."""
    assert re.fullmatch(r"\d+([+-]\d+)+=\?", question)
    return int(eval(question.removesuffix("=?")))  # digits, + and - only, as the line above makes sure


def test_golds_are_right_and_problems_distinct() -> None:
    rows = list(generate(source(), seed=3))
    assert len(rows) == 3000
    assert len({texts(row)[0] for row in rows}) == 3000
    assert all(row.answer == str(value(texts(row)[0])) for row in rows)
    assert [row.row for row in rows] == list(range(3000))
    checked, rejected = validate(rows)
    assert (len(checked), rejected) == (3000, [])


@pytest.mark.parametrize(("terms", "share"), [(3, 0.2), (4, 0.45), (5, 0.7)])
def test_the_wrong_share_is_as_asked(terms: int, share: float) -> None:
    rows = [row for row in generate(source(problems=4500), seed=0) if row.difficulty == str(terms)]
    wrong = sum(texts(row)[1].rpartition("#### ")[2] != row.answer for row in rows)
    # 1,500 draws: four standard deviations are at most 4 * sqrt(.25 / 1500) = 0.052.
    assert abs(wrong / len(rows) - share) < 4 * math.sqrt(share * (1 - share) / len(rows))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_noise_is_one_slip_that_is_carried_on(share: float) -> None:
    for row in generate(source(problems=900, wrong_share=(share,) * 3), seed=1):
        question, solution = texts(row)
        *lines, last = solution.split("\n")
        steps = [LINE.fullmatch(line) for line in lines]
        assert all(steps) and len(steps) == int(row.difficulty) - 1
        found = [step.groups() for step in steps if step is not None]
        results = [int(result) for *_, result in found]
        slips = [int(result) - value(f"{a}{operation}{b}=?") for a, operation, b, result in found]
        assert sum(slip != 0 for slip in slips) == int(share)
        assert [int(a) for a, *_ in found[1:]] == results[:-1], "each line goes on from the one before"
        assert last == f"#### {results[-1]}"
        assert all(0 <= result <= generators.LIMIT for result in results)
        assert results[-1] - value(question) == sum(slips)


def test_a_pair_is_the_right_solution_and_one_with_a_slip() -> None:
    noisy, clean = (list(generate(source(wrong_share=(share,) * 3), seed=1)) for share in (1.0, 0.0))
    assert [row.pair for row in noisy] == [row.pair for row in clean]
    for row in clean:
        assert row.pair is not None
        chosen, rejected = (str(text) for text in row.pair)
        assert chosen == texts(row)[1]
        slips = [int(result) != value(f"{a}{sign}{b}=?") for a, sign, b, result in LINE.findall(rejected)]
        assert (sum(slips), len(slips)) == (1, int(row.difficulty) - 1)
        assert rejected.rpartition("#### ")[2] != row.answer


def test_the_seed_decides_everything() -> None:
    assert list(generate(source(), seed=5)) == list(generate(source(), seed=5))
    first = [texts(row)[0] for row in generate(source(), seed=5)]
    assert first != [texts(row)[0] for row in generate(source(), seed=6)]
    assert first == [texts(row)[0] for row in generate(source(wrong_share=(0.0, 0.0, 0.0)), seed=5)]


def test_problems_are_spread_evenly_over_the_numbers_of_terms() -> None:
    rows = list(generate(source(problems=100, terms=(2, 5, 8)), seed=0))
    assert [sum(row.difficulty == terms for row in rows) for terms in ("2", "5", "8")] == [34, 33, 33]


def test_too_many_problems_are_refused() -> None:
    with pytest.raises(DataError, match=r"2 terms: 200 wanted, 1[0-9][0-9] found"):
        list(generate(source(problems=200, terms=(2,), wrong_share=(0.0,)), seed=0))


def test_a_worked_solution_by_hand() -> None:
    chain = Chain((8, 7, 6, 9), ("+", "-", "+"))
    assert chain.question == "8+7-6+9=?"
    assert chain.solution(chain.partial_results()) == "8+7=15\n15-6=9\n9+9=18\n#### 18"
    assert chain.solution(chain.partial_results(1, 2)) == "8+7=15\n15-6=11\n11+9=20\n#### 20"
