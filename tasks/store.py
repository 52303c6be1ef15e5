"""The store: one folder that holds all that runs leave behind. It is moved or wiped as a whole.

    stages/<name>-<key12>/   stage folders         locks/        one lock file a key
    references/<key>.json    what a key led to     runs/<run id>/  recipe.yaml and stages.json
    mlflow.db, mlartifacts/  MLflow                prefect/, results/  Prefect's home and its records of task runs
    figures/<stage>.png      of evaluations        servers.json  what `dynamo-rl ui` has started

Everything but `results` is read again; that one is for people who look at Prefect's pages.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamo_core.errors import RecipeError
from dynamo_core.files import write_atomically

STORE_VARIABLE: Final = "DYNAMO_RL_STORE"
_FOLDERS: Final = ("stages", "locks", "references", "runs", "prefect", "results", "mlartifacts")
_RUN_STAGES: Final = "stages.json"


@dataclass(frozen=True)
class Store:
    """Paths inside a store."""

    root: Path

    @classmethod
    def choose(cls, given: Path | None) -> Store:
        """The store of `--store`, else of DYNAMO_RL_STORE, else `var` in the current folder."""
        return cls((given or Path(os.environ.get(STORE_VARIABLE) or "var")).expanduser().absolute())

    def prepare(self) -> None:
        """Make the folders.

        Raises:
            RecipeError: the store cannot be written.
        """
        try:
            for name in _FOLDERS:
                (self.root / name).mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.root / name):
                    pass
        except OSError as error:
            raise RecipeError(
                f"cannot write to the store {self.root}: {error.strerror}",
                "choose another with --store or DYNAMO_RL_STORE",
            ) from error

    def stage_folder(self, name: str, key: str) -> Path:
        """Where stage `name` with cache key `key` runs."""
        return self.root / "stages" / f"{name}-{key[:12]}"

    def stage_folders(self, key: str) -> list[Path]:
        """Folders of stages of any name whose key may be `key`."""
        return sorted((self.root / "stages").glob(f"*-{key[:12]}"))

    def lock_file(self, key: str) -> Path:
        """The file that a run locks while it computes `key`."""
        return self.root / "locks" / f"{key}.lock"

    def reference_file(self, key: str) -> Path:
        """What the last computation of `key` led to; it outlives the stage folder."""
        return self.root / "references" / f"{key}.json"

    def figure_file(self, stage_folder: Path) -> Path:
        """The figure of an evaluation, drawn once: later runs send it again without loading matplotlib."""
        return self.root / "figures" / f"{stage_folder.name}.png"

    def run_folder(self, run_id: str) -> Path:
        """Where one run of a recipe leaves what it was asked to do."""
        return self.root / "runs" / run_id

    def note_stages(self, run_id: str, folders: Mapping[str, Path]) -> None:
        """Remember where the stages of a run are, those that it has come to."""
        names = {name: folder.name for name, folder in folders.items()}
        write_atomically(self.run_folder(run_id) / _RUN_STAGES, json.dumps(names, indent=1) + "\n")

    def stages_of(self, run_id: str) -> dict[str, Path]:
        """Stage -> folder, of the stages that a run came to; empty where there is no such run."""
        path = self.run_folder(run_id) / _RUN_STAGES
        if not path.exists():
            return {}
        names = json.loads(path.read_text(encoding="utf-8"))
        return {name: self.root / "stages" / folder for name, folder in names.items()}
