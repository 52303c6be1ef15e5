"""Public faults of losses, advantages and precision: the value that is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dynamo_core.algorithms import advantages
from dynamo_core.algorithms.advantages import GROUP_ESTIMATORS
from dynamo_core.algorithms.aggregation import aggregation_weights
from dynamo_core.algorithms.distillation import forward_kl
from dynamo_core.algorithms.losses import policy_loss
from dynamo_core.algorithms.schedules import factor
from dynamo_core.config.base import Engine, Optimizer, Resources
from dynamo_core.data.batching import micro_batches
from dynamo_core.evaluation.passk import pass_at_k
from dynamo_core.rollout.batch import policy_batch
from dynamo_core.rollout.collector import ScoredRollout
from dynamo_core.training import distributed
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.policy import TokenScorer
from dynamo_core.types import FinishReason, Rollout, Segment, Verdict
from tests.builders import tiny_model, tiny_tokenizer
from tests.cases.support import close, solves, train_cases


def f64(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def scored(tokens: list[int], *, truncated: bool = False, score: float | None = 1.0, rollout: int = 0) -> ScoredRollout:
    """A rollout of prompt "a" after two prompt tokens."""
    zeros = np.zeros(len(tokens), dtype=np.float32)
    segment = Segment(tuple(tokens), np.ones(len(tokens), dtype=np.bool_), zeros, zeros, zeros)
    reason = FinishReason.LENGTH if truncated else FinishReason.EOS
    found = Rollout("a", rollout, (1, 2), (segment,), reason, weight_version=0)
    correct = None if score is None else score > 0
    return ScoredRollout(found, "", Verdict(score, correct, "test"))


@solves("t-loss-02")
def test_one_denominator_over_ranks(given, expected):
    """Every rank divides by the global count; the engine multiplies by the ranks that its gradient mean divides by."""
    counts = [rank["tokens"] for rank in given["ranks"]]
    weights = aggregation_weights(torch.ones(1, sum(counts)), torch.zeros(1), aggregation="token-mean")
    losses = torch.cat([torch.full((rank["tokens"],), rank["sum_loss"] / rank["tokens"]) for rank in given["ranks"]])
    close((weights[0] * losses).sum(), expected["effective_loss"])
    close(weights[0, 0] * len(counts), expected["scale_of_rank_sum"])


@solves("t-loss-04")
def test_the_last_part_of_a_batch_is_not_diluted(given, expected):
    parts = micro_batches([5] * given["n_micro"], given["accumulation"])
    assert len(parts) == expected["steps"]
    assert [len(part) for part in parts] == expected["group_sizes"]
    for part, loss in zip(parts, expected["group_loss"], strict=True):
        weights = aggregation_weights(torch.ones(len(part), 5), torch.arange(len(part)), aggregation="token-mean")
        close((weights * given["per_micro_loss"]).sum(), loss)


@solves("t-loss-05")
def test_cut_off_rollouts_leave_numerator_and_denominator(given, expected):
    rows = [
        scored([5] * n, truncated=cut, rollout=place)
        for place, (n, cut) in enumerate(zip(given["lengths"], given["truncated"], strict=True))
    ]
    batch = policy_batch(rows, ["a"], overlong="mask" if given["mask_truncated"] else "keep")
    weights = aggregation_weights(batch.mask_BL, batch.group_B, aggregation="token-mean")
    close((weights * given["per_token_loss"]).sum(), expected)


@solves("t-rl_math-01")
def test_whitening_ignores_padding(given, expected):
    values, mask = f64(given["advantages"]), torch.tensor(given["mask"])
    inside = values[mask != 0]
    scope = (inside.mean(), inside.var(correction=given["ddof"]))
    close(advantages.whiten(values, mask, scope=scope), expected)
    close(advantages.whiten(values, mask, weight=torch.ones_like(values)), expected)


@solves("t-rl_math-07")
def test_each_row_keeps_its_own_mean(given, expected):
    for row, mask, wanted in zip(given["x"], given["mask"], expected, strict=True):
        chosen = torch.tensor([mask])
        close(advantages.whiten(f64([row]), chosen, weight=torch.ones(1, len(row)))[0], wanted)


@solves("t-rl_math-08", "t-rl_math-09")
def test_gae_ends_with_the_response(given, expected):
    mask = torch.tensor([given.get("mask", [1] * len(given["values"]))])
    bootstrap = f64([given["value_after_cut"]]) if "value_after_cut" in given else None
    found, _ = advantages.gae(
        f64([given["token_rewards"]]), f64([given["values"]]), mask,
        gamma=given["gamma"], lam=given["lam"], bootstrap=bootstrap,
    )  # fmt: skip
    close(found[0], expected)


@solves("t-rl_math-11", "t-rl_math-12", "t-rl_math-13")
def test_only_an_answer_without_an_end_is_charged(given, expected):
    """How a rollout ended is recorded where it was sampled; no token is searched for afterwards."""
    response, ends = given["response"], {given["eos"], given.get("stop_id", given["eos"])}
    length = next((place + 1 for place, token in enumerate(response) if token in ends), len(response))
    cut = response[length - 1] not in ends
    row = scored(response[:length], truncated=cut, score=given["score"])
    batch = policy_batch([row], ["a"], truncation_penalty=given["missing_eos_penalty"])
    found = np.zeros(len(response))
    found[length - 1] = float(batch.rewards_B[0])
    close(found, expected)


@solves("t-rl_math-17")
def test_the_temperature_divides_logits_on_every_path(given, expected):
    logits = f64(given["logits"]) / given["temperature"]
    close(logits.log_softmax(-1)[given["token"]], expected)
    model = tiny_model(tiny_tokenizer(), dtype=torch.float64)
    tokens, mask = torch.tensor([[5, 6, 7]]), torch.tensor([[False, False, True]])
    found = TokenScorer(model)(tokens, mask, given["temperature"]).log_prob_BL[0, 2]
    plain = (model(tokens).logits[0, 1] / given["temperature"]).log_softmax(-1)[7]
    close(found.detach(), plain.detach())


@solves("t-rl_math-20")
def test_the_pessimistic_term_wins(given, expected):
    for ratio, advantage, wanted in zip(given["ratio"], given["advantage"], expected, strict=True):
        one = torch.ones(1, 1, dtype=torch.float64)
        loss = policy_loss(
            f64([[ratio]]).log(), one * 0, one * advantage, one, eps_low=given["eps_low"], eps_high=given["eps_high"]
        )
        close(-loss, wanted)


@solves("t-rl_math-22")
def test_one_reward_a_response(given, expected):
    rows = [scored([5], score=1.0 if place == 1 else 0.0, rollout=place) for place in range(given["responses"])]
    rewards = policy_batch(rows, ["a"]).rewards_B
    assert len(rewards) == expected["n_rewards"]
    assert rewards[1] == expected["reward_of_response_1"]


@solves("t-rl_math-24")
def test_one_valid_reward_in_a_group(given, expected):
    rows = [scored([5], score=score, rollout=place) for place, score in enumerate(given["rewards"])]
    batch = policy_batch(rows, ["a"])
    found = np.zeros(len(rows))
    found[[score is not None for score in given["rewards"]]] = advantages.grpo(
        batch.rewards_B, batch.group_B, ddof=given["ddof"]
    )
    close(found, expected)


@solves("t-checkpoint-13")
def test_the_schedule_goes_on_from_the_saved_step(given, expected):
    close(factor("linear", given["stop_at"], total=given["total_steps"]), expected["lr_at_step_7"])


@solves("t-precision-01")
def test_small_steps_reach_bfloat16_weights(given, expected):
    """Sign-like steps of 0.001 on a weight of 1: bfloat16 alone would round each of them away."""
    plain = torch.tensor(given["w"], dtype=torch.bfloat16)
    for _ in range(given["n"]):
        plain -= given["step"]
    assert float(plain) == expected["pure_bf16"]
    weight = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.constant_(weight.weight, given["w"])
    with distributed.start(Resources(), always_group=True) as ranks:
        optimizer = Optimizer(lr=given["step"], betas=(0.0, 0.0), eps=1e-30, grad_clip=1e9)
        engine = TrainingEngine(
            weight, ranks, optimizer=optimizer, engine=Engine(precision="bfloat16"), total_steps=given["n"]
        )
        for _ in range(given["n"]):
            loss = engine.forward(torch.ones(1, 1, dtype=torch.bfloat16)).sum()
            engine.accumulate(loss, {"loss": loss}, [])
            engine.step(float(loss.detach()))
    close(
        engine.module.weight.detach().float().item(),
        torch.tensor(expected["with_fp32_master"], dtype=torch.bfloat16).float().item(),
    )


@solves("t-distillation-01")
def test_padded_vocabularies_are_compared_over_what_both_have(given, expected):
    teacher = f64([given["teacher_logits"][: given["student_vocab"]]])
    student = f64([given["student_logits"]])
    close(teacher.softmax(-1)[0, 0], expected["teacher_prob_of_0"])
    close(forward_kl(student, teacher, f64([1.0]), temperature=1.0), expected["forward_kl"])


@solves("t-evaluation-06")
def test_pass_at_k_is_unbiased(given, expected):
    close(pass_at_k(given["n"], given["correct"], given["k"]), expected)


@pytest.mark.parametrize("estimator", sorted(GROUP_ESTIMATORS - {"posterior_std_grpo"}))
def test_no_estimator_blows_up_float_noise_or_an_odd_reward(estimator):
    estimate = advantages.ESTIMATORS[estimator]
    for key, row, bound in (("t-rl_math-04", slice(None), 1e-2), ("t-rl_math-05", slice(0, 1), 10)):
        rewards = torch.tensor(train_cases()[key]["input"]["rewards"], dtype=torch.float32)
        found = estimate(rewards, torch.zeros(len(rewards), dtype=torch.int64))
        assert float(found[row].abs().max()) < bound
