"""One rank of two dies: the other ends with it, and the stage says which one died, of what, and after which step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from dynamo_core.config.spec import StageSpec
from tasks.launch import run_stage_process
from tasks.post_mortem import StageLost
from tests.faults import harness

DEADLINE = 30.0
"""Seconds within which nothing of the stage may be left."""


def ranks_of(folder: Path) -> dict[int, psutil.Process]:
    """rank -> process, of the stage in `folder`."""
    found = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        line, variables = process.info["cmdline"] or [], process.info["environ"] or {}
        if "dynamo_core.stages" in " ".join(line) and str(folder) in line and "RANK" in variables:
            found[int(variables["RANK"])] = process
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_takes_the_others_with_it(victim, inputs, tmp_path):
    recipe = harness.recipe("stages.teacher.steps=4000", "stages.teacher.resources={processes: 2, threads: 1}")
    folder = harness.prepare(recipe, "teacher", inputs, tmp_path)
    killed: list[float] = []
    ranks: dict[int, psutil.Process] = {}

    def watch() -> None:
        metrics = folder / "metrics.jsonl"
        if not killed and metrics.exists() and metrics.read_text().count("\n") > 3:
            ranks.update(ranks_of(folder))
            os.kill(ranks[victim].pid, signal.SIGKILL)
            killed.append(time.monotonic())

    said = (
        rf"^stage 'teacher': rank {victim} was killed by SIGKILL after step \d+ \(the system may have run out of memory"
    )
    with pytest.raises(StageLost, match=said):
        run_stage_process(folder, StageSpec.read(folder), watch)
    assert time.monotonic() - killed[0] < DEADLINE
    assert len(ranks) == 2
    assert not any(process.is_running() for process in ranks.values())
