"""Mutation testing's own parts: what counts, which tests run, which results hold."""

from __future__ import annotations

from pathlib import Path

from tests.mutation import counted, mutants, results, selection

ROOT = Path(__file__).parents[2]
SOURCE = '''"""One text, 1 + 1."""
from math import pi
__all__ = ["f"]
LIMIT: int | None = 3
class A:
    def f(self, x: int | None) -> int | None:
        """Text, 2 + 2."""
        require(x > 0, "x", x + 1, "positive")
        if x > LIMIT:
            fail("x", x - LIMIT, "at most")
            raise ValueError("x" * 2)
        return x + 1
'''


def _position(text: str) -> tuple[int, int]:
    before = SOURCE[: SOURCE.index(text)]
    return before.count("\n") + 1, len(before) - before.rfind("\n") - 1


def test_texts_and_annotations_do_not_count() -> None:
    source = counted.read(SOURCE)
    for text in ("1 + 1.", "2 + 2", "pi", '"f"', "int | None = 3", "int | None)", "int | None:", "x + 1,", "x - LIMIT"):
        assert not source.counts(_position(text)), text
    for text in ("3\n", "x > 0", "x > LIMIT", "x + 1\n"):
        assert source.counts(_position(text)), text


def test_a_line_belongs_to_its_innermost_function() -> None:
    source = counted.read(SOURCE)
    assert [source.function(line) for line in (1, 5, 6, 12)] == ["module", "A", "A.f", "A.f"]


def test_operators_within_a_family_count() -> None:
    assert mutants.wanted("ReplaceBinaryOperator_Add_Sub")
    assert not mutants.wanted("ReplaceBinaryOperator_Add_LShift")
    assert not mutants.wanted("ReplaceComparisonOperator_Lt_Is")
    assert mutants.wanted("ReplaceUnaryOperator_Delete_Not")
    assert not mutants.wanted("NoOp")


def test_a_mutant_runs_the_tests_that_reach_its_module_those_that_import_it_first() -> None:
    def names(module: str) -> list[str]:
        chosen = selection.tests_of(f"dynamo_core.algorithms.{module}", ROOT / "tests" / "parity", ROOT)
        return [Path(path).name for path in chosen]

    assert "test_kl.py" in names("kl")
    assert "test_schedules.py" not in names("kl")
    assert "test_allocation.py" in names("kkt")  # through allocation.py
    assert names("integer_optimum")[0] == "test_allocation_effort.py"
    assert names("allocation")[-3:] == ["test_allocation.py", "test_allocation_properties.py", "test_public_names.py"]


def test_new_tests_run_the_survivors_again_and_only_them(tmp_path: Path) -> None:
    store = results.Results(tmp_path / "results.jsonl")
    store.add(results.Result("a", "s1", "t1", "killed", 1.0))
    store.add(results.Result("b", "s1", "t1", "survived", 1.0))
    store = results.Results(tmp_path / "results.jsonl")
    assert store.get("a", "s1", "t2") is not None
    assert store.get("b", "s1", "t1") is not None
    assert store.get("b", "s1", "t2") is None
    assert store.get("a", "s2", "t1") is None
    assert store.get("c", "s1", "t1") is None
