"""Every public training case is solved by value, shown by a test that exists, or says why it has no subject."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.cases import (
    shown_by,
    test_train_files,  # noqa: F401  fills SOLVED
    test_train_numbers,  # noqa: F401
    test_train_tokens,  # noqa: F401
)
from tests.cases.support import SOLVED, train_cases

TESTS = Path(__file__).parents[1]


def names_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_every_case_has_its_place():
    places = [set(SOLVED), set(shown_by.BEHAVIOUR), set(shown_by.WITHOUT_SUBJECT), set(shown_by.OPEN)]
    assert sum(map(len, places)) == len(set().union(*places))
    assert set().union(*places) == set(train_cases())


def test_values_are_solved_and_not_only_shown():
    for key, case in train_cases().items():
        if case["check"] != "behaviour" and key in shown_by.BEHAVIOUR:
            assert case["kind"] in {"orchestration", "tracking"}, key


def test_the_tests_named_exist():
    for key, name in shown_by.BEHAVIOUR.items():
        path, test = name.split("::")
        assert test in names_of(TESTS / path), key


def test_most_behaviours_are_shown():
    asked = {key for key, case in train_cases().items() if case["check"] == "behaviour"}
    shown = asked & (set(shown_by.BEHAVIOUR) | set(shown_by.WITHOUT_SUBJECT))
    print(f"{len(SOLVED)} cases by value, {len(shown)} of {len(asked)} behaviours shown, open: {sorted(shown_by.OPEN)}")
    assert len(shown) >= 0.8 * len(asked)
