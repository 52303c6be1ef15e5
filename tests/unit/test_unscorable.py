"""Rows that nobody can score leave the numbers and are counted; only when none is left does a stage stop."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from dynamo_core.errors import DataError
from tests.builders import read_metrics, run_stage, smoke_recipe


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("unscorable")
    recipe = smoke_recipe(["stages.teacher.steps=6", "stages.student.steps=6"])
    for name in ("data", "teacher", "student"):
        run_stage(recipe, name, root)
    return root


def spoil(store, split, count):
    """Give the first `count` rows of a split an answer in words."""
    path = store / "data" / "data" / f"{split}.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    for index, row in enumerate(rows):
        row["answer"] = "nobody knows" if index < count else "7"
    pq.write_table(table.from_pylist(rows, schema=table.schema), path)


def test_evaluation_leaves_them_out_and_counts_them(store):
    recipe = smoke_recipe(["stages.evaluation.models_from=[student]"])
    spoil(store, "test", 3)
    (line,) = read_metrics(run_stage(recipe, "evaluation", store))
    assert line["values"]["student/unscored_prompts"] == 3
    results = json.loads((store / "evaluation" / "results.json").read_text())
    assert 0 <= results["models"][0]["metrics"]["sampled_pass@1"]["value"] <= 1
    spoil(store, "test", 100)
    with pytest.raises(DataError, match="none of the 12 prompts can be scored"):
        run_stage(recipe, "evaluation", store)


def test_a_mini_batch_without_a_score_is_passed_over(store):
    recipe = smoke_recipe(["stages.reinforced.steps=3", "stages.reinforced.updates_per_step=8"])
    spoil(store, "rl", 2)
    lines = read_metrics(run_stage(recipe, "reinforced", store))
    assert sum(line["values"]["reward/unscored"] for line in lines) > 0
    assert len(lines) == 3
