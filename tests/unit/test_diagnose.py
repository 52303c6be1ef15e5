"""`dynamo-rl diagnose` on stage folders and runs of a made-up store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_core.config.load import dump_recipe
from dynamo_core.errors import RecipeError
from dynamo_core.stages.symptoms import SYMPTOMS, markdown
from tasks.diagnose import diagnose, find_stages
from tasks.store import Store
from tests.builders import CONFIGS, smoke_recipe, stage_folder
from tests.unit.test_alarms import CASES, HEALTHY

ROOT = Path(__file__).parents[2]
RUN = "20260101-120000-abcd"


def write(folder: Path, lines: list[dict[str, float]], error: dict | None = None) -> Path:
    with (folder / "metrics.jsonl").open("w") as file:
        for step, values in enumerate(lines, start=1):
            file.write(json.dumps({"step": step, "attempt": 1, "values": values, "timings": {}}) + "\n")
    if error is not None:
        (folder / "error.json").write_text(json.dumps({"code": 4, "remedy": "", "step": 1, "rank": 0, **error}))
    return folder


@pytest.fixture
def store(tmp_path):
    """A run of one healthy stage of 4 steps."""
    found = Store(tmp_path)
    found.prepare()
    folder = stage_folder(smoke_recipe(), "reinforced", tmp_path / "stages").rename(
        tmp_path / "stages" / "reinforced-1"
    )
    write(folder, [{**HEALTHY, "reward/correct": 0.5, "reward/prompt_mean_correct": 0.5}] * 4)
    found.run_folder(RUN).mkdir()
    (found.run_folder(RUN) / "recipe.yaml").write_text(dump_recipe(smoke_recipe()))
    found.note_stages(RUN, {"reinforced": folder})
    return found


def shown(folder: Path) -> dict[str, str]:
    return {finding.symptom.name: finding.measured for finding in diagnose(folder)}


def test_the_documented_table_is_the_table():
    assert markdown() in (CONFIGS / "README.md").read_text()
    assert "|" not in "".join(text for item in SYMPTOMS for text in (item.title, *item.causes, *item.keys))
    assert all(item.causes and item.keys for item in SYMPTOMS)


def test_a_run_has_several_names(store):
    folder = store.root / "stages" / "reinforced-1"
    names = (RUN, "smoke", f"smoke-{RUN}", "reinforced-1", str(folder))
    assert all(find_stages(name, store) == {"reinforced": folder} for name in names)
    with pytest.raises(RecipeError, match=rf"no run and no stage folder is called 'other' .*\(newest runs: {RUN}\)"):
        find_stages("other", store)


@pytest.mark.parametrize("name", CASES)
def test_an_alarm_is_shown_with_its_number_and_step(store, name):
    (folder,) = find_stages(RUN, store).values()
    sick = {**HEALTHY, **CASES[name][0], f"alarm/{name}": 1.0}
    write(folder, [HEALTHY, sick, sick, HEALTHY])
    (found,) = diagnose(folder)
    value = sick[found.symptom.metric]
    assert found.symptom.name == name
    assert found.measured.startswith(
        f"{found.symptom.metric} is {value:.3g} at step 2, {value:.3g} at step 3; in 2 of 4"
    )


@pytest.mark.parametrize(
    ("cause", "name"),
    [
        ("gate/ratio: the mean |ratio - 1| of the sampled tokens is 0.3 before the first update, ...", "ratio"),
        ("gate/critic_value: the largest |value| of the critic is 0.3 before the first update, ...", "critic_value"),
        ("the reward is nan at step 3, in 2 rollouts of prompts 'a'", "reward_not_finite"),
        ("the loss part 'policy' is nan at optimizer step 3, in a micro-batch of prompts 'a'", "not_finite"),
        ("the gradient of 'w' is not finite at optimizer step 3, in a micro-batch of prompts 'a'", "not_finite"),
        ("weight 'w' is not finite after optimizer step 3: nothing is saved", "not_finite"),
        ("out of memory: tried to allocate", "memory"),
        ("the disk is full: x", "disk"),
        ("something else", "error"),
    ],
)
def test_an_error_finds_its_symptom(store, cause, name):
    (folder,) = find_stages(RUN, store).values()
    assert shown(write(folder, [], {"cause": cause, "remedy": "do it"})) == {name: cause}


def test_trends_need_many_steps(store):
    (folder,) = find_stages(RUN, store).values()

    def steps(shares, **more):
        return [{"reward/correct": share, "reward/prompt_mean_correct": share, **more} for share in shares]

    assert shown(write(folder, steps([0.0] * 3))) == {"no_reward": "reward/correct is 0 in all 3 steps up to step 3"}
    falling = [0.5 - 0.01 * step for step in range(40)]
    assert shown(write(folder, steps(falling))) == {"flat_reward": "0.455 before, 0.155 at the end (step 40)"}
    assert shown(write(folder, steps(falling[:19]))) == {}
    assert shown(write(folder, steps(falling[::-1]))) == {}
    assert shown(write(folder, steps([1.0] * 40))) == {}
    skipping = {"policy/skipped_updates": 2.0}
    assert set(shown(write(folder, steps([0.5, 0.6, 0.7], **skipping)))) == {"skipped_updates"}


def test_the_command_says_so_without_torch(store):
    (folder,) = find_stages(RUN, store).values()

    def run() -> str:
        script = (
            "import sys; from flows.cli import app\n"
            f"app(['diagnose', 'smoke', '--store', {str(store.root)!r}], standalone_mode=False)\n"
            "assert 'torch' not in sys.modules and 'mlflow' not in sys.modules"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert run() == "reinforced: nothing is wrong (4 of 4 steps, not finished: it runs, or was stopped)\n"
    write(folder, [{**HEALTHY, "rollout/truncated_share": 0.9, "alarm/truncated": 1.0}])
    said = run()
    assert "reinforced: more than 50 % of the rollouts are cut off" in said
    assert "rollout/truncated_share is 0.9 at step 1; in 1 of 1 steps" in said
    assert "1. max_new_tokens is too small" in said
    assert "raise sampling.max_new_tokens" in said
