"""Stage processes: how they are started, stopped and understood. Most run a few lines of Python instead of a stage."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from dynamo_core.config.load import load_recipe
from dynamo_core.config.spec import StageSpec
from dynamo_core.errors import DynamoError, NumericalFailure, RecipeError, ResourceExhausted, StageCrashed
from tasks import launch
from tasks.launch import resources_of, run_stage_process
from tasks.post_mortem import Death, StageLost, explain, first_death, last_words
from tasks.processes import ProcessTree

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"
KEY = "cd" * 32


def spec(name: str = "data", *overrides: str) -> StageSpec:
    recipe = load_recipe(SMOKE, list(overrides))
    stage = recipe.stages[name]
    return StageSpec(recipe="t", name=name, key=KEY, seed=1, stage=stage, resources=resources_of(stage))


def run_code(monkeypatch: pytest.MonkeyPatch, folder: Path, code: str, *overrides: str) -> None:
    """Run `code` as the stage process; FOLDER is its folder."""
    program = f"import json, os, signal, sys, time; from pathlib import Path; FOLDER = Path({str(folder)!r}); {code}"
    monkeypatch.setattr(launch, "_command", lambda folder, spec: [sys.executable, "-c", program])
    run_stage_process(folder, spec("data", *overrides), watch=lambda: None)


def test_a_real_stage_runs_and_old_outputs_go(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("left.parquet", "error.json", "manifest.json", "checkpoints/one"):
        (folder / name).write_text("old")
    (folder / "stage.log").write_text("earlier attempt\n")
    watched: list[int] = []
    manifest = run_stage_process(folder, spec(), watch=lambda: watched.append(1))
    assert manifest.key == KEY
    assert "data/test.parquet" in manifest.files
    assert not (folder / "left.parquet").exists()
    assert not (folder / "checkpoints").exists()
    assert (folder / "stage.log").read_text().startswith("earlier attempt\n")
    assert watched
    assert json.loads((folder / "spec.json").read_text())["name"] == "data"


def test_bad_data_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": 3\n')
    source = f"stages.data.source={{type: messages, path: {tmp_path / 'rows.jsonl'}}}"
    with pytest.raises(RecipeError, match=r"^stage 'data': .*1 of 1 rows are unusable"):
        run_stage_process(tmp_path / "data", spec("data", source), watch=lambda: None)


@pytest.mark.parametrize(
    ("code", "kind"), [(2, RecipeError), (3, ResourceExhausted), (4, NumericalFailure), (1, StageCrashed)]
)
def test_error_json_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, kind: type[DynamoError]
) -> None:
    content = {"code": code, "cause": "the cause", "remedy": "the remedy", "step": 7, "rank": 1}
    program = f"(FOLDER / 'error.json').write_text(json.dumps({content!r})); sys.exit(1)"
    with pytest.raises(kind) as caught:
        run_code(monkeypatch, tmp_path / "s", program)
    assert str(caught.value) == "stage 'data': the cause (the remedy)"
    assert (caught.value.exit_code, caught.value.step) == (code, 7)


@pytest.mark.parametrize(
    ("code", "kind", "expected"),
    [
        ("{}['lost']", StageCrashed, "crashed with exit code 1: KeyError: 'lost'; full log: "),
        ("print('last words'); os._exit(9)", StageCrashed, "crashed with exit code 9: last words"),
        ("pass", StageCrashed, "ended without a manifest"),
        ("os.kill(os.getpid(), signal.SIGKILL)", StageLost, "was killed by SIGKILL (the system may have run out"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", StageLost, "was killed by SIGSEGV"),
        ("sys.exit(3)", ResourceExhausted, "it wrote nothing"),
        ("sys.exit(143)", StageLost, "was killed by SIGTERM"),
        ("(FOLDER / 'error.json').write_text('{'); sys.exit(2)", StageCrashed, "error.json is unreadable"),
        ("print('  exitcode  : -9 (pid: 77)'); sys.exit(1)", StageLost, "was killed by SIGKILL"),
    ],
)
def test_a_silent_death_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, kind: type[DynamoError], expected: str
) -> None:
    with pytest.raises(DynamoError) as caught:
        run_code(monkeypatch, tmp_path / "s", code)
    assert type(caught.value) is kind
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_stage_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(StageCrashed, match=r"ran longer than resources.timeout_minutes = 0.01"):
        run_code(monkeypatch, tmp_path / "s", "time.sleep(60)", "stages.data.resources.timeout_minutes=0.01")
    assert time.monotonic() - started < 10


RANKS = """
import signal, subprocess, sys, time
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
for _ in range(2):
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
    child.stdout.readline()
print("ready", flush=True)
time.sleep(60)
"""


def ranks_of(tree: ProcessTree, log: Path) -> list[psutil.Process]:
    end = time.monotonic() + 30
    while b"ready" not in log.read_bytes():
        assert time.monotonic() < end
        time.sleep(0.05)
    return psutil.Process(tree.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


@pytest.mark.parametrize("launcher_dies_first", [False, True])
def test_stopping_ends_ranks_that_ignore_signals_in_their_own_sessions(
    tmp_path: Path, launcher_dies_first: bool
) -> None:
    log = tmp_path / "log"
    tree = ProcessTree([sys.executable, "-c", RANKS], dict(os.environ), log)
    ranks = ranks_of(tree, log)
    assert len(ranks) == 2
    if launcher_dies_first:
        tree.note_members()
        os.kill(tree.pid, signal.SIGKILL)
        while tree.poll() is None:
            time.sleep(0.05)
    tree.stop(grace=0.5)
    assert gone(ranks)


PARENT = """
import os, sys, time
from pathlib import Path
from tasks.processes import ProcessTree
tree = ProcessTree([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), Path(sys.argv[1]))
print(tree.pid, flush=True)
time.sleep(60)
"""


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    log = tmp_path / "parent.log"
    parent = ProcessTree([sys.executable, "-c", PARENT, str(tmp_path / "log")], dict(os.environ), log)
    end = time.monotonic() + 30
    while not log.read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.05)
    child = psutil.Process(int(log.read_text()))
    os.kill(parent.pid, signal.SIGKILL)
    while not gone([child]):
        assert time.monotonic() < end
        time.sleep(0.05)
    parent.stop(grace=0)


def test_ranks_get_a_launcher_and_a_clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    two = spec("teacher", "stages.teacher.resources={processes: 2, threads: 1}")
    command = launch._command(tmp_path, two)
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = launch._environment(two)
    assert "RANK" not in environment
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert launch._command(tmp_path, spec())[1:] == ["-m", "dynamo_core.stages", str(tmp_path)]
    assert launch.process_count(spec("data", "resources.processes=2").stage) == 1


TORCHRUN_LOG = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "x.py", line 1, in f
[rank1]: KeyError: 'a'

[rank1]: During handling of the above exception, another exception occurred:

[rank1]: Traceback (most recent call last):
[rank1]: my.module.BadThing: not this word
[rank1]: RuntimeError: the real cause
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (TORCHRUN_LOG, "RuntimeError: the real cause"),
        ("ValueError: handled and logged\nall is well\nkilled\n", "killed"),
        ("Segmentation fault\n-----\n\n", "Segmentation fault"),
        ("", "it wrote nothing"),
    ],
)
def test_last_words(log: str, expected: str) -> None:
    assert last_words(log.splitlines()) == expected


def test_a_crash_is_explained_by_its_own_attempt(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"
    log.write_text("exitcode  : -9 (pid: 7)\nTraceback (most recent call last):\nRuntimeError: long ago\n")
    start = log.stat().st_size
    log.write_text(log.read_text() + "Traceback (most recent call last):\nValueError: just now\n")
    error = explain("sft", 1, tmp_path, log, start)
    assert not isinstance(error, StageLost)
    assert "ValueError: just now" in str(error)
    assert "after step" not in str(error)
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    assert "crashed with exit code 1 after step 7: " in str(explain("sft", 1, tmp_path, log, start))
    assert "crashed with exit code 255" in str(explain("sft", 255, tmp_path, log, start))


def reported(*deaths: tuple[int, int]) -> list[str]:
    return [
        line for rank, code in deaths for line in (f"  rank      : {rank} (local_rank: 0)", f"  exitcode  : {code}")
    ]


def test_the_rank_that_was_killed_comes_before_those_that_lost_it():
    assert first_death(["nothing"]) is None
    assert first_death(reported((0, 1), (1, -9))) == Death(1, -9)
    assert first_death(reported((3, -9), (0, 1))) == Death(3, -9)
    assert first_death(reported((0, -15), (2, 1))) == Death(2, 1)
    lines = ["[rank0]: Traceback (most recent call last)", "[rank0]: IOError: peer", *TORCHRUN_LOG.splitlines()]
    assert last_words(lines, rank=0) == "IOError: peer"
    assert last_words(lines, rank=1) == "RuntimeError: the real cause"
