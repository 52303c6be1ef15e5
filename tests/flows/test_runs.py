"""Runs of a one-stage recipe through the command line, Prefect and MLflow: cached, damaged, failing, two at once."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.flows.conftest import DATA_ONLY, Served, Workplace


def test_nothing_set_up_still_runs(first_run: tuple[Workplace, subprocess.CompletedProcess[str]]) -> None:
    workplace, done = first_run
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "rows: running (never run)" in done.stdout
    assert (workplace.store.root / "mlflow.db").exists()
    assert f"compare runs     dynamo-rl ui --store {workplace.store.root}" in done.stdout


def test_a_second_run_starts_no_stage(served: Served) -> None:
    (folder,) = (served.store.root / "stages").glob("rows-*")
    before = (folder / "stage.log").stat().st_mtime_ns
    done = served.run("run", str(DATA_ONLY))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"rows: cached ({folder.name})" in done.stdout
    assert (folder / "stage.log").stat().st_mtime_ns == before
    newest, oldest = served.runs("data-only")
    (stage,) = served.runs("data-only/rows")
    assert {run.info.status for run in (newest, oldest, stage)} == {"FINISHED"}
    assert stage.data.tags["mlflow.parentRunId"] == oldest.info.run_id
    assert oldest.data.tags["stage.rows.cached"] == "false"
    assert newest.data.tags["stage.rows.cached"] == "true"
    assert newest.data.tags["stage.rows.run_id"] == stage.info.run_id
    assert newest.data.metrics["rows/rows_read"] == oldest.data.metrics["rows/rows_read"] == 120
    assert newest.data.params["stages.rows.source.problems"] == "120"
    assert newest.data.tags["recipe.digest"] == oldest.data.tags["recipe.digest"]
    assert "stage.log" in served.artifacts(stage)
    run_folder = max((served.store.root / "runs").iterdir())
    assert "problems: 120" in (run_folder / "recipe.yaml").read_text()


def test_a_damaged_result_is_computed_again_and_said_so(served: Served) -> None:
    (folder,) = (served.store.root / "stages").glob("rows-*")
    (folder / "data" / "test.parquet").unlink()
    planned = served.run("plan", str(DATA_ONLY))
    assert "damaged: data/test.parquet is missing" in planned.stdout
    done = served.run("run", str(DATA_ONLY))
    assert done.returncode == 0, done.stderr
    assert "rows: running (damaged: data/test.parquet is missing)" in done.stdout
    assert "rows: same output as before; later stages stay cached" in done.stdout
    assert (folder / "data" / "test.parquet").exists()


def test_a_failed_stage_is_one_line_and_an_exit_code(served: Served, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": 3\n')
    source = f"stages.rows.source={{type: messages, path: {tmp_path / 'rows.jsonl'}}}"
    done = served.run("run", str(DATA_ONLY), "--set", source, "--set", "name=failing")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: stage 'rows': ")
    (parent,), (stage,) = served.runs("failing"), served.runs("failing/rows")
    assert parent.info.status == stage.info.status == "FAILED"
    assert "1 of 1 rows are unusable" in stage.data.tags["error"]


def test_refusals_take_a_second_and_start_nothing(served: Served) -> None:
    for arguments, expected in {
        ("--set", "stages.rows.sauce=1"): "unknown key; did you mean 'source'?",
        ("--set", "resources.processes=4000"): "but this machine has",
    }.items():
        done = served.run("run", str(DATA_ONLY), *arguments)
        assert done.returncode == 2
        assert expected in done.stderr
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""


def test_two_runs_of_one_key_compute_it_once(served: Served) -> None:
    command = served.command("run", str(DATA_ONLY), "--set", "seed=77", "--set", "stages.rows.source.problems=3000")
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=served.environment(), cwd=served.store.root)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted("rows: running" in output for output in outputs) == [False, True]
    assert sorted("rows: cached" in output for output in outputs) == [False, True]
