"""`keep_best`: the model of the best checkpoint is what a stage publishes, interrupted or not."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from dynamo_core import stages
from dynamo_core.config.stage_base import KeepBest
from dynamo_core.errors import RecipeError
from dynamo_core.training.best import Best
from tests.builders import read_metrics, smoke_recipe
from tests.faults import harness
from tests.faults.test_resume import checkpoints, interrupt, kept  # noqa: F401  a fixture

RISING_THEN_FALLING = [
    "stages.teacher.optimizer={lr: 5e-3, warmup_steps: 5, schedule: linear}",
    "stages.teacher.checkpoints={every: 3, keep_last: 1, keep_best: {metric: train/lr, mode: max}}",
]


def test_the_mean_between_checkpoints_decides_and_the_earlier_wins_a_tie():
    best = Best(KeepBest(metric="m", mode="min"), every=2, steps=5)
    said = [best.observe(step, {"m": value}) for step, value in enumerate([5.0, 1.0, 2.0, 4.0, 9.0], start=1)]
    assert said == [False, True, False, False, False]
    assert (best.step, best.value) == (2, 3.0)
    again = Best(KeepBest(metric="m", mode="max"), every=2, steps=5)
    again.load_state_dict(best.state_dict())
    assert again.observe(5, {"m": 9.0})
    assert (again.step, again.value) == (5, 9.0)


def test_the_published_model_is_that_of_the_best_checkpoint(inputs, tmp_path, monkeypatch, kept):  # noqa: F811
    """The learning rate stands for a metric whose best lies in the middle: step 6 of 19."""
    recipe = harness.recipe(*RISING_THEN_FALLING)
    whole = harness.prepare(recipe, "teacher", inputs, tmp_path / "whole")
    stages.run(whole)
    assert checkpoints(whole) == ["step-000006", "step-000018"]
    saved = torch.load(whole / "checkpoints/step-000006/model/engine/mp_rank_00_model_states.pt", weights_only=False)[
        "module"
    ]
    published = load_file(whole / "model" / "model.safetensors")
    assert published
    for name, tensor in published.items():
        assert torch.equal(tensor, saved[f"model.{name}"]), name
    assert len(read_metrics(whole)) == 19
    broken = harness.prepare(recipe, "teacher", inputs, tmp_path / "broken")
    interrupt(broken, 14, monkeypatch)
    stages.run(broken)
    harness.assert_equal(harness.outcome(broken), harness.outcome(whole))


def test_the_policy_goes_back_too(inputs, tmp_path, kept):  # noqa: F811
    best = "stages.reinforced.checkpoints={every: 2, keep_best: {metric: reward/mean}}"
    folder = harness.prepare(harness.recipe(best), "reinforced", inputs, tmp_path / "best")
    stages.run(folder)
    lines = [line["values"]["reward/mean"] for line in read_metrics(folder)]
    means = {step: sum(lines[step - 2 : step]) / 2 for step in (2, 4, 6)} | {7: lines[6]}
    wanted = max(means, key=lambda step: (means[step], -step))
    manifest = stages.manifest.read_manifest(folder)
    assert manifest is not None
    assert manifest.metrics["best/step"] == wanted
    assert manifest.metrics["best/value"] == pytest.approx(means[wanted])


def test_an_unknown_metric_is_named_at_the_first_checkpoint(inputs, tmp_path):
    wrong = "stages.teacher.checkpoints={every: 3, keep_best: {metric: train/los}}"
    folder = harness.prepare(harness.recipe(wrong), "teacher", inputs, tmp_path)
    with pytest.raises(RecipeError, match=r"'train/los' is not a metric of this stage \(use one of .*train/loss"):
        stages.run(folder)


def test_a_recipe_says_what_better_means():
    with pytest.raises(RecipeError, match=r"keep_best\.mode"):
        smoke_recipe(["stages.teacher.checkpoints={keep_best: {metric: train/loss, mode: least}}"])
