"""The golden trajectory holds, and it is sensitive to what it guards."""

from __future__ import annotations

import json
from functools import cache

import pytest

from dynamo_core.algorithms import advantages
from dynamo_core.stages import reinforce
from tests.golden import trajectory

plain_run = cache(trajectory.run)


def compare(found, expected):
    """Bitwise on the recording processor and torch, else within 1e-9. Metrics newer than the record are left out."""
    known = [
        {name: ours[name] for name in theirs} for ours, theirs in zip(found["steps"], expected["steps"], strict=True)
    ]
    found = {**found, "steps": known}
    if found["fingerprint"] == expected["fingerprint"]:
        assert found == expected
        return
    for ours, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert {k: float.fromhex(v) for k, v in ours.items()} == pytest.approx(
            {k: float.fromhex(v) for k, v in theirs.items()}, rel=1e-9, abs=1e-9
        )
    assert {k: float.fromhex(v) for k, v in found["parameters"].items()} == pytest.approx(
        {k: float.fromhex(v) for k, v in expected["parameters"].items()}, rel=1e-9, abs=1e-9
    )


def test_the_trajectory_is_the_recorded_one():
    expected = json.loads(trajectory.RECORD.read_text())
    compare(trajectory.summary(), expected)
    rewards = [float.fromhex(step["reward/mean"]) for step in expected["steps"]]
    assert all(0.1 < reward < 0.9 for reward in rewards)  # mixed rewards, else nothing is guarded
    assert float.fromhex(expected["steps"][-1]["allocation/std"]) > 0  # history has moved the allocation


def test_a_sign_error_in_the_advantage_is_seen(monkeypatch):
    right = advantages.ESTIMATORS["rloo"]
    monkeypatch.setitem(advantages.ESTIMATORS, "rloo", lambda rewards, group: -right(rewards, group))
    with pytest.raises(AssertionError):
        compare(trajectory.summary(), json.loads(trajectory.RECORD.read_text()))


@pytest.mark.parametrize("micro_batch_size", [1, 7, 64])
def test_micro_batches_change_nothing_but_rounding(micro_batch_size):
    steps, parameters = trajectory.run(micro_batch_size=micro_batch_size)
    expected_steps, expected = plain_run()
    for name, tensor in expected.items():
        assert parameters[name].numpy() == pytest.approx(tensor.numpy(), rel=1e-6, abs=1e-8), name
    assert steps[0]["policy/loss"] == pytest.approx(expected_steps[0]["policy/loss"], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"estimator": "grpo"},
        {"allocation__rule": "waterfall_variance"},
        {"allocation__rule": "waterfall_std"},
        {"statistics__discount": 1.0},
        {"modulation__expectation": "sequence"},
        {"modulation__normaliser": "max"},
        {"aggregation": "token-mean"},
        {"aggregation": "seq-mean-token-mean"},
        {"aggregation": "seq-mean-token-sum-norm"},
        {"aggregation": "prompt-mean-token-mean"},
        {"aggregation": "prompt-mean-seq-mean-token-mean"},
    ],
    ids=str,
)
def test_each_switch_runs_and_changes_the_trajectory(changes):
    steps, _ = trajectory.run(**changes)
    assert all(step["allocation/budget"] == 36 for step in steps)
    plain, _ = plain_run()
    assert any(
        step.get(name) != pytest.approx(value)
        for step, usual in zip(steps, plain, strict=True)
        for name, value in usual.items()
    )


@pytest.mark.parametrize("objective", ["neyman", "drgrpo"])
def test_the_objective_reaches_the_allocator(objective, monkeypatch):
    seen = []
    allocate = reinforce.allocate

    def spy(*arguments, **options):
        seen.append(options["objective"])
        return allocate(*arguments, **options)

    monkeypatch.setattr(reinforce, "allocate", spy)
    steps, _ = trajectory.run(allocation__objective=objective, allocation__low=0.5)
    assert seen == [objective] * len(steps)
