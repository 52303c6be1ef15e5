"""What every stage task does: look for a verified result under the key's lock, else run the stage and record it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from prefect import get_run_logger, task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Completed
from prefect.tasks import Task

from dynamo_core.config.recipe import Recipe
from dynamo_core.config.spec import StageSpec
from dynamo_core.stages.manifest import Manifest
from tasks.cache import Hit, StageReference, library_versions, locked, look_up, read_reference, write_reference
from tasks.follow import StageFollower
from tasks.launch import resources_of, run_stage_process
from tasks.outbox import Tracker
from tasks.post_mortem import StageLost
from tasks.progress import Progress
from tasks.store import Store
from tasks.terminal import say, warn

RETRY_DELAY_SECONDS: Final = 5


class Session:
    """What the stages of one run share."""

    def __init__(self, store: Store, recipe: Recipe, tracker: Tracker) -> None:
        self.store = store
        self.recipe = recipe
        self.tracker = tracker


StageFunction = Callable[[Session, str, str, dict[str, str]], State[dict[str, Any]]]


def lost_process(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed attempt is worth another: only when the process was killed from outside."""
    error = state.result(raise_on_failure=False)
    lost = isinstance(error, StageLost)
    if lost:
        warn(f"{error}; trying once more")
    return lost


def stage_task(name: str) -> Callable[[StageFunction], StageFunction]:
    """Decorator of the stage tasks. They are called directly, never submitted: only so does a signal reach them."""
    decorator: Callable[[StageFunction], StageFunction] = task(
        name=name,
        task_run_name="{name}",
        # Prefect records each result under our key, as a pointer for people. refresh_cache keeps it from trusting such
        # a record: `run_stage`, which verifies the files, decides alone what is a hit.
        cache_policy=CacheKeyFnPolicy(cache_key_fn=lambda context, parameters: parameters["key"]),
        refresh_cache=True,
        persist_result=True,
        result_serializer="json",
        retries=1,
        retry_delay_seconds=RETRY_DELAY_SECONDS,
        retry_condition_fn=lost_process,
    )
    return decorator


def run_stage(session: Session, name: str, key: str, inputs: dict[str, str]) -> State[dict[str, Any]]:
    """The reference of stage `name`: from the store where a verified result for `key` is there, else computed.

    Args:
        inputs: input role -> absolute folder of the producer.

    Raises:
        DynamoError: the stage failed; one line says why.
    """
    store = session.store
    waiting = f"{name}: another run computes it; waiting for its result"
    with locked(store.lock_file(key), on_wait=lambda: _note(waiting)):
        found = look_up(store, name, key)
        if isinstance(found, Hit):
            return _reuse(session, name, key, found)
        _note(f"{name}: running ({found.reason})")
        before = read_reference(store, key)
        reference = _compute(session, name, key, inputs)
    if before is not None and before.payload_digest == reference.payload_digest:
        _note(f"{name}: same output as before; later stages stay cached")
    return Completed(data=reference.model_dump(mode="json"), message=f"computed ({found.reason})")


def _note(text: str) -> None:
    """Tell whoever watches the terminal, and whoever looks at the task run in Prefect."""
    say(text)
    get_run_logger().info(text)


def _reuse(session: Session, name: str, key: str, hit: Hit) -> State[dict[str, Any]]:
    earlier = read_reference(session.store, key)
    reference = _reference(name, key, hit.folder, hit.manifest, None if earlier is None else earlier.mlflow_run_id)
    session.tracker.stage_cached(reference)
    _note(f"{name}: cached ({hit.folder.name})")
    return Completed(name="Cached", data=reference.model_dump(mode="json"), message=f"verified in {hit.folder}")


def _reference(name: str, key: str, folder: Path, manifest: Manifest, mlflow_run_id: str | None) -> StageReference:
    return StageReference(
        name=name,
        key=key,
        folder=str(folder),
        payload_digest=manifest.payload_digest,
        metrics=manifest.metrics,
        mlflow_run_id=mlflow_run_id,
    )


def _compute(session: Session, name: str, key: str, inputs: dict[str, str]) -> StageReference:
    recipe, folder = session.recipe, session.store.stage_folder(name, key)
    stage = recipe.stages[name]
    spec = StageSpec(
        recipe=recipe.name,
        name=name,
        key=key,
        seed=recipe.seed,
        stage=stage,
        resources=resources_of(stage),
        inputs=inputs,
        versions=library_versions(),
    )
    started = time.monotonic()
    with Progress(spec) as progress, session.tracker.stage(spec) as record:
        follower = StageFollower(folder)

        def watch() -> None:
            lines = follower.lines()
            progress.update(lines)
            record.follow(lines, follower.table_parts("allocations"))

        manifest = run_stage_process(folder, spec, watch)
        record.finish(folder, manifest)
        # Before the stage's record ends: the tracker then adds its run's id.
        reference = _reference(name, key, folder, manifest, None)
        write_reference(session.store, reference)
    _note(f"{name}: done in {time.monotonic() - started:.0f} s")
    return reference
