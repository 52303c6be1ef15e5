"""The numerical guard, on one rank and two: everything is named, and no weight has moved."""

from __future__ import annotations

import json

import pytest

from dynamo_core.config.base import Resources
from dynamo_core.training import distributed
from tests.invariants.guard_worker import PARAMETER, PROMPT, planted
from tests.invariants.test_ranks import launch


def assert_said(plant: str, message: str, rank: str = "") -> None:
    if plant == "loss":
        assert message.startswith(f"the loss part 'policy' is nan at optimizer step 1{rank}, in a micro-batch of")
        assert f"'{PROMPT}'" in message
    else:
        assert message.startswith("the gradient of 'model.model.")
        assert f"{PARAMETER}' is not finite at optimizer step 1{rank}, in a micro-batch of prompts '" in message


@pytest.mark.parametrize(
    ("zero_stage", "precision"), [(0, "float32"), (1, "float32"), (2, "float32"), (1, "bfloat16"), (2, "bfloat16")]
)
@pytest.mark.parametrize("plant", ["loss", "gradient"])
def test_a_planted_number_is_named_before_weights_move(plant, zero_stage, precision):
    with distributed.start(Resources(), always_group=True) as ranks:
        message, unmoved = planted(ranks, plant, zero_stage, precision)
    assert_said(plant, message)
    assert unmoved


def test_both_ranks_stop_alike(tmp_path):
    launch(2, "tests.invariants.guard_worker", str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert len(first) == 6
    for case, (message, unmoved) in first.items():
        assert unmoved, case
        rank = " on rank 1" if case.startswith("gradient") or "rank 1" in message else " on rank 0"
        assert_said(case[:-1], message, rank)
