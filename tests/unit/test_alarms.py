"""Each alarm with numbers just on either side of its threshold."""

from __future__ import annotations

import pytest

from dynamo_core.stages import alarms
from dynamo_core.stages.alarms import Alarms, raised
from dynamo_core.stages.symptoms import ALARMS

HEALTHY = {
    "policy/entropy": 0.5,
    "rollout/truncated_share": 0.1,
    "allocation/zero_variance_groups": 0.4,
    "allocation/budget": 100.0,
    "reward/unscored": 3.0,
    "critic/explained_variance": 0.2,
    "policy/update_rms": 1e-6,
    "policy/grad_norm": 0.3,
    "policy/lr": 1e-6,
    "policy/clipfrac": 0.05,
}
CASES = {
    "entropy_collapse": ({"policy/entropy": 0.049}, {"policy/entropy": 0.051}),
    "truncated": ({"rollout/truncated_share": 0.51}, {"rollout/truncated_share": 0.5}),
    "equal_rewards": ({"allocation/zero_variance_groups": 1.0}, {"allocation/zero_variance_groups": 0.99}),
    "explained_variance": ({"critic/explained_variance": -0.51}, {"critic/explained_variance": -0.5}),
    "weights_still": ({"policy/update_rms": 0.0}, {"policy/update_rms": 0.0, "policy/grad_norm": 0.0}),
    "unscored": ({"reward/unscored": 21.0}, {"reward/unscored": 20.0}),
    "clipped": ({"policy/clipfrac": 0.31}, {"policy/clipfrac": 0.3}),
}


def on(changes, **options) -> set[str]:
    return {name for name, flag in raised({**HEALTHY, **changes}, first_entropy=0.5, **options).items() if flag}


def test_the_table_of_symptoms_has_every_alarm():
    assert {symptom.name for symptom in ALARMS} == set(CASES) == set(raised(HEALTHY, first_entropy=0.5))


@pytest.mark.parametrize("name", CASES)
def test_an_alarm_is_raised_by_its_own_cause_alone(name):
    bad, just_right = CASES[name]
    assert on(bad) == {name}
    assert on(just_right) == set()


def test_entropy_has_a_floor_wherever_it_began():
    assert raised({**HEALTHY, "policy/entropy": 0.004}, first_entropy=0.01)["entropy_collapse"]
    assert not raised({**HEALTHY, "policy/entropy": 0.006}, first_entropy=0.01)["entropy_collapse"]


def test_a_critic_that_warms_up_may_be_wrong():
    wrong = CASES["explained_variance"][0]
    assert on(wrong, critic_settled=False) == set()
    watched = Alarms(critic_warmup=2, quiet=True)
    found = [watched.observe(step, {**HEALTHY, **wrong})["alarm/explained_variance"] for step in (1, 2, 3)]
    assert found == [0, 0, 1]


def test_a_policy_that_waits_raises_nothing():
    waiting = {name: value for name, value in HEALTHY.items() if not name.startswith(("policy/", "critic/"))}
    assert not any(raised({**waiting, "policy/entropy": 0.5}, first_entropy=0.5).values())


def test_each_alarm_is_said_once_also_after_a_resume(caplog):
    first, later = Alarms(), Alarms()
    assert first.observe(1, HEALTHY)["alarm/entropy_collapse"] == 0
    assert first.observe(2, {**HEALTHY, "policy/entropy": 0.01})["alarm/entropy_collapse"] == 1
    said = (
        "alarm: entropy has collapsed: below 10 % of its first value, or below 0.005: policy/entropy is 0.01 at step 2;"
        " see dynamo-rl diagnose"
    )
    assert caplog.messages == [said]
    later.load_state_dict(first.state_dict())
    assert later.observe(3, {**HEALTHY, "policy/entropy": 0.04})["alarm/entropy_collapse"] == 1  # of the first 0.5
    assert caplog.messages == [said]


def test_the_table_names_the_thresholds():
    titles = {symptom.name: symptom.title for symptom in ALARMS}
    for name, number in {
        "entropy_collapse": f"{alarms.ENTROPY_SHARE:.0%}".replace("%", " %"),
        "truncated": f"{alarms.TRUNCATED_SHARE:.0%}".replace("%", " %"),
        "explained_variance": f"{alarms.EXPLAINED_VARIANCE:g}",
        "unscored": f"{alarms.UNSCORED_SHARE:.0%}".replace("%", " %"),
        "clipped": f"{alarms.CLIP_FRACTION:.0%}".replace("%", " %"),
    }.items():
        assert number in titles[name]
    assert f"{alarms.ENTROPY_FLOOR:g}" in titles["entropy_collapse"]
