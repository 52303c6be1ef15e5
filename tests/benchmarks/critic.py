"""Does the trained critic earn its place? PPO with a critic beside RLOO: same student, same budget, three seeds.

    python -m tests.benchmarks.critic [--check] [--store FOLDER]

Built-in arithmetic. The student is trained once and shared; each run reinforces it and is evaluated on unseen problems.
Targets: mean explained variance of the last five steps above 0.3, and a mean gain in pass@1 of at least RLOO's - 0.03.
Two runs at a time, one thread each. With --store, finished stages are kept and reused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from dynamo_core.config.load import load_recipe
from dynamo_core.config.recipe import Recipe
from dynamo_core.stages.manifest import MANIFEST
from tests.benchmarks.targets import Target, spread
from tests.builders import CONFIGS, read_metrics, run_stage

SEEDS: Final = (1, 2, 3)
PRESETS: Final = ("ppo", "rloo")
LAST: Final = 5
LEAST_EXPLAINED: Final = 0.3
MARGIN: Final = 0.03


class Outcome(NamedTuple):
    """Of one run: pass@1 on unseen problems before and after, explained variance over the last steps."""

    before: float
    after: float
    explained: float | None


def recipe(preset: str, seed: int) -> Recipe:
    """The quickstart's data and sizes; its teacher, made as small as the student, is what is reinforced."""
    critic = ["stages.reinforced.critic={optimizer: {lr: 1e-3}, warmup_steps: 2}"] if preset == "ppo" else []
    return load_recipe(
        CONFIGS / "quickstart.yaml",
        [
            f"seed={seed}",
            "resources.processes=1",
            "stages.teacher.model.layers=3",
            "stages.teacher.steps=600",
            "stages.reinforced.model_from=teacher",
            f"stages.reinforced.preset={preset}",
            "stages.reinforced.steps=25",
            *critic,
            "stages.evaluation.models_from=[teacher, reinforced]",
            "stages.evaluation.latency={prompts: 1}",
        ],
    )


def stage(made: Recipe, name: str, store: Path) -> Path:
    """Run a stage, unless its folder is finished already."""
    folder = store / name
    return folder if (folder / MANIFEST).exists() else run_stage(made, name, store)


def outcome(preset: str, seed: int, shared: Path, store: Path) -> Outcome:
    """Reinforce and evaluate once."""
    store.mkdir(parents=True, exist_ok=True)
    for name in ("data", "teacher"):
        if not (store / name).exists():
            (store / name).symlink_to(shared / name)
    made = recipe(preset, seed)
    lines = read_metrics(stage(made, "reinforced", store))
    explained = [line["values"].get("critic/explained_variance") for line in lines[-LAST:]]
    results = json.loads((stage(made, "evaluation", store) / "results.json").read_text())
    before, after = (model["metrics"]["sampled_pass@1"]["value"] for model in results["models"])
    return Outcome(before, after, None if preset == "rloo" else sum(explained) / LAST)


def main() -> int:
    """Print every run; 1 when checked and below target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--store", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        store = (options.store or Path(temporary)).resolve()
        shared = store / "shared"
        for name in ("data", "teacher"):
            stage(recipe("rloo", 1), name, shared)
        runs = [(preset, seed) for seed in SEEDS for preset in PRESETS]
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(outcome, *run, shared, store / f"{run[0]}-{run[1]}") for run in runs]
            found = dict(zip(runs, (future.result() for future in futures), strict=True))
    for (preset, seed), one in found.items():
        said = "" if one.explained is None else f", explained variance {one.explained:.3f}"
        print(f"{preset} seed {seed}: pass@1 {one.before:.3f} -> {one.after:.3f}{said}", flush=True)
    explained = [one.explained for one in found.values() if one.explained is not None]
    gains = {
        name: spread([one.after - one.before for (p, _), one in found.items() if p == name])[0] for name in PRESETS
    }
    targets = [
        *(
            Target(f"1 - explained variance, seed {s}", 1 - e, 1 - LEAST_EXPLAINED)
            for s, e in zip(SEEDS, explained, strict=True)
        ),
        Target("RLOO's mean gain - PPO's", gains["rloo"] - gains["ppo"], MARGIN),
    ]
    for target in targets:
        print(target)
    met = all(target.met for target in targets)
    print(
        f"critic: explained variance {', '.join(f'{value:.3f}' for value in explained)} (above {LEAST_EXPLAINED});"
        f" mean gain ppo {gains['ppo']:+.3f}, rloo {gains['rloo']:+.3f} (at most {MARGIN} below):"
        f" {'met' if met else 'MISSED'}"
    )
    return int(options.check and not met)


if __name__ == "__main__":
    sys.exit(main())
