"""What runs leave in MLflow. The only module that imports it; `tasks.outbox` calls it from a thread of its own.

One run a recipe run in the experiment `<recipe>`, one a computed stage in `<recipe>/<stage>`, linked by the parent
tag: the UI then overlays one stage of many runs. Runs are named by explicit ids, never through MLflow's active run.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import mlflow.exceptions
import requests
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from dynamo_core.config.load import dump_recipe
from dynamo_core.config.recipe import Recipe
from dynamo_core.config.spec import StageSpec
from dynamo_core.config.stage_base import TrainingStage
from dynamo_core.config.stages import EvaluateStage
from dynamo_core.stages.manifest import Manifest
from tasks.cache import StageReference, read_reference, write_reference
from tasks.code import ROOT
from tasks.follow import MetricsLine
from tasks.results import read_results, results_table
from tasks.store import Store

ERRORS: Final = (mlflow.exceptions.MlflowException, requests.exceptions.RequestException, OSError)
"""What MLflow raises when it refuses a record or cannot be reached."""

_LOG_LEVELS: Final = {"mlflow": "WARNING", "alembic": "WARNING", "matplotlib.font_manager": "ERROR"}
"""Making a database or a font cache is no news for the person who started a run."""
LONGEST_PARAM: Final = 6000
IMAGES_A_STAGE: Final = 50
_BATCH: Final = 1000
_PARAM_BATCH: Final = 100
_REFUSED: Final = re.compile(r"[^\w./: -]")
_TEMPORARY: Final = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "DEADLINE_EXCEEDED")


def is_temporary(error: Exception) -> bool:
    """Whether the same record may be accepted later."""
    return not isinstance(error, mlflow.exceptions.MlflowException) or error.error_code in _TEMPORARY


def first_line(error: Exception) -> str:
    """The beginning of an error that may be pages long."""
    return str(error).partition("\n")[0][:200]


def metric_key(name: str) -> str:
    """`name` with only the characters that MLflow accepts: `pass@1` becomes `pass_at_1`."""
    return _REFUSED.sub(lambda match: f"_x{ord(match[0]):x}_", name.replace("@", "_at_")).strip("/")


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted path, text) of every leaf. Lists and what is no text are written as JSON."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value)


def image_steps(steps: int) -> set[int]:
    """The steps whose allocation is drawn: at most IMAGES_A_STAGE, evenly spread, with the first and the last."""
    if steps <= IMAGES_A_STAGE:
        return set(range(1, steps + 1))
    gap = (steps - 1) / (IMAGES_A_STAGE - 1)
    return {1 + round(number * gap) for number in range(IMAGES_A_STAGE)}


def _git(*arguments: str) -> str:
    """Output of git on the project's own checkout; empty where it is none."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def _now() -> int:
    return time.time_ns() // 1_000_000


class Recorder:
    """Delivers the records of one run of a recipe. Every method may be called again after it failed half-way."""

    def __init__(self, store: Store, recipe: Recipe, run_id: str, uri: str, artifacts: Path | None) -> None:
        """
        Args:
            run_id: our own id of the run.
            uri: the tracking store.
            artifacts: where new experiments keep artifacts; none: where the tracking server keeps them.
        """
        for name, level in _LOG_LEVELS.items():
            logging.getLogger(name).setLevel(level)
        self._store = store
        self._recipe = recipe
        self._name = f"{recipe.name}-{run_id}"
        self._folder = store.run_folder(run_id)
        self._artifacts = artifacts
        self._client = MlflowClient(tracking_uri=uri)
        self._parent: str | None = None
        self._stages: dict[str, str] = {}
        self._sent_steps: dict[str, int] = {}
        self._sent_names: dict[str, set[str]] = {}
        self._drawn: set[tuple[str, int]] = set()

    # The whole run

    def start_run(self, digest: str) -> None:
        """Create the run, with the resolved recipe as parameters and as a file."""
        recipe = self._recipe
        if self._parent is None:
            tags = {
                "recipe.digest": digest,
                "mlflow.source.name": recipe.name,
                "mlflow.source.git.commit": _git("rev-parse", "HEAD"),
                "git.dirty": str(bool(_git("status", "--porcelain"))).lower(),
            }
            self._parent = self._create(recipe.name, self._name, {key: tag for key, tag in tags.items() if tag})
        self._log_params(self._parent, recipe.model_dump(mode="json"))
        self._client.log_text(self._parent, dump_recipe(recipe), "recipe.yaml")

    def finish_run(self, status: str) -> None:
        """Give the run its final status."""
        if self._parent is not None:
            self._client.set_terminated(self._parent, status)

    # One stage

    def start_stage(self, spec: StageSpec) -> None:
        """Create the stage's run; another attempt continues the same one."""
        known = self._stages.get(spec.name)
        if known is None and self._parent is not None:
            tags = {"mlflow.parentRunId": self._parent, "stage": spec.name, "stage.key": spec.key, "cached": "false"}
            known = self._create(f"{self._recipe.name}/{spec.name}", self._name, tags)
            self._stages[spec.name] = known
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._log_params(known, {"seed": spec.seed, **spec.stage.model_dump(mode="json")})

    def metrics(self, name: str, lines: Sequence[MetricsLine]) -> None:
        """Send metrics lines of stage `name`, without the steps that an earlier attempt has sent."""
        run = self._stages.get(name)
        new = [line for line in lines if line.step > self._sent_steps.get(name, 0)]
        if run is None or not new:
            return
        metrics = [
            Metric(metric_key(key), value, line.seen_ms, line.step)
            for line in new
            for key, value in (*line.values.items(), *((f"timing/{key}", value) for key, value in line.timings.items()))
        ]
        self._log_metrics(run, metrics)
        self._sent_steps[name] = new[-1].step
        self._sent_names.setdefault(name, set()).update(key for line in new for key in line.values)

    def allocations(self, spec: StageSpec, part: Path) -> None:
        """Draw the allocations of a table part's steps."""
        # Here, as a run of cached stages needs neither.
        import pyarrow.parquet as pq  # noqa: PLC0415

        from tasks.figures import allocation_histogram  # noqa: PLC0415

        run = self._stages.get(spec.name)
        if run is None or not isinstance(spec.stage, TrainingStage):
            return
        wanted = image_steps(spec.stage.steps)
        counts: dict[int, list[int]] = {}
        for row in pq.read_table(part, columns=["step", "n"]).to_pylist():
            counts.setdefault(row["step"], []).append(row["n"])
        for step in sorted(wanted & counts.keys()):
            if (spec.name, step) not in self._drawn:
                image = allocation_histogram(step, counts[step])
                self._client.log_image(run, image, key="allocation", step=step, synchronous=True)
                self._drawn.add((spec.name, step))

    def stage_results(self, spec: StageSpec, folder: Path, manifest: Manifest) -> None:
        """Record what a finished stage left: final metrics, tables and figures, on its own run and on the parent."""
        run = self._stages.get(spec.name)
        if run is not None:
            self._client.set_tag(run, "payload_digest", manifest.payload_digest)
            step, known = self._sent_steps.get(spec.name, 0), self._sent_names.get(spec.name, set())
            final = {key: value for key, value in manifest.metrics.items() if key not in known}
            self._log_metrics(run, [Metric(metric_key(key), value, _now(), step) for key, value in final.items()])
            self._log_allocation_table(run, folder)
            self._store.figure_file(folder).unlink(missing_ok=True)  # of an earlier result
            self._log_evaluation(run, "evaluation", folder)
        self._on_parent(spec.name, folder, manifest.payload_digest, manifest.metrics, run, cached=False)

    def end_stage(self, spec: StageSpec, status: str, cause: str) -> None:
        """Give the stage's run its final status, its log, and the cause of a failure; later runs can then name it."""
        run = self._stages.get(spec.name)
        if run is None:
            return
        log = self._store.stage_folder(spec.name, spec.key) / "stage.log"
        if log.exists():
            self._client.log_artifact(run, str(log))
        if cause:
            self._client.set_tag(run, "error", cause[:LONGEST_PARAM])
        self._client.set_terminated(run, status)
        reference = read_reference(self._store, spec.key)
        if status == "FINISHED" and reference is not None:
            write_reference(self._store, reference.model_copy(update={"mlflow_run_id": run}))

    def stage_cached(self, reference: StageReference) -> None:
        """A stage came from the store: no run of its own, but the parent carries its metrics and names its run."""
        name, folder = reference.name, Path(reference.folder)
        self._on_parent(name, folder, reference.payload_digest, reference.metrics, reference.mlflow_run_id, cached=True)

    def _on_parent(
        self, name: str, folder: Path, digest: str, metrics: Mapping[str, float], run: str | None, *, cached: bool
    ) -> None:
        if self._parent is None:
            return
        values = {f"{name}/{key}": value for key, value in metrics.items()}
        results = read_results(folder)
        for model in results["models"] if results else ():
            values.update({f"{name}/{model['name']}/{key}": cell["value"] for key, cell in model["metrics"].items()})
        tags = {"cached": str(cached).lower(), "digest": digest, "run_id": run or "unknown"}
        now = _now()
        self._client.log_batch(
            self._parent,
            metrics=[Metric(metric_key(key), value, now, 0) for key, value in values.items()],
            tags=[RunTag(f"stage.{name}.{key}", value) for key, value in tags.items()],
        )
        evaluations = [key for key, stage in self._recipe.stages.items() if isinstance(stage, EvaluateStage)]
        title = "evaluation" if len(evaluations) == 1 else f"evaluation_{name}"
        self._log_evaluation(self._parent, title, folder)

    # Details

    def _create(self, experiment: str, run_name: str, tags: Mapping[str, str]) -> str:
        run = self._client.create_run(self._experiment(experiment), run_name=run_name, tags=dict(tags))
        return str(run.info.run_id)

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        location = None if self._artifacts is None else (self._artifacts / name).as_uri()
        try:
            return self._client.create_experiment(name, artifact_location=location)
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return self._experiment(name)  # another run has just made it

    def _log_params(self, run: str, content: Mapping[str, Any]) -> None:
        params = dict(flatten(content))
        cut = [key for key, value in params.items() if len(value) > LONGEST_PARAM]
        entries = [Param(key, value[:LONGEST_PARAM]) for key, value in params.items()]
        for start in range(0, len(entries), _PARAM_BATCH):
            self._client.log_batch(run, params=entries[start : start + _PARAM_BATCH])
        if cut:
            self._client.set_tag(run, "params.cut", ", ".join(cut))

    def _log_metrics(self, run: str, metrics: Sequence[Metric]) -> None:
        for start in range(0, len(metrics), _BATCH):
            self._client.log_batch(run, metrics=metrics[start : start + _BATCH])

    def _log_allocation_table(self, run: str, folder: Path) -> None:
        parts = sorted((folder / "tables").glob("allocations-*.parquet"))
        if not parts:
            return
        import pyarrow as pa  # noqa: PLC0415
        import pyarrow.csv  # noqa: PLC0415
        import pyarrow.parquet as pq  # noqa: PLC0415

        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary) / "allocations.csv"
            pyarrow.csv.write_csv(pa.concat_tables([pq.read_table(part) for part in parts]), path)
            self._client.log_artifact(run, str(path))

    def _log_evaluation(self, run: str, name: str, folder: Path) -> None:
        results = read_results(folder)
        if results is None:
            return
        self._client.log_table(run, results_table(results), f"{name}.json")
        drawn = self._store.figure_file(folder)
        if not drawn.exists():
            from tasks.figures import evaluation_bars  # noqa: PLC0415

            drawn.parent.mkdir(exist_ok=True)
            temporary_file = drawn.with_suffix(".tmp.png")
            evaluation_bars(results).savefig(temporary_file)
            temporary_file.replace(drawn)
        with tempfile.TemporaryDirectory() as temporary:  # an artifact is called as its file is
            copy = shutil.copyfile(drawn, Path(temporary) / f"{name}.png")
            self._client.log_artifact(run, str(copy))
