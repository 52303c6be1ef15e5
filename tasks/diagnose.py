"""`dynamo-rl diagnose`: the symptoms that a run's stages show, with likely causes and the keys that help.

Reads what stages wrote: spec.json, metrics.jsonl, error.json. Imports nothing heavy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from dynamo_core.config.load import load_recipe
from dynamo_core.config.spec import StageSpec
from dynamo_core.errors import DynamoError, RecipeError
from dynamo_core.stages.manifest import MANIFEST
from dynamo_core.stages.symptoms import ALARMS, FAILURES, GATES, TRENDS, Symptom
from tasks.follow import MetricsLine, StageFollower
from tasks.progress import total_steps
from tasks.store import Store
from tasks.terminal import out, say

FEWEST_STEPS: Final = 20
"""From which on a trend means something."""
SOLVED: Final = 0.95
"""Share of right answers that has no need to rise."""
_TREND: Final = {symptom.name: symptom for symptom in TRENDS}


@dataclass(frozen=True)
class Finding:
    """A symptom that a stage shows, and what was measured."""

    symptom: Symptom
    measured: str


def print_diagnosis(target: str, store: Store) -> None:
    """Print a table of the symptoms of a run's stages, or that there are none.

    Raises:
        RecipeError: there is no such run or stage.
    """
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, pad_edge=False)
    for column in ("symptom", "likely causes, in order", "what helps"):
        table.add_column(column, overflow="fold")
    healthy = []
    for name, folder in find_stages(target, store).items():
        findings = diagnose(folder)
        for finding in findings:
            causes = "\n".join(f"{number}. {cause}" for number, cause in enumerate(finding.symptom.causes, start=1))
            helps = "\n".join(key.replace("`", "") for key in finding.symptom.keys)
            seen = f"{name}: {finding.symptom.title}\n{finding.measured}"
            table.add_row(*(Text(cell) for cell in (seen, causes, helps)))  # a prompt's id may look like markup
        if not findings:
            healthy.append(f"{name}: nothing is wrong ({progress(folder)})")
    if table.row_count:
        out.print(table, soft_wrap=False)
    for line in healthy:
        say(line)


def find_stages(target: str, store: Store) -> dict[str, Path]:
    """Stage -> folder, of what `target` names.

    Raises:
        RecipeError: nothing is called so.
    """
    for folder in (Path(target), store.root / "stages" / target):
        if (folder / "spec.json").exists():
            return {StageSpec.read(folder).name: folder}
    runs = sorted((store.root / "runs").glob("*/recipe.yaml"), reverse=True)
    for path in runs:
        run_id = path.parent.name
        if target == run_id or target in _names(path, run_id):
            stages = {name: folder for name, folder in store.stages_of(run_id).items() if folder.exists()}
            if stages:
                return stages
    known = ", ".join(path.parent.name for path in runs[:3]) or "none"
    raise RecipeError(f"no run and no stage folder is called '{target}' in {store.root}", f"newest runs: {known}")


def _names(path: Path, run_id: str) -> set[str]:
    """What else a run is called: by its recipe (the newest run of it), or as in Prefect and MLflow."""
    try:
        name = load_recipe(path).name
    except DynamoError:  # of another version
        return set()
    return {name, f"{name}-{run_id}"}


def progress(folder: Path) -> str:
    """How far the stage is, in words."""
    lines, total = StageFollower(folder).lines(), total_steps(StageSpec.read(folder))
    steps = f"{lines[-1].step if lines else 0} of {total} steps" if total else "no steps"
    return steps if (folder / MANIFEST).exists() else f"{steps}, not finished: it runs, or was stopped"


def diagnose(folder: Path) -> list[Finding]:
    """The symptoms of the stage in `folder`: why it ended first, then what its metrics show."""
    lines = StageFollower(folder).lines()
    error = folder / "error.json"
    ended = [] if not error.exists() else _ended(json.loads(error.read_text(encoding="utf-8")))
    return [*ended, *_alarms(lines), *_trends(lines)]


def _ended(error: Mapping[str, Any]) -> list[Finding]:
    """The symptom that an error belongs to; one of its own where the table has none."""
    cause = str(error["cause"])
    for symptom in (*GATES, *FAILURES):
        if re.search(symptom.error, cause):
            return [Finding(symptom, cause)]
    unknown = Symptom("error", "it ended with an error", "", ("the message says it",), (str(error["remedy"]),))
    return [Finding(unknown, cause)]


def _alarms(lines: Sequence[MetricsLine]) -> list[Finding]:
    found = []
    for symptom in ALARMS:
        raised = [line for line in lines if line.values.get(f"alarm/{symptom.name}")]
        if raised:
            first, last = raised[0], raised[-1]
            text = f"{symptom.metric} is {first.values[symptom.metric]:.3g} at step {first.step}"
            if last is not first:
                text += f", {last.values[symptom.metric]:.3g} at step {last.step}"
            found.append(Finding(symptom, f"{text}; in {len(raised)} of {len(lines)} steps"))
    return found


def _trends(lines: Sequence[MetricsLine]) -> list[Finding]:
    lines = [line for line in lines if "reward/correct" in line.values]
    if not lines:
        return []
    last, found = lines[-1].step, []
    if not any(line.values["reward/correct"] for line in lines):
        found.append(Finding(_TREND["no_reward"], f"reward/correct is 0 in all {len(lines)} steps up to step {last}"))
    elif len(lines) >= FEWEST_STEPS:
        quarter = len(lines) // 4
        before, after = (_mean(part, "reward/prompt_mean_correct") for part in (lines[:quarter], lines[-quarter:]))
        if after <= before < SOLVED:
            found.append(Finding(_TREND["flat_reward"], f"{before:.3f} before, {after:.3f} at the end (step {last})"))
    skipping = [line for line in lines if line.values.get("policy/skipped_updates")]
    if 2 * len(skipping) > len(lines):
        mean = _mean(skipping, "policy/skipped_updates")
        text = f"{mean:.1f} mini-batches in {len(skipping)} of {len(lines)} steps, last at step {skipping[-1].step}"
        found.append(Finding(_TREND["skipped_updates"], text))
    return found


def _mean(lines: Sequence[MetricsLine], name: str) -> float:
    return sum(line.values[name] for line in lines) / len(lines)
