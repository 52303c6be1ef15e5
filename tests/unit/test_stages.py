"""The stages of the smoke recipe, run in this process: what they leave behind, and that it repeats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dynamo_core import stages
from dynamo_core.config.presets import PRESETS
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.errors import DataError
from dynamo_core.files import find_damage
from dynamo_core.stages.manifest import read_manifest
from dynamo_core.training import policy_update, supervised
from tests.builders import read_metrics, run_stage, smoke_recipe, stage_folder

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("stages")
    for name in smoke_recipe().stages:
        run_stage(smoke_recipe(), name, root)
    return root


def allocations(folder: Path) -> list[dict]:
    return [
        row for part in sorted((folder / "tables").glob("allocations-*")) for row in pq.read_table(part).to_pylist()
    ]


def test_every_stage_leaves_a_verifiable_manifest(store):
    for name in smoke_recipe().stages:
        manifest = read_manifest(store / name)
        assert manifest is not None
        assert find_damage(store / name, manifest.files, deep=True) is None
        assert manifest.metrics


def test_budget_and_bounds_hold_at_every_step(store):
    stage = smoke_recipe().stages["reinforced"]
    assert isinstance(stage, ReinforceStage)
    rows = allocations(store / "reinforced")
    assert (stage.n_low, stage.n_high, stage.budget) == (2, 32, 64)
    for step in range(1, stage.steps + 1):
        counts = [row["n"] for row in rows if row["step"] == step]
        assert len(counts) == len({row["prompt_id"] for row in rows if row["step"] == step}) == 8
        assert sum(counts) == stage.budget
        assert all(stage.n_low <= n <= stage.n_high for n in counts)
    assert {row["n"] for row in rows if row["step"] == 1} == {8}  # nothing is known yet
    assert len({row["n"] for row in rows if row["step"] == 4}) > 1  # 24 prompts in steps of 8: all were seen once
    assert all(row["scored"] == row["n"] and 0 <= row["correct"] <= row["n"] for row in rows)


def test_a_second_process_repeats_values_and_weights(store, tmp_path):
    for name in ("data", "teacher", "student"):
        (tmp_path / name).symlink_to(store / name)
    folder = stage_folder(smoke_recipe(), "reinforced", tmp_path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_core.stages", str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = [[line["values"] for line in read_metrics(place)] for place in (folder, store / "reinforced")]
    assert len(values[0]) == 4
    assert values[0] == values[1]
    digests = [read_manifest(place).payload_digest for place in (folder, store / "reinforced")]
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("name", "user"), [("teacher", supervised), ("student", supervised), ("reinforced", policy_update)]
)
def test_packed_rows_train_like_padded_ones(name, user, store, tmp_path, monkeypatch):
    for way in ("padded", "packed"):
        (tmp_path / way).mkdir()
        for before in ("data", "teacher", "student")[: ["teacher", "student", "reinforced"].index(name) + 1]:
            (tmp_path / way / before).symlink_to(store / before)
    asked, lay_out = [], user.lay_out

    def seen(rows, *, packed):
        asked.append(packed)
        return lay_out(rows, packed=packed)

    monkeypatch.setattr(user, "lay_out", seen)
    steps = 1 if name == "reinforced" else 8  # samples of a policy that differs by rounding may differ
    ways = {}
    for batching in ("padded", "packed"):
        overrides = [f"stages.{name}.steps={steps}", f"stages.{name}.batching={batching}"]
        folder = run_stage(smoke_recipe(overrides), name, tmp_path / batching)
        ways[batching] = [line["values"] for line in read_metrics(folder)]
        assert set(asked) == {batching == "packed"}
        asked.clear()
    metric = "policy/grad_norm" if name == "reinforced" else "train/grad_norm"
    assert len(ways["packed"]) == steps
    for packed, padded in zip(ways["packed"], ways["padded"], strict=True):
        assert packed[metric] == pytest.approx(padded[metric], rel=1e-3)


def test_the_model_loads_where_this_project_is_absent(store, tmp_path):
    script = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "chat = [{'role': 'user', 'content': '3+4-2=?'}]\n"
        "text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)\n"
        "ids = tokenizer(text, add_special_tokens=False, return_tensors='pt').input_ids\n"
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0]))\n"
        "assert not [name for name in sys.modules if name.startswith(('dynamo_core', 'deepspeed'))]\n"
    )
    folder = store / "reinforced" / "model"
    done = subprocess.run(
        [sys.executable, "-I", "-c", script, str(folder)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "3+4-2=?" in done.stdout
    assert str(store) not in (folder / "config.json").read_text()
    assert str(store) not in (folder / "tokenizer_config.json").read_text()


def test_evaluation_compares_every_model_on_the_same_prompts(store):
    results = json.loads((store / "evaluation" / "results.json").read_text())
    assert [model["name"] for model in results["models"]] == ["teacher", "student", "reinforced"]
    assert (results["prompts"], results["samples"]) == (12, 4)
    answers = [
        row
        for part in sorted((store / "evaluation" / "tables").glob("answers-*"))
        for row in pq.read_table(part).to_pylist()
    ]
    asked = {
        name: sorted((row["prompt_id"], row["sample"]) for row in answers if row["model"] == name)
        for name in ("teacher", "student", "reinforced")
    }
    assert asked["teacher"] == asked["student"] == asked["reinforced"]
    assert len(asked["teacher"]) == 12 * (4 + 1)
    trained_on = {
        row["prompt_id"]
        for split in ("sft", "rl")
        for row in pq.read_table(store / "data" / "data" / f"{split}.parquet").to_pylist()
    }
    assert not trained_on & {prompt_id for prompt_id, _ in asked["teacher"]}


def test_fewer_prompts_than_a_step_needs_is_one_line(store):
    folder = stage_folder(
        smoke_recipe(["stages.reinforced.prompts_per_step=40", "stages.data.rl_prompts=50"]),
        "reinforced",
        store / "more",
    )
    for name in ("data", "student"):
        (store / "more" / name).symlink_to(store / name)
    with pytest.raises(DataError, match="prompts_per_step is 40 but the data holds 24 training prompts"):
        stages.run(folder)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "exact"])
def test_the_other_presets_run(store, tmp_path, preset):
    for name in ("data", "student"):
        (tmp_path / name).symlink_to(store / name)
    recipe = smoke_recipe([f"stages.reinforced.preset={preset}", "stages.reinforced.steps=3"])
    lines = read_metrics(run_stage(recipe, "reinforced", tmp_path))
    assert all(line["values"]["allocation/budget"] == 64 for line in lines)
    assert (lines[-1]["values"]["modulation/share_boosted"] > 0) == (preset in ("faithful", "exact_ppo"))
    assert lines[-1]["values"]["policy/grad_norm"] > 0


def test_a_pretrained_model_and_bfloat16_run(store, tmp_path):
    (tmp_path / "data").symlink_to(store / "data")
    recipe = smoke_recipe(
        [
            f"stages.reinforced.model={{type: pretrained, path: {store / 'student' / 'model'}}}",
            "stages.reinforced.engine={zero_stage: 1, precision: bfloat16, gradient_checkpointing: true}",
            "stages.reinforced.steps=1",
            "stages.evaluation.models_from=[reinforced]",
            "stages.evaluation.precision=bfloat16",
        ]
    )
    lines = read_metrics(run_stage(recipe, "reinforced", tmp_path))
    assert lines[0]["values"]["policy/ratio"] == pytest.approx(1.0, abs=0.05)
    assert read_metrics(run_stage(recipe, "evaluation", tmp_path))[0]["values"]["reinforced/truncated_share"] >= 0
