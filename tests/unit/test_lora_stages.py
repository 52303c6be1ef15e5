"""Whole stages with adapters: what they publish, report and refuse."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from dynamo_core.errors import RecipeError
from dynamo_core.stages.manifest import read_manifest
from tests.builders import read_metrics, run_stage, smoke_recipe, with_dpo
from tests.unit.test_lora import logits


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    for name in ("data", "teacher"):
        run_stage(smoke_recipe(), name, root)
    return root


LORA = "{rank: 4, alpha: 8, target_modules: all-linear}"
STAGES = {
    "sft": [
        "stages.student={type: sft, model_from: teacher, steps: 3, batch_size: 32, micro_batch_size: 16,"
        f" max_length: 128, optimizer: {{lr: 1e-2}}, lora: {LORA}}}"
    ],
    "distill": [
        "stages.student={type: distill, model_from: teacher, steps: 3, batch_size: 32, micro_batch_size: 16,"
        f" max_length: 128, optimizer: {{lr: 1e-2}}, lora: {LORA}}}"
    ],
}


@pytest.mark.parametrize("kind", STAGES)
def test_supervised_stages_train_adapters(kind, store, tmp_path):
    for name in ("data", "teacher"):
        (tmp_path / name).symlink_to(store / name)
    folder = run_stage(smoke_recipe(STAGES[kind]), "student", tmp_path)
    assert_published(folder, store / "teacher" / "model")
    assert read_metrics(folder)[-1]["values"]["train/grad_norm"] > 0


def test_preferences_train_adapters(store, tmp_path):
    for name in ("data", "teacher"):
        (tmp_path / name).symlink_to(store / name)
    recipe = with_dpo(smoke_recipe(), steps=3, optimizer={"lr": 1e-2}, lora={"rank": 4, "alpha": 8})
    folder = run_stage(recipe, "preferred", tmp_path)
    assert_published(folder, store / "teacher" / "model")
    assert read_metrics(folder)[0]["values"]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)


def assert_published(folder: Path, base: Path) -> None:
    """adapter/ on the base computes what model/ does, and that is not what the base does."""
    start = AutoModelForCausalLM.from_pretrained(base)
    before, size = logits(start), sum(p.numel() for p in start.parameters())
    expected = logits(AutoModelForCausalLM.from_pretrained(folder / "model"))
    assert not torch.allclose(before, expected, rtol=1e-2)
    found = logits(PeftModel.from_pretrained(start, folder / "adapter").eval())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    manifest = read_manifest(folder)
    assert manifest is not None
    assert {"adapter/adapter_config.json", "model/config.json"} <= manifest.files.keys()
    assert manifest.metrics["parameters"] == size
    assert 0 < manifest.metrics["parameters_trained"] < manifest.metrics["parameters"]


REINFORCED = ["stages.reinforced.model_from=teacher", f"stages.reinforced.lora={LORA}", "stages.reinforced.steps=2"]
KL = "{place: loss, kind: k3, coefficient: 0.1}"


@pytest.mark.parametrize(
    "others",
    [
        ["updates_per_step=1", f"kl={KL}", "optimizer.lr=1e-2"],
        [f"kl={KL}", "engine={zero_stage: 2, gradient_checkpointing: true}", "optimizer.lr=1e-2"],
        ["preset=exact_ppo", "critic={optimizer: {lr: 1e-3}, warmup_steps: 1}", "optimizer.lr=1e-2"],
    ],
    ids=["kl", "zero2", "critic"],
)
def test_a_policy_of_adapters_is_reinforced(others, store, tmp_path):
    for name in ("data", "teacher"):
        (tmp_path / name).symlink_to(store / name)
    recipe = smoke_recipe([*REINFORCED, *(f"stages.reinforced.{other}" for other in others)])
    folder = run_stage(recipe, "reinforced", tmp_path)
    assert_published(folder, store / "teacher" / "model")
    first, last = (line["values"] for line in read_metrics(folder))
    if "updates_per_step=1" in others:
        assert first["policy/ratio"] == pytest.approx(1.0, abs=1e-5)
    if f"kl={KL}" in others:
        assert abs(first["kl/reference"]) < 1e-9
        assert last["kl/reference"] > 1e-6
    if "preset=exact_ppo" in others:
        assert (folder / "critic" / "value_head.safetensors").exists()
        AutoModelForCausalLM.from_pretrained(folder / "critic")


def test_unknown_layers_and_four_bit_weights_stop_a_stage_at_its_start(store, tmp_path):
    for name in ("data", "teacher"):
        (tmp_path / name).symlink_to(store / name)
    for change, message in {
        "lora.target_modules=[query]": r"lora\.target_modules: the model has no linear layer \['query'\], only",
        "lora.quantisation=4bit": r"lora\.quantisation: 4bit needs a CUDA GPU",
    }.items():
        with pytest.raises(RecipeError, match=message):
            run_stage(smoke_recipe([*REINFORCED, f"stages.reinforced.{change}"]), "reinforced", tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("bitsandbytes") is None,
    reason="needs a CUDA GPU and bitsandbytes",
)
def test_four_bit_weights_train_and_merge(store, tmp_path):
    for name in ("data", "teacher"):
        (tmp_path / name).symlink_to(store / name)
    recipe = smoke_recipe(
        [*REINFORCED, "stages.reinforced.lora.quantisation=4bit", "stages.reinforced.resources={device: cuda}",
         "stages.reinforced.engine={zero_stage: 1, precision: bfloat16}"]
    )  # fmt: skip
    folder = run_stage(recipe, "reinforced", tmp_path)
    config = json.loads((folder / "model" / "config.json").read_text())
    assert "quantization_config" not in config
    AutoModelForCausalLM.from_pretrained(folder / "model")
