"""What is refused before anything starts, and the size that a plan shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_core.config.load import load_recipe
from dynamo_core.config.models import ScratchModel
from dynamo_core.errors import RecipeError
from tasks import preflight as checks
from tasks.estimate import model_of, parameter_count, training_bytes
from tasks.preflight import preflight
from tasks.progress import duration
from tests.builders import SHAPE, tiny_model, tiny_tokenizer

SMOKE = Path(__file__).parents[2] / "configs" / "smoke.yaml"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Two cores, and as many GPUs as asked for."""

    def make(gpus: int) -> None:
        monkeypatch.setattr(checks, "core_count", lambda: 2)
        monkeypatch.setattr(checks, "gpu_count", lambda: gpus)

    make(0)
    return make


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("resources.processes=3", "stages.data.resources: processes x threads is 3 x 1 = 3, but this machine has 2"),
        ("stages.teacher.resources.threads=4", "stages.teacher.resources: processes x threads is 1 x 4 = 4"),
        ("resources.device=cuda", "stages.data.resources.device: is cuda, but this machine has no GPU"),
        ("stages.data.source={type: messages, path: no.jsonl}", "stages.data.source.path: there is no file no.jsonl"),
        ("stages.teacher.model={type: pretrained, path: ./no}", "stages.teacher.model.path: there is no model at ./no"),
        ("stages.teacher.model={type: pretrained, path: /no/model}", "there is no model at /no/model"),
        ("stages.teacher.model={type: pretrained, path: org/name}", "org/name is not in the local hub cache"),
    ],
)
def test_what_this_machine_cannot_do(machine, override: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        preflight(load_recipe(SMOKE, [override]))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["stages.teacher.batch_size=6"], "is 8, but batch_size is 6: some ranks would get nothing (use 3 or 6"),
        (["stages.reinforced.prompts_per_step=1", "stages.reinforced.updates_per_step=1"], "use 1 processes"),
    ],
)
def test_a_rank_without_rows_is_refused_with_the_nearest_numbers(machine, overrides, expected) -> None:
    machine(8)
    preflight(load_recipe(SMOKE, ["resources={processes: 8, device: cuda}"]))
    with pytest.raises(RecipeError) as caught:
        preflight(load_recipe(SMOKE, ["resources={processes: 8, device: cuda}", *overrides]))
    assert expected in str(caught.value)


def test_gpus_bound_the_ranks(machine) -> None:
    machine(gpus=2)
    preflight(load_recipe(SMOKE, ["resources={processes: 2, threads: 8, device: auto}"]))
    with pytest.raises(RecipeError, match="processes: is 4, but this machine has 2 GPUs"):
        preflight(load_recipe(SMOKE, ["resources={processes: 4, device: cuda}"]))
    with pytest.raises(RecipeError, match="but this machine has 2 cores"):
        preflight(load_recipe(SMOKE, ["resources={processes: 4, device: cpu}"]))


def test_empty_data_and_folders_without_a_model(machine, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(RecipeError, match="is empty"):
        preflight(load_recipe(SMOKE, [f"stages.data.source={{type: messages, path: {tmp_path}/empty.jsonl}}"]))
    with pytest.raises(RecipeError, match="is no model folder"):
        preflight(load_recipe(SMOKE, [f"stages.teacher.model={{type: pretrained, path: {tmp_path}}}"]))


def test_parameter_count_is_the_models_own() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    counted = ScratchModel(**{**SHAPE.model_dump(), "vocab_size": len(tokenizer)})
    assert parameter_count(counted) == sum(parameter.numel() for parameter in model.parameters())


def test_sizes_follow_references_and_sharding() -> None:
    recipe = load_recipe(SMOKE)
    assert model_of(recipe, "reinforced") == model_of(recipe, "student")
    student = model_of(recipe, "student")
    assert student is not None
    assert training_bytes(recipe, "reinforced") == 16 * parameter_count(student)
    overrides = ["stages.reinforced.resources.processes=2", "stages.reinforced.engine.zero_stage=1"]
    assert training_bytes(load_recipe(SMOKE, overrides), "reinforced") == 12 * parameter_count(student)
    whole = ["stages.reinforced.preset=exact_ppo", "stages.reinforced.kl={place: loss, kind: k2, coefficient: 0.1}"]
    assert training_bytes(load_recipe(SMOKE, whole), "reinforced") == (16 + 16 + 4) * parameter_count(student)
    sharded = ["stages.reinforced.resources.processes=2", "stages.reinforced.engine.zero_stage=3"]
    assert training_bytes(load_recipe(SMOKE, sharded), "reinforced") == (8 + 4) * parameter_count(student)
    assert training_bytes(recipe, "evaluation") is None
    adapted = load_recipe(SMOKE, ["stages.reinforced.lora={rank: 2, alpha: 4, target_modules: [q_proj, v_proj]}"])
    assert training_bytes(adapted, "reinforced") == 4 * parameter_count(student) + 16 * 2 * (64 + 64 + 64 + 64)


def test_four_bit_weights_and_adapter_folders_are_refused_before_anything_starts(tmp_path: Path, monkeypatch) -> None:
    four_bit = load_recipe(SMOKE, ["stages.reinforced.lora={rank: 2, alpha: 4, quantisation: 4bit}"])
    with pytest.raises(RecipeError, match=r"stages\.reinforced\.lora\.quantisation: 4bit needs a CUDA GPU"):
        preflight(four_bit)
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr("tasks.preflight.core_count", lambda: 4)
    with pytest.raises(RecipeError, match=r"holds an adapter, not a whole model \(give the folder of the merged"):
        preflight(load_recipe(SMOKE, [f"stages.teacher.model={{type: pretrained, path: {tmp_path}}}"]))


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 65, 3600)] == ["0:00", "1:05", "1:00:00"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.reinforced.prompts_per_step=40", "must not exceed the data stage's rl_prompts (24)"),
        ("stages.data.split.test=0", "the data stage gives no rows to 'test'"),
        ("stages.teacher.max_length=300", "max_length (300) must not exceed model.context (128)"),
        ("stages.teacher.model.head_dim=31", "head_dim"),
        ("stages.teacher.optimizer.betas=[0.9, 1.0]", "betas"),
    ],
)
def test_numbers_that_exclude_each_other_are_refused_at_load(override: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(SMOKE, [override])
    assert expected in str(caught.value)
