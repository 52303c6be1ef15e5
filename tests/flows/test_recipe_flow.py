"""The whole chain, configs/smoke.yaml: every stage in a process of its own, recorded, cached, and stopped cleanly."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.flows.conftest import SMOKE, Served

STAGES = ("data", "teacher", "student", "reinforced", "evaluation")


@pytest.fixture(scope="module")
def smoke(served: Served) -> subprocess.CompletedProcess[str]:
    """The recipe's first run."""
    return served.run("run", str(SMOKE))


def results_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The results table of a run."""
    lines = done.stdout.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("model "))
    return lines[start : start + 4]


def test_it_ends_with_the_results(served: Served, smoke: subprocess.CompletedProcess[str]) -> None:
    assert smoke.returncode == 0, smoke.stderr
    assert smoke.stderr == ""
    for stage in STAGES:
        assert f"{stage}: done in" in smoke.stdout
    assert "reinforced: step 4/4  reward" in smoke.stdout
    for model in ("teacher", "student", "reinforced"):
        assert any(line.startswith(model) and "[" in line for line in smoke.stdout.splitlines())


def test_mlflow_holds_what_happened(served: Served, smoke: subprocess.CompletedProcess[str]) -> None:
    (parent,) = served.runs("smoke")
    stages = {stage: served.runs(f"smoke/{stage}")[0] for stage in STAGES}
    assert parent.info.status == "FINISHED"
    assert {run.info.status for run in stages.values()} == {"FINISHED"}
    assert {run.data.tags["mlflow.parentRunId"] for run in stages.values()} == {parent.info.run_id}
    reinforced = stages["reinforced"]
    curve = served.mlflow.get_metric_history(reinforced.info.run_id, "reward/mean")
    assert [point.step for point in curve] == [1, 2, 3, 4]
    assert any(name.startswith("modulation/") for name in reinforced.data.metrics)
    images = [name for name in served.artifacts(reinforced, "images") if name.endswith(".png")]
    assert len(images) == 4
    assert "allocations.csv" in served.artifacts(reinforced)
    for run in (parent, stages["evaluation"]):
        assert {"evaluation.json", "evaluation.png"} <= set(served.artifacts(run))
    table = json.loads(Path(served.mlflow.download_artifacts(parent.info.run_id, "evaluation.json")).read_text())
    assert {row[0] for row in table["data"]} == {"teacher", "student", "reinforced"}
    assert "evaluation/student/sampled_pass_at_1" in parent.data.metrics


def test_again_every_stage_is_cached(served: Served, smoke: subprocess.CompletedProcess[str]) -> None:
    done = served.run("run", str(SMOKE))
    assert done.returncode == 0, done.stderr
    assert all(f"{stage}: cached" in done.stdout for stage in STAGES)
    assert "running" not in done.stdout
    assert results_of(done) == results_of(smoke)


def test_lost_weights_are_computed_again_alone(served: Served, smoke: subprocess.CompletedProcess[str]) -> None:
    (weights,) = (served.store.root / "stages").glob("student-*/model/model.safetensors")
    weights.unlink()
    done = served.run("run", str(SMOKE))
    assert done.returncode == 0, done.stderr
    assert "student: running (damaged: model/model.safetensors is missing)" in done.stdout
    assert "student: same output as before; later stages stay cached" in done.stdout
    assert all(f"{stage}: cached" in done.stdout for stage in STAGES if stage != "student")
    assert weights.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_every_process(
    served: Served, smoke: subprocess.CompletedProcess[str], number: signal.Signals, code: int
) -> None:
    name = f"stopped-{code}"
    process = subprocess.Popen(
        served.command("run", str(SMOKE), "--set", f"name={name}", "--set", "stages.reinforced.steps=5000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=served.store.root,
        env=served.environment(),
    )
    assert process.stdout is not None
    assert any(line.startswith("reinforced: step") for line in process.stdout)
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("dynamo_core.stages" in member.cmdline() for member in family)
    started = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code
    assert errors == "error: stopped; finished stages stay cached\n"
    _, alive = psutil.wait_procs(family, timeout=max(0.0, 20 - (time.monotonic() - started)))
    assert alive == []
    (parent,), (stage,) = served.runs(name), served.runs(f"{name}/reinforced")
    assert parent.info.status == stage.info.status == "KILLED"


def test_a_killed_run_goes_on_from_its_checkpoint(served: Served, smoke: subprocess.CompletedProcess[str]) -> None:
    """kill -9 of the whole run: the next one continues the stage, and MLflow then shows every step once."""
    overrides = ["name=killed", "stages.reinforced.steps=60", "stages.reinforced.checkpoints.every=5"]
    arguments = ["run", str(SMOKE), *(part for text in overrides for part in ("--set", text))]
    earlier = set((served.store.root / "stages").glob("reinforced-*"))
    process = subprocess.Popen(
        served.command(*arguments), stdout=subprocess.PIPE, text=True, cwd=served.store.root, env=served.environment()
    )

    def checkpoints() -> list[Path]:
        found = (served.store.root / "stages").glob("reinforced-*/checkpoints/step-*")
        return sorted(path for path in found if path.parents[1] not in earlier)

    while not checkpoints():
        assert process.poll() is None
        time.sleep(0.05)
    for member in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        member.kill()
    process.communicate()
    step = int(checkpoints()[-1].name.removeprefix("step-"))
    planned = served.run("plan", *arguments[1:])
    assert f"did not finish, goes on after step {step}" in planned.stdout
    done = served.run(*arguments)
    assert done.returncode == 0, done.stderr
    assert f"reinforced: running (did not finish, goes on after step {step})" in done.stdout
    newest = served.runs("killed/reinforced")[0]
    curve = served.mlflow.get_metric_history(newest.info.run_id, "reward/mean")
    assert [point.step for point in curve] == list(range(1, 61))
    assert not checkpoints()


def test_a_time_limit_pauses_the_run(served: Served, smoke: subprocess.CompletedProcess[str]) -> None:
    overrides = ["name=paused", "seed=9", "stages.reinforced.checkpoints.max_minutes=0.0001"]
    arguments = ["run", str(SMOKE), *(part for text in overrides for part in ("--set", text))]
    done = served.run(*arguments)
    assert done.returncode == 75
    assert "stage 'reinforced': stopped after checkpoints.max_minutes = 0.0001 at step 1 of 4" in done.stderr
    assert done.stderr.count("\n") == 1
