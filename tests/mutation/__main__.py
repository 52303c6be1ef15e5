"""Mutation score of dynamo_core/algorithms under tests/parity, on a fixed random sample.

Run: python -m tests.mutation [--check] [--jobs N]; needs the extra `mutation`. --check exits 1 below the target.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

from tests.mutation import forked, mutants, results, selection

SIZE, TARGET = 400, 0.90
EXAMPLES = "25"  # of each property; derandomised
_ROOT = Path(__file__).parents[2]
_ALGORITHMS, _PARITY = _ROOT / "dynamo_core" / "algorithms", _ROOT / "tests" / "parity"
_EXPLAINED = Path(__file__).with_name("SURVIVORS.md")
_RESULTS = _ROOT / "var" / "mutation" / "results.jsonl"


def _job(mutant: mutants.Mutant) -> forked.Job:
    module = f"dynamo_core.algorithms.{mutant.path.stem}"
    tests = selection.tests_of(module, _PARITY, _ROOT)
    return forked.Job(mutant.name, module, mutant.path, mutant.source(), tests)


def _outcomes(jobs: list[forked.Job], workers: int) -> dict[str, str]:
    """Outcome of each job by name, from the results on disk where they hold."""
    store = results.Results(_RESULTS)
    tests = results.digest(*(path.read_text(encoding="utf-8") for path in sorted(_PARITY.glob("*.py"))))
    known = {job.name: store.get(job.name, results.digest(job.source), tests) for job in jobs}
    outcomes = {name: result.outcome for name, result in known.items() if result is not None}
    waiting = [job for job in jobs if job.name not in outcomes]
    print(f"{len(outcomes)} known, {len(waiting)} to run", flush=True)
    for count, (job, outcome, seconds) in enumerate(forked.run_all(waiting, workers), 1):
        store.add(results.Result(job.name, results.digest(job.source), tests, outcome, round(seconds, 2)))
        outcomes[job.name] = outcome
        print(f"{count:4d} {outcome:8s} {seconds:5.1f} s  {job.name}", flush=True)
    return outcomes


def _unchanged_passes(jobs: list[forked.Job]) -> bool:
    """A test that fails on the unchanged code would kill every mutant."""
    job = jobs[0]
    every = tuple(str(path) for path in sorted(_PARITY.glob("test_*.py")))
    plain = forked.Job("unchanged", job.module, job.path, job.path.read_text(encoding="utf-8"), every)
    return [outcome for _, outcome, _ in forked.run_all([plain], 1)] == [forked.SURVIVED]


def _table(chosen: list[mutants.Mutant], outcomes: dict[str, str]) -> None:
    print(f"\n{'file':24s} {'killed':>7s} {'timeout':>8s} {'survived':>9s}")
    for path in sorted({mutant.path for mutant in chosen}):
        count = Counter(outcomes[mutant.name] for mutant in chosen if mutant.path == path)
        print(f"{path.name:24s} {count[forked.KILLED]:7d} {count[forked.TIMEOUT]:8d} {count[forked.SURVIVED]:9d}")


def _report(chosen: list[mutants.Mutant], outcomes: dict[str, str], in_all: int) -> bool:
    """Print survivors, table and summary; whether the target is met."""
    survivors = [mutant for mutant in chosen if outcomes[mutant.name] == forked.SURVIVED]
    explained = _EXPLAINED.read_text(encoding="utf-8")
    new = [mutant for mutant in survivors if f"`{mutant.name}`" not in explained]
    for mutant in survivors:
        print(f"\nsurvived{', not explained' if mutant in new else ''}: {mutant.name}\n{mutant.change()}")
    _table(chosen, outcomes)
    killed, timeouts = len(chosen) - len(survivors), Counter(outcomes.values())[forked.TIMEOUT]
    print(
        f"mutation: {killed} of {len(chosen)} mutants killed ({killed / len(chosen):.1%}), of these {timeouts} by"
        f" timeout; {len(survivors)} survived, {len(new)} of them not explained; {in_all} mutants in all;"
        f" target {TARGET:.0%}"
    )
    return killed >= TARGET * len(chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 below the target")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default 1)")
    parser.add_argument("--size", type=int, default=SIZE, help=f"mutants of the sample (default {SIZE})")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PARITY_EXAMPLES"] = EXAMPLES
    os.chdir(_ROOT)
    everything = mutants.enumerate_mutants(_ALGORITHMS)
    chosen = mutants.sample(everything, options.size)
    jobs = [_job(mutant) for mutant in chosen]
    forked.warm()
    if not _unchanged_passes(jobs):
        print("mutation: the parity tests fail on the unchanged code")
        return 1
    met = _report(chosen, _outcomes(jobs, options.jobs), len(everything))
    return int(options.check and not met)


if __name__ == "__main__":
    sys.exit(main())
