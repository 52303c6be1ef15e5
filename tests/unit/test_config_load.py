"""Recipes as people write them: YAML rules, overrides, presets, and one clear line for whatever is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_core.config.load import dump_recipe, load_recipe
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.config.stages import SftStage
from dynamo_core.config.strict_yaml import dump_yaml, parse_yaml
from dynamo_core.errors import RecipeError

CONFIGS = Path(__file__).parents[2] / "configs"
SMOKE = CONFIGS / "smoke.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-6", 5e-6),
        ("1.0e-5", 1e-5),
        (".5", 0.5),
        ("3", 3),
        ("010", 10),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2026-01-31", "2026-01-31"),
        ("true", True),
        ("yes", "yes"),
        ("on", "on"),
        ('"false"', "false"),
        ("", None),
        ("~", None),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    found = parse_yaml(text, "here")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["5e-6", "true", "1", "null", "yes", "2026-01-31", "~", "", "a: b", "1.0", ".inf"])
def test_dumped_text_stays_text(text: str) -> None:
    assert parse_yaml(dump_yaml({"key": text}), "here") == {"key": text}


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_recipes_load_and_survive_a_dump(config: Path, tmp_path: Path) -> None:
    recipe = load_recipe(config)
    dumped = tmp_path / "recipe.yaml"
    dumped.write_text(dump_recipe(recipe))
    assert load_recipe(dumped) == recipe


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty"),
        ("- a", "is a mapping"),
        ("a: [", "line 1, column 5"),
        ("name: t\nstages:\n  a: 1\n b: 2", "line 4, column 2"),
        ("name: t\nname: u", "line 2, column 1: key 'name' is given twice, first in line 1"),
        ("1: x", "line 1, column 1: key 1 must be text"),
        ("name: \x01", "line 1: character #x0001"),
        ("name: &a [*a]\nstages: {}", "holds what a recipe cannot hold"),
        ("name: !!int x", "invalid literal"),
        ("name: t\nstages: {}", "stages: must not be empty"),
        ("name: t\nstages: {a: {type: evaluate, sampling: {max_new_tokens: 8}}}", "no earlier stage produces"),
    ],
)
def test_bad_files_are_one_line(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.yaml", tmp_path):
        with pytest.raises(RecipeError, match="cannot read recipe"):
            load_recipe(path)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.teacher.stepz=3", "stages.teacher.stepz: unknown key; did you mean 'steps'?"),
        ("stages.teachr.steps=3", "no stage 'teachr'; did you mean 'teacher'?"),
        ("stages.teacher.optimizer.lr=0", "stages.teacher.optimizer.lr: is 0, must be > 0"),
        ("stages.teacher.optimizer.lr=.inf", "should be a finite number"),
        ("stages.teacher.steps='3'", 'stages.teacher.steps: is "3", should be a valid integer'),
        ("stages.teacher.steps=3.5", "stages.teacher.steps: is 3.5, should be a valid integer"),
        ("stages.teacher.engine.zero_stage=5", "is 5, must be >= 0 and <= 3"),
        ("stages.teacher.engine.precision=float3", "did you mean 'float32'? allowed: float32, bfloat16"),
        ('stages.teacher.engine.gradient_checkpointing="false"', 'is "false", should be a valid boolean'),
        ("stages.teacher.type=sftt", "stages.teacher.type: is \"sftt\", did you mean 'sft'?"),
        ("stages.teacher.type=null", "stages.teacher.type: is null, allowed: prepare_data"),
        ("stages.teacher.model.heads=3", "stages.teacher.model: heads (3) must be a multiple of kv_heads (2)"),
        ("stages.data.source.type=arithmetics", "stages.data.source.type: "),
        ("stages.data.source.terms=[2, 9]", "stages.data.source.terms.1: is 9, must be >= 2 and <= 8"),
        ("stages.reinforced.preset=exakt", "stages.reinforced.preset: is \"exakt\", did you mean 'exact'?"),
        ("stages.reinforced.allocation.low=5", "low (5) must not exceed high (4)"),
        ("stages.reinforced.allocation.lo=.5", "stages.reinforced.allocation.lo: unknown key; did you mean 'low'?"),
        ("stages.reinforced.rollouts_per_prompt=1", "the budget 8 is outside 8x2..8x4"),
        ("stages.reinforced.loss.type=gspo", "dual_clip (10) belongs to type 'ppo': set it to null for 'gspo'"),
        ("stages.reinforced.entropy_method.type=clip", "did you mean 'clip_cov'?"),
        ("stages.reinforced.entropy_method={type: clip_cov, low: 6}", "low (6) must not exceed high (5)"),
        ("stages.reinforced.entropy_method={type: fork_tokens, share: 0}", "is 0, must be > 0 and <= 1"),
        ("stages.reinforced.modulation.normaliser=2", "is 2, allowed: max or must be > 0 and < 1"),
        ("stages.evaluation.models_from=[nobody]", "'nobody' is not one of the earlier stages"),
        ("lr=4", "'lr' belongs under stages.*.optimizer"),
        ("#save=10", "#save: unknown key"),
        ("seed.x=3", "'seed' is 3, which has no keys"),
        ("steps", "write it as key=value"),
        ("stages.teacher.steps=[1", "column"),
        ("name='a b'", 'name: is "a b", should match pattern'),
        ("stages=3", "stages: is 3, should be a mapping"),
    ],
)
def test_refused_overrides_say_what_and_where(override: str, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(SMOKE, [override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["preset=faithful", "rollouts_per_prompt=2"], "within the bounds 4..3"),
        (["preset=gspo", "entropy_method.type=fork_tokens"], "'gspo' needs whole rows"),
        (["preset=gspo", "entropy_method.type=clip_cov"], "'gspo' needs whole rows"),
    ],
)
def test_switches_that_do_not_go_together_are_refused(overrides: list[str], expected: str) -> None:
    with pytest.raises(RecipeError, match=expected):
        load_recipe(SMOKE, [f"stages.reinforced.{override}" for override in overrides])


@pytest.mark.parametrize(
    ("overrides", "n_low"),
    [
        (["preset=exact"], 2),
        (["preset=exact", "allocation.low=.1"], 2),  # siblings to compare
        (["preset=exact", "allocation.low=.1", "estimator=reinforce_pp", "allocation.objective=neyman"], 1),
        (["preset=exact", "allocation.low=.1", "estimator=reinforce_pp"], 2),  # 1/(n-1) has no n = 1
        (["preset=exact", "allocation.objective=drgrpo"], 3),  # convex from 3 on
        (["preset=faithful"], 4),
        (["preset=faithful", "allocation.low=.1"], 4),  # the rank ignores fewer
        (["preset=grpo"], 8),
    ],
)
def test_the_fewest_rollouts_follow_estimator_rule_and_objective(overrides: list[str], n_low: int) -> None:
    stage = load_recipe(SMOKE, [f"stages.reinforced.{override}" for override in overrides]).stages["reinforced"]
    assert isinstance(stage, ReinforceStage)
    assert stage.n_low == n_low


def test_overrides_reach_into_a_preset() -> None:
    plain = load_recipe(SMOKE).stages["reinforced"]
    changed = load_recipe(SMOKE, ["stages.reinforced.allocation.low=0.5"]).stages["reinforced"]
    assert isinstance(plain, ReinforceStage)
    assert isinstance(changed, ReinforceStage)
    assert changed.allocation == plain.allocation.model_copy(update={"low": 0.5})
    assert changed.loss == plain.loss


def test_a_preset_can_be_overridden() -> None:
    stage = load_recipe(SMOKE, ["stages.reinforced.preset=grpo"]).stages["reinforced"]
    assert isinstance(stage, ReinforceStage)
    assert (stage.estimator, stage.allocation.rule) == ("grpo", "uniform")


def test_later_overrides_win_and_numbers_stay_numbers() -> None:
    stage = load_recipe(
        SMOKE, ["stages.teacher.optimizer.lr=1e-3", "stages.teacher.optimizer.lr=5e-6", "stages.teacher.steps=7"]
    ).stages["teacher"]
    assert isinstance(stage, SftStage)
    assert (stage.optimizer.lr, stage.steps) == (5e-6, 7)


def test_a_misspelt_key_is_named_before_what_it_leaves_missing(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(SMOKE.read_text().replace("batch_size: 32\n    micro", "batchsize: 32\n    micro", 1))
    with pytest.raises(RecipeError, match=r"teacher\.batchsize: unknown key; did you mean 'batch_size'\?.*1 more"):
        load_recipe(path)


def test_loading_imports_nothing_heavy() -> None:
    code = (
        "import sys; from pathlib import Path; from dynamo_core.config.load import load_recipe;"
        f"load_recipe(Path({str(SMOKE)!r}));"
        "print(sorted({'torch', 'numpy', 'transformers', 'deepspeed', 'prefect', 'mlflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_stage_keeps_the_shared_resources_that_it_does_not_change() -> None:
    recipe = load_recipe(SMOKE, ["resources.processes=2", "stages.teacher.resources.timeout_minutes=5"])
    assert recipe.stages["teacher"].resources == recipe.resources.model_copy(update={"timeout_minutes": 5.0})
    assert recipe.stages["student"].resources == recipe.resources
