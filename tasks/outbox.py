"""Tracking that never delays a run: records wait in a queue and a thread of their own delivers them in order.

While the tracking server is away the queue grows and the thread tries again; nothing is lost or sent twice before the
run ends. What then cannot be delivered within a few seconds is given up with a warning.
"""

from __future__ import annotations

import functools
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from dynamo_core.config.recipe import Recipe
from dynamo_core.config.spec import StageSpec
from dynamo_core.stages.manifest import Manifest
from tasks.cache import StageReference
from tasks.follow import MetricsLine
from tasks.store import Store
from tasks.terminal import warn

if TYPE_CHECKING:
    from tasks.tracking import Recorder

RETRY_SECONDS: Final = 5.0
CLOSE_SECONDS: Final = 60.0
"""How long the end of a run waits for a queue that moves."""
CLOSE_SECONDS_WHEN_AWAY: Final = 10.0
"""How long it waits while the server does not answer."""
CLOSE_SECONDS_WHEN_KILLED: Final = 3.0
"""How long it waits after a signal: all must be over within 20 seconds."""

_CLIENT_SETTINGS: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

Record = Callable[["Recorder"], None]


def status_of(kind: type[BaseException] | None) -> str:
    """The MLflow status of a run that ended with an exception of `kind`."""
    if kind is None:
        return "FINISHED"
    return "FAILED" if issubclass(kind, Exception) else "KILLED"


@dataclass(frozen=True)
class TrackingTarget:
    """Where records go. `artifacts` is the folder of new experiments' artifacts; none: the server decides."""

    uri: str
    artifacts: Path | None


class Tracker:
    """The tracking of one run of a recipe. Use it as a context: whatever happens, the run gets its final status."""

    def __init__(self, store: Store, recipe: Recipe, run_id: str, target: TrackingTarget) -> None:
        self._recipe = recipe
        self._run_id = run_id
        self._store = store
        self._target = target
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver_all, name="tracking", daemon=True)
        self._away = threading.Event()
        self._closing = threading.Event()
        self._warned = False

    def __enter__(self) -> Self:
        self._thread.start()
        digest = hashlib.sha256(self._recipe.model_dump_json().encode()).hexdigest()
        self.post(lambda recorder: recorder.start_run(digest))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status = status_of(kind)
        self.post(lambda recorder: recorder.finish_run(status))
        self._queue.put(None)
        self._closing.set()
        end = time.monotonic() + (CLOSE_SECONDS_WHEN_KILLED if status == "KILLED" else CLOSE_SECONDS)
        away_since: float | None = None
        while self._thread.is_alive() and time.monotonic() < end:
            self._thread.join(0.1)
            away_since = (away_since or time.monotonic()) if self._away.is_set() else None
            if away_since is not None and time.monotonic() - away_since > CLOSE_SECONDS_WHEN_AWAY:
                break
        if self._thread.is_alive():
            warn(f"tracking is incomplete: {self._queue.qsize()} records were not delivered")

    def post(self, record: Record) -> None:
        """Deliver `record` later, after all that were posted before."""
        self._queue.put(record)

    def stage(self, spec: StageSpec) -> StageRecord:
        """The record of one stage while it runs."""
        return StageRecord(self, spec)

    def stage_cached(self, reference: StageReference) -> None:
        """A stage's result came from the store."""
        self.post(lambda recorder: recorder.stage_cached(reference))

    def _deliver_all(self) -> None:
        # Explicit settings win. Giving up is quick, as this thread tries again.
        for name, value in _CLIENT_SETTINGS.items():
            os.environ.setdefault(name, value)
        # Here, so that importing MLflow takes this thread two seconds and not the run.
        from tasks import tracking  # noqa: PLC0415

        try:
            recorder = tracking.Recorder(
                self._store, self._recipe, self._run_id, self._target.uri, self._target.artifacts
            )
        except tracking.ERRORS as error:
            warn(f"tracking is off, nothing can be recorded at {self._target.uri}: {tracking.first_line(error)}")
            return
        while (record := self._queue.get()) is not None:
            while not self._deliver(record, recorder):
                self._closing.wait(RETRY_SECONDS)
                time.sleep(0.2)

    def _deliver(self, record: Record, recorder: Recorder) -> bool:
        """Whether `record` is done with: taken, or refused for good."""
        from tasks import tracking  # noqa: PLC0415

        try:
            record(recorder)
        except tracking.ERRORS as error:
            cause = tracking.first_line(error)
            if not tracking.is_temporary(error):
                warn(f"tracking refused a record: {cause}")
                return True
            if not self._warned:
                warn(f"tracking is away, the run goes on and catches up later: {cause}")
                self._warned = True
            self._away.set()
            return False
        self._away.clear()
        return True


class StageRecord:
    """The tracking of one stage while it runs; as a context, it gives the stage's run its final status."""

    def __init__(self, tracker: Tracker, spec: StageSpec) -> None:
        self._tracker = tracker
        self._spec = spec

    def __enter__(self) -> Self:
        self._tracker.post(lambda recorder: recorder.start_stage(self._spec))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        status, cause = status_of(kind), "" if error is None else str(error)
        self._tracker.post(lambda recorder: recorder.end_stage(self._spec, status, cause))

    def follow(self, lines: list[MetricsLine], allocations: Iterable[Path]) -> None:
        """Record new metrics lines, and new parts of the allocation table."""
        if lines:
            self._tracker.post(lambda recorder: recorder.metrics(self._spec.name, lines))
        for part in allocations:
            self._tracker.post(functools.partial(_draw, self._spec, part))

    def finish(self, folder: Path, manifest: Manifest) -> None:
        """Record what a stage left in its folder."""
        self._tracker.post(lambda recorder: recorder.stage_results(self._spec, folder, manifest))


def _draw(spec: StageSpec, part: Path, recorder: Recorder) -> None:
    recorder.allocations(spec, part)
