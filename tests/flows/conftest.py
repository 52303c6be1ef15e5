"""One store for all flow tests: its first run starts a server of its own, later ones use those of `dynamo-rl ui`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from flows.servers import serve
from tasks.store import Store

ROOT = Path(__file__).parents[2]
DATA_ONLY = ROOT / "tests" / "data" / "data_only.yaml"
SMOKE = ROOT / "configs" / "smoke.yaml"


@dataclass(frozen=True)
class Workplace:
    """A store, and how to run the command line on it."""

    store: Store

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", *arguments, "--store", str(self.store.root)]

    def environment(self) -> dict[str, str]:
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        return {**outer, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def run(self, *arguments: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=self.store.root,
            env=self.environment(),
        )


@dataclass(frozen=True)
class Served(Workplace):
    """A workplace whose servers run."""

    mlflow: MlflowClient

    def runs(self, experiment: str) -> list[Run]:
        """The runs of an experiment, newest first."""
        found = self.mlflow.get_experiment_by_name(experiment)
        return [] if found is None else list(self.mlflow.search_runs([found.experiment_id]))

    def artifacts(self, run: Run, folder: str | None = None) -> list[str]:
        return [entry.path for entry in self.mlflow.list_artifacts(run.info.run_id, folder)]


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workplace, subprocess.CompletedProcess[str]]:
    """A run in an empty store on a machine where nothing is set up."""
    store = Store(tmp_path_factory.mktemp("flows") / "store")
    store.prepare()
    workplace = Workplace(store)
    return workplace, workplace.run("run", str(DATA_ONLY))


@pytest.fixture(scope="session")
def served(first_run: tuple[Workplace, subprocess.CompletedProcess[str]]) -> Iterator[Served]:
    """The same store with both servers running."""
    store = first_run[0].store
    with serve(store, prefect_port=0, mlflow_port=0) as (_, mlflow):
        yield Served(store, MlflowClient(tracking_uri=mlflow.url))
