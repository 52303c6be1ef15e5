"""kill -9 at random moments, then run again until the stage is done: everything must be bitwise as without the kills.

    python -m tests.faults.kill [--times 20] [--seed 0] [--check]

The kills are spread over sft, distill and reinforce with critic, on one rank and on two (ZeRO 2); every fourth falls
inside a save. Compared are `values` of every step, the published weights, and all engine states of the last
checkpoint, which lies one step before the end.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.builders import run_stage
from tests.faults import harness

CASES = [(name, processes) for name in harness.TRAINING for processes in (1, 2)]
OVERRIDES = [
    "stages.reinforced.preset=exact_ppo",
    "stages.reinforced.critic={optimizer: {lr: 1e-3}, warmup_steps: 1}",
    "stages.reinforced.kl={place: loss, kind: k3, coefficient: 0.1, target: 1e-3, horizon: 50}",
    "stages.teacher.steps=400",
    "stages.teacher.checkpoints.every=19",
    "stages.student.steps=400",
    "stages.student.checkpoints.every=19",
    "stages.reinforced.steps=31",
    "stages.reinforced.checkpoints.every=3",
]
_ZERO = [f"stages.{name}.engine.zero_stage=2" for name in harness.TRAINING]


def recipe(processes: int):
    """Stages of several seconds with frequent checkpoints."""
    return harness.recipe(*OVERRIDES, *(_ZERO if processes > 1 else []))


def kill_tree(pid: int) -> None:
    """SIGKILL to a launcher and its ranks."""
    tree = [psutil.Process(pid)]
    tree += tree[0].children(recursive=True)
    for process in tree:
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def killed_and_restarted(folder: Path, processes: int, number: int, seconds: float, generator: random.Random) -> str:
    """Kill one run at a random moment of its training (or inside a save), then let another finish; says where."""
    if number % 4 == 3:
        save = generator.randint(1, 6)
        status, _ = harness.run(folder, processes, ["--kill-in-save", str(save)])
        assert status != 0, "it should have been killed"
        where = f"inside save {save}"
    else:
        process = harness.start(folder, processes)
        metrics = folder / "metrics.jsonl"
        while not metrics.exists() and process.poll() is None:
            time.sleep(0.02)
        time.sleep(generator.uniform(0, seconds))
        lines = metrics.read_text().count("\n") if metrics.exists() else 0
        if process.poll() is None:
            kill_tree(process.pid)
        harness.finish(process)
        where = f"after step {lines}"
    status, output = harness.run(folder, processes)
    assert status == 0, output
    return where


def main() -> int:
    """Print a line a kill and a summary; 1 when checked and any run differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    generator = random.Random(options.seed)
    equal = 0
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for name in ("data", "teacher", "student"):
            run_stage(harness.recipe(), name, root / "inputs")
        expected, seconds = {}, {}
        for name, processes in CASES[: options.times]:
            folder = harness.prepare(recipe(processes), name, root / "inputs", root / f"whole-{name}-{processes}")
            status, output = harness.run(folder, processes)
            assert status == 0, output
            expected[name, processes] = harness.outcome(folder)
            seconds[name, processes] = sum(line["timings"]["seconds/step"] for line in harness.read_metrics(folder))
        for number in range(options.times):
            name, processes = CASES[number % len(CASES)]
            case = name, processes
            folder = harness.prepare(recipe(processes), name, root / "inputs", root / f"killed{number}")
            where = killed_and_restarted(folder, processes, number, seconds[case], generator)
            try:
                harness.assert_equal(harness.outcome(folder), expected[case])
            except AssertionError as error:
                verdict = f"DIFFERS: {error}"
            else:
                equal, verdict = equal + 1, "equal"
            print(f"{number + 1:3d} {name} on {processes} rank(s), killed {where}: {verdict}", flush=True)
    print(f"kill -9: {equal} of {options.times} runs finished bitwise equal after their restart")
    return int(options.check and equal < options.times)


if __name__ == "__main__":
    sys.exit(main())
