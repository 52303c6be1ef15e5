"""dynamo-rl: run a recipe, say what a run would do, show the results, say what is wrong with them.

Exit codes: 0 done; 1 a stage crashed; 2 the recipe, its data or the machine; 3 memory or disk ran out; 4 a number was
not finite; 130 Ctrl-C; 143 SIGTERM. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Annotated
from uuid import uuid4

import typer

from dynamo_core.config.load import load_recipe
from dynamo_core.errors import DynamoError, RecipeError, ResourceExhausted
from tasks.diagnose import print_diagnosis
from tasks.plan import print_plan
from tasks.preflight import preflight
from tasks.report import print_results
from tasks.store import STORE_VARIABLE, Store
from tasks.terminal import complain, say

INTERRUPTED = 130
_CODES = {
    errno.ENOSPC: ResourceExhausted.exit_code,
    errno.EDQUOT: ResourceExhausted.exit_code,
    errno.EACCES: RecipeError.exit_code,
    errno.EROFS: RecipeError.exit_code,
}
STOPPED = "stopped; finished stages stay cached"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Staged reinforcement-learning recipes for language models.",
)

RecipeArgument = Annotated[Path, typer.Argument(help="The recipe's YAML file.", show_default=False)]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a value: stages.reinforce.steps=50. Repeatable.")
]
StoreOption = Annotated[
    Path | None,
    typer.Option("--store", help=f"Folder for everything that runs leave behind; else ${STORE_VARIABLE}, else var."),
]


class _Terminated(SystemExit):
    """SIGTERM came; the code is the process's exit code."""


def main() -> None:
    """Entry of the `dynamo-rl` command."""
    signal.signal(signal.SIGTERM, _terminate)
    app()


def _terminate(signum: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ending takes a few seconds; a second signal must not cut it short
    raise _Terminated(128 + signum)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turn what ends a command into one line and an exit code. What is not expected keeps its traceback."""
    try:
        yield
    except DynamoError as error:
        complain(str(error))
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        complain(STOPPED)
        raise typer.Exit(INTERRUPTED) from error
    except _Terminated:
        complain(STOPPED)
        raise
    except OSError as error:  # of our own files: the store's disk is full, or it became unwritable
        code = _CODES.get(error.errno or 0)
        if code is None:
            raise
        complain(str(error))
        raise typer.Exit(code) from error


@app.command()
def run(recipe: RecipeArgument, overrides: SetOption = [], store: StoreOption = None) -> None:  # noqa: B006 (typer's way)
    """Run a recipe: every stage that has no verified result yet."""
    with _one_line_errors():
        _run(recipe, overrides, Store.choose(store))


def _run(path: Path, overrides: list[str], store: Store) -> None:
    from flows.servers import choose_prefect, running_servers  # noqa: PLC0415

    recipe = load_recipe(path, overrides)
    preflight(recipe)
    store.prepare()
    run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{uuid4().hex[:4]}"
    say(f"recipe {recipe.name}: {len(recipe.stages)} stages, store {store.root}")
    temporary = choose_prefect(store)
    from flows.recipe import recipe_flow  # noqa: PLC0415 (reads its settings when imported)

    if temporary is not None:
        temporary.wait_until_ready()
    references = recipe_flow(recipe.model_dump(mode="json"), str(store.root), run_id)
    print_results({name: Path(reference["folder"]) for name, reference in references.items()})
    say(f"store            {store.root}")
    say(f"resolved recipe  {store.run_folder(run_id) / 'recipe.yaml'}")
    running = running_servers(store)
    say(f"compare runs     {running.mlflow_url if running else _ui_command(store)}")


def _ui_command(store: Store) -> str:
    """What to type for the UI, with the program called as it was this time."""
    program = sys.argv[0] if Path(sys.argv[0]).name == "dynamo-rl" else "dynamo-rl"
    return f"{program} ui" if store == Store.choose(None) else f"{program} ui --store {store.root}"


@app.command()
def plan(recipe: RecipeArgument, overrides: SetOption = [], store: StoreOption = None) -> None:  # noqa: B006
    """Say what a run would do, without running anything."""
    with _one_line_errors():
        print_plan(load_recipe(recipe, overrides), Store.choose(store))


@app.command()
def diagnose(
    target: Annotated[
        str, typer.Argument(metavar="RUN_OR_FOLDER", help="A run's id or name, or a stage's folder or its name.")
    ],
    store: StoreOption = None,
) -> None:
    """Say what is wrong with a run, why that may be, and which key helps."""
    with _one_line_errors():
        print_diagnosis(target, Store.choose(store))


@app.command()
def ui(
    store: StoreOption = None,
    prefect_port: Annotated[int, typer.Option(help="Port of Prefect; another if it is taken.")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow; another if it is taken.")] = 5000,
) -> None:
    """Serve the Prefect and MLflow pages of a store until Ctrl-C. Runs meanwhile use these servers and start faster."""
    with _one_line_errors(), contextlib.suppress(KeyboardInterrupt):
        _serve(Store.choose(store), prefect_port, mlflow_port)


def _serve(store: Store, prefect_port: int, mlflow_port: int) -> None:
    from flows.servers import running_servers, serve  # noqa: PLC0415

    store.prepare()
    running = running_servers(store)
    if running is not None:
        say(f"already running: Prefect {running.prefect_url}  MLflow {running.mlflow_url}")
        return
    say(f"starting the servers of {store.root}, the first time takes half a minute")
    with serve(store, prefect_port, mlflow_port) as servers:
        for server in servers:
            say(f"{server.name:<8} {server.url}")
        say("Ctrl-C ends both")
        while not any(server.ended() for server in servers):
            time.sleep(0.5)
        ended = ", ".join(server.name for server in servers if server.ended())
        raise DynamoError(f"a server ended by itself: {ended}; its log is in {store.root}")


if __name__ == "__main__":
    main()
