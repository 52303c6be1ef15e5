"""What the quickstart recipe promises: reinforcement removes the noise of the demonstrations, on unseen problems."""

from __future__ import annotations

import json

import pytest

from tests.flows.conftest import ROOT, Served


@pytest.mark.slow
def test_reinforcement_raises_the_student_well_above_its_start(served: Served) -> None:
    done = served.run("run", str(ROOT / "configs" / "quickstart.yaml"), timeout=1800)
    assert done.returncode == 0, done.stderr
    (folder,) = (served.store.root / "stages").glob("evaluation-*/results.json")
    results = json.loads(folder.read_text())
    assert results["prompts"] >= 300
    models = {model["name"]: model["metrics"] for model in results["models"]}
    student, reinforced = (models[name]["sampled_pass@1"] for name in ("student", "reinforced"))
    assert 0.30 <= student["value"] <= 0.60
    assert reinforced["value"] >= student["value"] + 0.20
    assert reinforced["low"] > student["high"]
