"""Gates of the first step and the check for finite numbers: what passes, and what is said of a miss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dynamo_core.errors import NumericalFailure
from dynamo_core.stages.symptoms import GATES
from dynamo_core.training import gates
from dynamo_core.training.critic import Values
from tests.golden import trajectory
from tests.unit.test_objective import batch

PROMPTS = tuple("abc")


def named_batch():
    return replace(batch(), prompt_ids=PROMPTS)


def test_the_table_of_symptoms_has_every_gate():
    assert [gate.name for gate in gates.GATES] == [symptom.name for symptom in GATES]


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-4), ("bfloat16", 5e-2)])
def test_the_ratio_gates_hold_up_to_their_bound(precision, bound):
    passed = gates.ratio_gates(0.9 * bound, 0.0, precision, step=1)
    assert passed == {"gate/ratio": 0.9 * bound, "gate/log_ratio": 0.0}
    with pytest.raises(NumericalFailure, match=rf"gate/ratio: .* is .* in {precision} .* most {bound:g} \(.*precision"):
        gates.ratio_gates(1.1 * bound, 0.0, precision, step=1)
    with pytest.raises(NumericalFailure, match="gate/log_ratio: "):
        gates.ratio_gates(0.0, 1.1 * bound, precision, step=1)
    with pytest.raises(NumericalFailure, match="is nan"):
        gates.ratio_gates(float("nan"), 0.0, precision, step=1)


def test_reference_and_critic_start_from_the_policy():
    rows = named_batch()
    values = Values(torch.zeros_like(rows.old_log_prob_BL), torch.zeros(5))
    passed = gates.start_gates(rows, values, rows.old_log_prob_BL, "float32")
    assert passed == {"gate/reference_kl": 0.0, "gate/critic_value": 0.0}
    assert gates.start_gates(rows, None, None, "float32") == {}
    with pytest.raises(NumericalFailure, match=r"gate/reference_kl: the KL to the reference is 0\.00"):
        gates.start_gates(rows, None, rows.old_log_prob_BL + 0.1, "float32")
    with pytest.raises(NumericalFailure, match=r"gate/critic_value: .* is 0\.3 .* must start at zero"):
        gates.start_gates(rows, Values(values.values_BL - 0.3, values.after_B), None, "float32")


def test_what_is_not_finite_is_named_with_its_prompts():
    rows = named_batch()
    gates.check_finite(3, rows, Values(rows.entropy_BL, torch.zeros(5)), rows.old_log_prob_BL)
    rewards_B = torch.tensor([1.0, 0.0, float("inf"), 1.0, float("inf")])
    with pytest.raises(
        NumericalFailure, match="the reward is inf at step 3, in 2 rollouts of prompts 'a', 'c'"
    ) as error:
        gates.check_finite(3, replace(rows, rewards_B=rewards_B))
    assert error.value.step == 3
    spoiled_BL = rows.entropy_BL.clone()
    spoiled_BL[3, 1] = torch.nan
    with pytest.raises(NumericalFailure, match="the critic's value is nan at step 3, in 1 rollouts of prompts 'c'"):
        gates.check_finite(3, rows, Values(spoiled_BL, torch.zeros(5)))
    with pytest.raises(NumericalFailure, match="the log-prob of the reference is nan"):
        gates.check_finite(3, rows, None, spoiled_BL)


def test_the_loop_passes_its_gates_once():
    steps, _ = trajectory.run(preset="exact_ppo", kl="{place: loss, kind: k3, coefficient: 0.1}")
    found = [{name for name in step if name.startswith("gate/")} for step in steps]
    # The policy waits two steps for its critic; only then has it a ratio.
    assert found == [{"gate/reference_kl", "gate/critic_value"}, set(), {"gate/ratio", "gate/log_ratio"}, set(), set()]


def test_a_sampler_that_disagrees_ends_the_stage(monkeypatch):
    score = trajectory.ScoredScript._scored

    def off(self, rollout):
        found = score(self, rollout)
        (segment,) = found.segments
        return replace(found, segments=(replace(segment, log_probs=segment.log_probs - 0.01),))

    monkeypatch.setattr(trajectory.ScoredScript, "_scored", off)
    with pytest.raises(NumericalFailure, match=r"gate/ratio: the mean \|ratio - 1\| of the sampled tokens is 0.0101"):
        trajectory.run()


def test_mini_batches_are_skipped_past_target_kl():
    changes = {"updates_per_step": 3, "optimizer__lr": 1e-2, "steps": 2}
    free, _ = trajectory.run(**changes)
    assert "policy/skipped_updates" not in free[0]
    assert free[0]["policy/approx_kl"] > 1e-4
    stopped, _ = trajectory.run(**changes, target_kl=1e-6)
    # The first that has a gradient is on the policy, the next is past the target: in step 1, whose first mini-batch has
    # none, that is the last, in step 2 one is left out.
    assert [step["policy/skipped_updates"] for step in stopped] == [0, 1]
    assert stopped[0]["gate/ratio"] == 0  # measured where weights have not moved yet
    assert stopped[0]["policy/lr"] == pytest.approx(free[0]["policy/lr"])
    loose, _ = trajectory.run(**changes, target_kl=100.0)
    assert [step["policy/skipped_updates"] for step in loose] == [0, 0]
    assert loose[1]["policy/loss"] == free[1]["policy/loss"]
