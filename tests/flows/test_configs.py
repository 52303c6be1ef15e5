"""Every shipped recipe is loaded, dumped, loaded back and planned, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dynamo_core.config.load import dump_recipe, load_recipe, parse_recipe
from dynamo_core.config.reinforce import ReinforceStage
from tests.flows.conftest import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_recipe_loads_and_survives_its_own_dump(path: Path) -> None:
    recipe = load_recipe(path)
    assert parse_recipe(yaml.safe_load(dump_recipe(recipe)), "dump") == recipe


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_recipe_is_planned_without_torch(path: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from flows.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'prefect', 'mlflow'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", str(path), "--store", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in load_recipe(path).stages:
        assert name in done.stdout


@pytest.mark.parametrize("size", ["1.5b", "1.5b-faithful", "7b", "7b-faithful"])
def test_the_large_recipes_have_the_papers_sizes(size: str) -> None:
    stage = load_recipe(ROOT / "configs" / f"qwen2.5-math-{size}.yaml").stages["reinforced"]
    assert isinstance(stage, ReinforceStage)
    assert (stage.budget, stage.prompts_per_step // stage.updates_per_step) == (512 * 16, 32)
    assert (stage.n_low, stage.n_high, stage.optimizer.lr) == (8, 24, 1e-6)
