"""The Prefect and MLflow servers of a store: found where `dynamo-rl ui` runs them, started where nothing is set up.

PREFECT_API_URL and MLFLOW_TRACKING_URI win. Without them and without `dynamo-rl ui`, a run starts a Prefect server of
its own that ends with it, and writes to MLflow's SQLite file directly.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Final

import psutil

from dynamo_core.config.base import Frozen
from dynamo_core.errors import DynamoError, RecipeError
from dynamo_core.files import write_atomically
from tasks.outbox import TrackingTarget
from tasks.processes import ProcessTree
from tasks.store import Store

HOST: Final = "127.0.0.1"
START_SECONDS: Final = 180.0
STOP_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 3.0
_QUIET_MLFLOW: Final = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


class RunningServers(Frozen):
    """What `dynamo-rl ui` writes down for later runs."""

    host: str
    pid: int
    started: float
    """When process `pid` started: a later process with its id is another one."""
    prefect_url: str
    mlflow_url: str

    @property
    def api_url(self) -> str:
        """Prefect's API."""
        return f"{self.prefect_url}/api"


def running_servers(store: Store) -> RunningServers | None:
    """The servers that `dynamo-rl ui` runs on this machine for this store; None where they do not answer."""
    try:
        found = RunningServers.model_validate_json((store.root / "servers.json").read_text(encoding="utf-8"))
        alive = found.host == socket.gethostname() and psutil.Process(found.pid).create_time() == found.started
    except (OSError, ValueError, psutil.NoSuchProcess):
        return None
    return found if alive and answers(f"{found.api_url}/health") and answers(f"{found.mlflow_url}/health") else None


def answers(url: str) -> bool:
    """Whether an HTTP server answers at `url` within a few seconds."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as response:  # noqa: S310 (http, from our settings)
            return bool(response.status == 200)
    except (OSError, ValueError):  # refused, timed out, an error status, or no URL at all
        return False


def tracking_target(store: Store) -> TrackingTarget:
    """Where a run's records go."""
    given = os.environ.get("MLFLOW_TRACKING_URI")
    if given:
        return TrackingTarget(given, artifacts=None)
    running = running_servers(store)
    # Both ways lead to one database, so both name the artifact folder: the server may be gone next time.
    uri = running.mlflow_url if running else f"sqlite:///{store.root / 'mlflow.db'}"
    return TrackingTarget(uri, artifacts=store.root / "mlartifacts")


def prefect_settings(store: Store) -> dict[str, str]:
    """Prefect's settings for everything that works on `store`: quiet, offline, and everything inside it."""
    return {
        "PREFECT_HOME": str(store.root / "prefect"),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(store.root / "results"),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PREFECT_LOGGING_LEVEL": "INFO",
        "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
        # The terminal shows our lines; Prefect's own go to its server alone.
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    }


def _free_port(preferred: int) -> int:
    for port in (preferred, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    raise RecipeError("no free port on this machine", "end a server that you no longer need")


class Server:
    """A server process of our own; it dies with us."""

    def __init__(self, name: str, arguments: Sequence[str], url: str, health: str, store: Store) -> None:
        """Start it, without waiting for it."""
        self.name = name
        self.url = url
        self._health = f"{url}{health}"
        self._log = store.root / f"{name}-server.log"
        env = {**os.environ, **prefect_settings(store), **_QUIET_MLFLOW}
        env.pop("PREFECT_API_URL", None)
        self._tree = ProcessTree([sys.executable, "-m", *arguments], env, self._log)

    def wait_until_ready(self) -> None:
        """Return once it answers.

        Raises:
            DynamoError: it ended, or took too long.
        """
        end = time.monotonic() + START_SECONDS
        while not answers(self._health):
            if self.ended() or time.monotonic() > end:
                raise DynamoError(f"the {self.name} server did not start; log: {self._log}")
            time.sleep(0.1)

    def ended(self) -> bool:
        """Whether its process is gone."""
        return self._tree.poll() is not None

    def stop(self) -> None:
        """End it and all that it started."""
        self._tree.stop(STOP_SECONDS)


def _prefect_server(store: Store, port: int) -> Server:
    chosen = str(_free_port(port))
    arguments = ["prefect", "server", "start", "--host", HOST, "--port", chosen]
    return Server("prefect", arguments, f"http://{HOST}:{chosen}", "/api/health", store)


def _mlflow_server(store: Store, port: int) -> Server:
    chosen = str(_free_port(port))
    places = ["--backend-store-uri", f"sqlite:///{store.root / 'mlflow.db'}"]
    places += ["--artifacts-destination", str(store.root / "mlartifacts")]
    arguments = ["mlflow", "server", *places, "--host", HOST, "--port", chosen, "--workers", "1"]
    return Server("mlflow", arguments, f"http://{HOST}:{chosen}", "/health", store)


def choose_prefect(store: Store) -> Server | None:
    """Point this process's Prefect at a server. Call it before prefect is imported: it reads its settings then.

    Returns:
        A temporary server that may still be starting, so that imports can go on meanwhile; None where one is up.

    Raises:
        RecipeError: PREFECT_API_URL is set and nothing answers there.
    """
    given = os.environ.get("PREFECT_API_URL")
    for name, value in prefect_settings(store).items():
        os.environ.setdefault(name, value)
    running = None if given else running_servers(store)
    if given and not answers(f"{given.rstrip('/')}/health"):
        raise RecipeError(f"no Prefect server answers at PREFECT_API_URL={given}", "start it, or unset the variable")
    if given:
        return None
    if running:
        os.environ["PREFECT_API_URL"] = running.api_url
        return None
    server = _prefect_server(store, port=0)
    os.environ["PREFECT_API_URL"] = f"{server.url}/api"
    # Handlers run in reverse order: Prefect's own, registered when it is imported, first send what it still holds.
    atexit.register(server.stop)
    return server


@contextlib.contextmanager
def serve(store: Store, prefect_port: int, mlflow_port: int) -> Iterator[tuple[Server, Server]]:
    """Both servers of a store, up and written down for later runs until the context ends.

    Raises:
        DynamoError: one of them does not start.
    """
    servers = (_prefect_server(store, prefect_port), _mlflow_server(store, mlflow_port))
    file = store.root / "servers.json"
    try:
        for server in servers:
            server.wait_until_ready()
        me = psutil.Process()
        note = RunningServers(
            host=socket.gethostname(),
            pid=me.pid,
            started=me.create_time(),
            prefect_url=servers[0].url,
            mlflow_url=servers[1].url,
        )
        write_atomically(file, note.model_dump_json(indent=1) + "\n")
        yield servers
    finally:
        file.unlink(missing_ok=True)
        for server in servers:
            server.stop()
