"""Checkpoints of a training stage: complete or absent, verified before use, exact on resume.

    checkpoints/step-000040/          renamed to this name when everything in it is on the disk
        actor/...                     an engine's own files: weights, optimizer, schedule position
        state.json                    what the loop itself remembers, and each rank's random state
        checkpoint.json               step, identity, and every file with size and sha256; written last
Old checkpoints are removed only after the new one has its name. A checkpoint with a missing, short or changed file is
skipped with a warning, and the one before it is taken (verl#4873, OpenRLHF#1208).
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Protocol, Self

import numpy as np
import torch
from pydantic import ValidationError

from dynamo_core.config.base import Frozen, NonNegativeInt, PositiveInt
from dynamo_core.config.stage_base import Checkpoints
from dynamo_core.errors import RecipeError, ResourceExhausted, StagePaused
from dynamo_core.files import OutputFile, file_digest, find_damage, sync_folder, write_atomically
from dynamo_core.training.best import Best
from dynamo_core.training.distributed import Ranks

_LOG: Final = logging.getLogger(__name__)
FOLDER: Final = "checkpoints"
INDEX: Final = "checkpoint.json"
STATE: Final = "state.json"


class Savable(Protocol):
    """A part that writes files of its own, on every rank."""

    def save(self, folder: Path) -> None:
        """Write everything into `folder`, which exists."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        ...


class CheckpointIndex(Frozen):
    """checkpoint.json."""

    step: NonNegativeInt
    key: str
    world_size: PositiveInt
    files: dict[str, OutputFile]


@dataclass(frozen=True)
class Resumed:
    """Where to go on: the last finished step and what the loop had remembered then."""

    step: int
    state: dict[str, Any]


class Checkpointer:
    """Saves and finds the checkpoints of one stage. Its methods are called on all ranks.

    As a context it answers SIGTERM: the step that is running is finished and saved, then the process ends with 143. A
    second SIGTERM ends it at once.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        config: Checkpoints,
        ranks: Ranks,
        parts: Mapping[str, Savable],
        *,
        steps: int,
    ) -> None:
        """
        Args:
            folder: of the stage.
            key: the stage's cache key: recipe, data, code and libraries that the state belongs to.
            parts: name -> what is saved under that name.
            steps: of the whole stage; its end needs no checkpoint, as the model is saved there.
        """
        self._folder = folder / FOLDER
        self._key = key
        self._config = config
        self._ranks = ranks
        self._parts = dict(parts)
        self._steps = steps
        self._best = None if config.keep_best is None else Best(config.keep_best, every=config.every, steps=steps)
        self._started = self._saved = self._stepped = time.monotonic()
        self._stopping = False
        self._outer: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._outer = signal.signal(signal.SIGTERM, self._on_term)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._outer is not None:
            signal.signal(signal.SIGTERM, self._outer)

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        if self._stopping:
            raise SystemExit(128 + signum)
        self._stopping = True

    def after_step(self, step: int, values: Mapping[str, float], state: Callable[[], Mapping[str, Any]]) -> None:
        """Save if it is time to, and stop if that was asked for.

        Args:
            values: the step's metrics, equal on all ranks.
            state: what the loop must remember, as JSON values, equal on all ranks; called only to be saved.

        Raises:
            SystemExit: SIGTERM came, and `step` is saved.
            StagePaused: max_minutes would be over before the next step is.
            RecipeError: keep_best.metric is not among `values`.
        """
        if self._best is not None:
            self._best.observe(step, values)
        if step >= self._steps:
            return
        now = time.monotonic()
        limit = self._config.max_minutes
        # The next step may take as long as this one has.
        late = limit is not None and now - self._started + (now - self._stepped) > 60 * limit
        self._stepped = now
        due = step % self._config.every == 0 or now - self._saved >= 60 * self._config.minutes
        asked = [due and self._ranks.first, self._stopping, late and self._ranks.first]
        due, stop, late = (bool(total) for total in self._ranks.sum([float(value) for value in asked]))
        if due or stop or late:
            self.save(step, state())
        if stop:
            raise SystemExit(128 + signal.SIGTERM)
        if late:
            raise StagePaused(
                f"stopped after checkpoints.max_minutes = {limit:g} at step {step} of {self._steps}",
                "run the recipe again to go on from here",
                step,
            )

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of `step`, then remove those that are no longer kept.

        Args:
            state: JSON values; equal on all ranks.
        """
        final = self._path(step)
        temporary = self._folder / f".step-{step:06d}.tmp"
        if self._ranks.first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self._ranks.barrier()
        try:
            self._write(temporary, step, state)
            if self._ranks.first:
                self._publish(temporary, final, step)
        finally:
            if self._ranks.first:  # a full disk needs the room; the one before stays
                shutil.rmtree(temporary, ignore_errors=True)
        self._ranks.barrier()
        self._saved = time.monotonic()

    def _write(self, temporary: Path, step: int, state: Mapping[str, Any]) -> None:
        for name, part in self._parts.items():
            (temporary / name).mkdir(exist_ok=True)
            part.save(temporary / name)
        random_states = self._ranks.gather(_random_state())
        if self._ranks.first:
            best = None if self._best is None else self._best.state_dict()
            content = {"state": dict(state), "random": random_states, "best": best}
            (temporary / STATE).write_text(json.dumps(content), encoding="utf-8")

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def _publish(self, temporary: Path, final: Path, step: int) -> None:
        files = {}
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                files[path.relative_to(temporary).as_posix()] = OutputFile(
                    size=path.stat().st_size, sha256=file_digest(path)
                )
        index = CheckpointIndex(step=step, key=self._key, world_size=self._ranks.world_size, files=files)
        write_atomically(temporary / INDEX, index.model_dump_json(indent=1) + "\n")
        shutil.rmtree(final, ignore_errors=True)  # a torn one of this name
        temporary.rename(final)
        sync_folder(self._folder)
        best = None if self._best is None or self._best.step is None else self._path(self._best.step)
        for old in _newest_first(self._folder)[self._config.keep_last :]:
            if old != best:
                shutil.rmtree(old)

    def resume(self) -> Resumed | None:
        """Restore the newest complete checkpoint into all parts; None where there is none.

        Raises:
            RecipeError: it belongs to another recipe, other data, or another number of processes.
        """
        gathered = self._ranks.gather(self._newest_complete() if self._ranks.first else None)
        if not gathered:
            return None
        found = gathered[0]
        for name, part in self._parts.items():
            part.load(found / name)
        content = json.loads((found / STATE).read_text(encoding="utf-8"))
        _restore_random_state(content["random"][self._ranks.rank])
        if self._best is not None and content["best"] is not None:
            self._best.load_state_dict(content["best"])
        index = CheckpointIndex.model_validate_json((found / INDEX).read_text(encoding="utf-8"))
        return Resumed(index.step, content["state"])

    def take_best(self) -> dict[str, float]:
        """After the last step: bring all parts back to the best checkpoint, where the recipe asks for it; its metrics.

        Raises:
            ResourceExhausted: that checkpoint was damaged meanwhile.
        """
        best = self._best
        if best is None or best.step is None or best.value is None:
            return {}
        if best.step != self._steps:
            folder = self._path(best.step)
            index = CheckpointIndex.model_validate_json((folder / INDEX).read_text(encoding="utf-8"))
            damage = find_damage(folder, index.files, deep=True)
            if damage is not None:
                raise ResourceExhausted(f"the best checkpoint {folder} is damaged: {damage}", "run the stage again")
            for name, part in self._parts.items():
                part.load(folder / name)
        return {"best/step": float(best.step), "best/value": best.value}

    def _newest_complete(self) -> Path | None:
        for folder in _newest_first(self._folder):
            try:
                index = CheckpointIndex.model_validate_json((folder / INDEX).read_text(encoding="utf-8"))
            except (OSError, ValidationError):
                damage: str | None = f"{INDEX} is missing or unreadable"
            else:
                self._check(folder, index)
                damage = find_damage(folder, index.files, deep=True)
            if damage is None:
                return folder
            _LOG.warning("checkpoint %s is torn (%s): skipped", folder.name, damage)
        return None

    def _check(self, folder: Path, index: CheckpointIndex) -> None:
        if index.key != self._key:
            raise RecipeError(
                f"checkpoint {folder} belongs to another recipe, other data, code or libraries",
                f"remove {folder.parent} to start the stage again",
            )
        if index.world_size != self._ranks.world_size:
            raise RecipeError(
                f"checkpoint {folder} was saved by {index.world_size} processes, this run has {self._ranks.world_size}",
                f"set resources.processes: {index.world_size}, or remove {folder.parent} to start the stage again",
            )


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), reverse=True)


def _random_state() -> dict[str, Any]:
    """This rank's global generators. Nothing here draws from them on purpose; libraries may."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return state


def _restore_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))
    if "cuda" in state:
        torch.cuda.set_rng_state(torch.frombuffer(bytearray.fromhex(state["cuda"]), dtype=torch.uint8))
