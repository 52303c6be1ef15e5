"""A stage that was interrupted ends as if it had not been, bit for bit."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from dynamo_core import stages
from dynamo_core.errors import RecipeError, StagePaused
from dynamo_core.metrics import MetricsWriter
from dynamo_core.training.checkpoint import Checkpointer
from tests.builders import read_metrics, stage_folder
from tests.faults import harness


class Interrupted(Exception):
    """Stands for the process's death."""


@pytest.fixture
def kept(monkeypatch):
    """Finished stages keep their checkpoints."""
    monkeypatch.setattr(stages, "remove_checkpoints", lambda folder: None)


def interrupt(folder: Path, step: int, monkeypatch) -> None:
    """Run until `step` would be written, then die."""
    write = MetricsWriter.write

    def dying(self, now, values, timings):
        if now == step:
            raise Interrupted
        write(self, now, values, timings)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(MetricsWriter, "write", dying)
        stages.run(folder)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize(("name", "step"), [("teacher", 8), ("student", 3), ("preferred", 8), ("reinforced", 6)])
def test_an_interrupted_stage_goes_on_as_if_nothing_had_happened(
    name, step, inputs, undisturbed, tmp_path, monkeypatch, kept
):
    """24 prompts in steps of 8: the sampler's epoch ends within the reinforced stage's seven steps."""
    folder = harness.prepare(harness.recipe(), name, inputs, tmp_path)
    interrupt(folder, step, monkeypatch)
    if step > 3:
        interrupt(folder, step + 1, monkeypatch)  # and once more
    stages.run(folder)
    harness.assert_equal(harness.outcome(folder), undisturbed(name))
    assert read_metrics(folder)[-1]["attempt"] > 1 or step == 3


WITH_CRITIC = [
    "stages.reinforced.preset=exact_ppo",
    "stages.reinforced.critic={optimizer: {lr: 1e-3}, warmup_steps: 1}",
    "stages.reinforced.kl={place: reward, kind: k1, coefficient: 0.1, target: 1e-3, horizon: 50}",
]


def test_critic_and_kl_coefficient_are_part_of_the_state(inputs, tmp_path, monkeypatch, kept):
    recipe = harness.recipe(*WITH_CRITIC)
    whole = harness.prepare(recipe, "reinforced", inputs, tmp_path / "whole")
    stages.run(whole)
    folder = harness.prepare(recipe, "reinforced", inputs, tmp_path / "killed")
    interrupt(folder, 4, monkeypatch)
    stages.run(folder)
    harness.assert_equal(harness.outcome(folder), harness.outcome(whole))
    newest = max((folder / "checkpoints").iterdir())
    assert {"actor", "critic"} <= {path.name for path in newest.iterdir()}
    assert (folder / "critic" / "value_head.safetensors").exists()


@pytest.mark.parametrize(
    "engine", ["{zero_stage: 0}", "{zero_stage: 2}", "{zero_stage: 1, precision: bfloat16}"], ids=str
)
def test_adapters_resume_and_frozen_weights_are_not_saved(engine, inputs, tmp_path, monkeypatch, kept):
    recipe = harness.recipe(
        *WITH_CRITIC, f"stages.reinforced.engine={engine}", "stages.reinforced.lora={rank: 2, alpha: 8}"
    )
    whole = harness.prepare(recipe, "reinforced", inputs, tmp_path / "whole")
    stages.run(whole)
    folder = harness.prepare(recipe, "reinforced", inputs, tmp_path / "killed")
    interrupt(folder, 4, monkeypatch)
    stages.run(folder)
    harness.assert_equal(harness.outcome(folder), harness.outcome(whole))
    newest = max((folder / "checkpoints").iterdir())
    for part in ("actor", "critic"):
        saved = torch.load(newest / part / "engine" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
        trained = {name for name in saved if ".lora_" in name or "value_head" in name}
        assert len(trained) >= 14
        assert saved.keys() - trained <= {"model.lm_head.weight"}  # a second name of the embedding


def test_two_ranks_resume_their_shards(inputs, tmp_path, undisturbed):
    sharded = harness.recipe("stages.reinforced.engine.zero_stage=2")
    whole = harness.prepare(sharded, "reinforced", inputs, tmp_path / "whole")
    status, output = harness.run(whole, 2)
    assert status == 0, output
    folder = harness.prepare(sharded, "reinforced", inputs, tmp_path / "killed")
    status, output = harness.run(folder, 2, ["--kill-in-save", "2"])
    assert status != 0
    assert checkpoints(folder) == [".step-000004.tmp", "step-000002"]
    status, output = harness.run(folder, 2)
    assert status == 0, output
    harness.assert_equal(harness.outcome(folder), harness.outcome(whole))


def test_kill_nine_inside_a_save_leaves_the_one_before(inputs, undisturbed, tmp_path):
    folder = harness.prepare(harness.recipe(), "teacher", inputs, tmp_path)
    status, _ = harness.run(folder, arguments=["--kill-in-save", "3"])
    assert status == -signal.SIGKILL
    assert checkpoints(folder) == [".step-000009.tmp", "step-000003", "step-000006"]
    status, output = harness.run(folder)
    assert status == 0, output
    harness.assert_equal(harness.outcome(folder), undisturbed("teacher"))


def test_sigterm_saves_the_running_step(inputs, undisturbed, tmp_path):
    slow = harness.recipe("stages.teacher.steps=4000", "stages.teacher.checkpoints.every=100000")
    folder = harness.prepare(slow, "teacher", inputs, tmp_path)
    process = harness.start(folder)
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    status, output = harness.finish(process)
    assert status == 128 + signal.SIGTERM, output
    steps = [line["step"] for line in read_metrics(folder)]
    assert checkpoints(folder) == [f"step-{steps[-1]:06d}"]
    assert not (folder / "error.json").exists()


def test_every_torn_file_of_a_checkpoint_is_noticed(inputs, undisturbed, tmp_path, monkeypatch, kept, caplog):
    """Each file of the newest checkpoint in turn is cut short, changed or gone: the one before is taken."""
    first = harness.prepare(harness.recipe(), "reinforced", inputs, tmp_path / "first")
    interrupt(first, 5, monkeypatch)
    newest = first / "checkpoints" / "step-000004"
    files = [path.relative_to(newest) for path in sorted(newest.rglob("*")) if path.is_file()]
    assert {"state.json", "checkpoint.json"} <= {path.name for path in files}
    assert any(path.suffix == ".pt" for path in files)
    for index, file in enumerate(files):
        folder = harness.prepare(harness.recipe(), "reinforced", inputs, tmp_path / str(index))
        shutil.copytree(first, folder, dirs_exist_ok=True)
        path = folder / "checkpoints" / "step-000004" / file
        content = path.read_bytes()
        if index % 3 == 0:
            path.write_bytes(content[: len(content) // 2])
        elif index % 3 == 1:
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        else:
            path.unlink()
        stages.run(folder)
        assert "checkpoint step-000004 is torn" in caplog.text
        caplog.clear()
        harness.assert_equal(harness.outcome(folder), undisturbed("reinforced"))


def test_without_any_whole_checkpoint_the_stage_starts_again(inputs, undisturbed, tmp_path, monkeypatch, kept):
    folder = harness.prepare(harness.recipe(), "reinforced", inputs, tmp_path)
    interrupt(folder, 3, monkeypatch)
    (folder / "checkpoints" / "step-000002" / "state.json").unlink()
    stages.run(folder)
    harness.assert_equal(harness.outcome(folder), undisturbed("reinforced"))


def test_a_full_disk_leaves_the_old_checkpoint(inputs, undisturbed, tmp_path, monkeypatch, kept):
    """What a small disk does in the middle of a save: the stage ends with 3, and goes on when there is room again."""
    folder = harness.prepare(harness.recipe(), "teacher", inputs, tmp_path)
    publish = Checkpointer._publish

    def full(self, temporary, final, step):
        if step == 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        publish(self, temporary, final, step)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_publish", full)
        from dynamo_core.stages.__main__ import main

        assert main(folder) == 3
    assert '"code": 3' in (folder / "error.json").read_text()
    assert "step-000003" in checkpoints(folder)
    stages.run(folder)
    harness.assert_equal(harness.outcome(folder), undisturbed("teacher"))


def test_a_time_limit_pauses_the_stage(inputs, undisturbed, tmp_path, kept):
    limited = harness.recipe("stages.teacher.checkpoints.max_minutes=1e-9")
    folder = harness.prepare(limited, "teacher", inputs, tmp_path)
    with pytest.raises(StagePaused, match=r"at step 1 of 19 \(run the recipe again to go on from here\)"):
        stages.run(folder)
    with pytest.raises(StagePaused, match="at step 2 of 19"):
        stages.run(folder)
    stage_folder(harness.recipe(), "teacher", tmp_path)  # the same stage without the limit
    stages.run(folder)
    harness.assert_equal(harness.outcome(folder), undisturbed("teacher"))


def test_checkpoints_of_something_else_are_refused(inputs, tmp_path, monkeypatch):
    folder = harness.prepare(harness.recipe(), "teacher", inputs, tmp_path)
    interrupt(folder, 4, monkeypatch)
    index = folder / "checkpoints" / "step-000003" / "checkpoint.json"
    whole = index.read_text()
    index.write_text(whole.replace('"key": "000', '"key": "111'))
    with pytest.raises(RecipeError, match=r"belongs to another recipe, other data.*remove .*checkpoints to start"):
        stages.run(folder)
    index.write_text(re.sub(r'"world_size": 1', '"world_size": 4', whole))
    with pytest.raises(RecipeError, match=r"saved by 4 processes, this run has 1 \(set resources.processes: 4"):
        stages.run(folder)


def test_old_checkpoints_are_pruned_and_time_counts_too(inputs, tmp_path, monkeypatch):
    often = harness.recipe("stages.teacher.checkpoints={every: 1000, minutes: 1e-9, keep_last: 3}")
    folder = harness.prepare(often, "teacher", inputs, tmp_path)
    interrupt(folder, 9, monkeypatch)
    assert checkpoints(folder) == ["step-000006", "step-000007", "step-000008"]
