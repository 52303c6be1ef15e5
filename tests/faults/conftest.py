"""Inputs and uninterrupted runs that the fault tests compare with."""

from __future__ import annotations

import pytest

from tests.builders import run_stage
from tests.faults import harness


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """Finished data, teacher and student."""
    root = tmp_path_factory.mktemp("inputs")
    for name in ("data", "teacher", "student"):
        run_stage(harness.recipe(), name, root)
    return root


@pytest.fixture(scope="session")
def undisturbed(inputs, tmp_path_factory):
    """(stage, processes) -> outcome of a run without faults, computed once."""
    root, known = tmp_path_factory.mktemp("undisturbed"), {}

    def of(name: str, processes: int = 1):
        if (name, processes) not in known:
            folder = harness.prepare(harness.recipe(), name, inputs, root / str(processes))
            status, output = harness.run(folder, processes)
            assert status == 0, output
            known[name, processes] = harness.outcome(folder)
        return known[name, processes]

    return of
