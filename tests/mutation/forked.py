"""Runs mutants in children forked from a process that has imported the slow libraries but not the algorithms."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

# Of the processor, so that a busy machine ends no mutant early; of the clock, for one that sleeps.
CPU_S, WALL_S = 40, 600.0
# It measures seconds: on a busy machine it would kill mutants that it should not.
_TIMED = "tests/parity/test_allocation.py::test_a_million_prompts_in_a_second"
_MEMORY_BYTES = 6 << 30  # above what is mapped at the fork: a mutant may ask for 2**64 prompts
KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"


@dataclass(frozen=True)
class Job:
    """A module's mutated text and the test files to run on it."""

    name: str
    module: str
    path: Path
    source: str
    tests: tuple[str, ...]


class _Mutated(importlib.machinery.SourceFileLoader):
    def __init__(self, job: Job) -> None:
        super().__init__(job.module, str(job.path))
        self._job = job

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._job.source, str(self._job.path), "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, job: Job) -> None:
        self._job = job

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> object:
        if fullname != self._job.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._job.path, loader=_Mutated(self._job))


def warm() -> None:
    """Imports what every test run needs, once."""
    import hypothesis  # noqa: F401
    import numpy.testing  # noqa: F401
    import pytest  # noqa: F401
    import torch

    torch.set_num_threads(1)
    if any(name.startswith("dynamo_core.algorithms") for name in sys.modules):
        raise RuntimeError("the algorithms are imported already: children would test the unchanged code")


def run_all(jobs: Iterable[Job], workers: int) -> Iterator[tuple[Job, str, float]]:
    """(job, outcome, seconds) as the children end, at most `workers` at a time."""
    running: dict[int, tuple[Job, float]] = {}
    for job in jobs:
        while len(running) >= workers:
            yield from _ended(running)
        running[_start(job)] = (job, time.monotonic())
    while running:
        yield from _ended(running)


def _ended(running: dict[int, tuple[Job, float]]) -> Iterator[tuple[Job, str, float]]:
    time.sleep(0.02)
    for pid, (job, started) in list(running.items()):
        seconds = time.monotonic() - started
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            outcome = {0: SURVIVED, -signal.SIGXCPU: TIMEOUT}.get(code, KILLED)
        elif seconds > WALL_S:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            outcome = TIMEOUT
        else:
            continue
        del running[pid]
        yield job, outcome, seconds


def _start(job: Job) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _limit()
        status = _run(job)
    finally:
        os._exit(status)


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 5))


def _run(job: Job) -> int:
    import pytest

    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    sys.meta_path.insert(0, _Finder(job))
    options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", f"--deselect={_TIMED}"]
    return int(pytest.main([*options, *job.tests]))
