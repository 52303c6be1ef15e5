"""Who gets which rollouts, and that every answer is checked against its own prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dynamo_core.config.reinforce import MathAnswerReward
from dynamo_core.data.templates import encode_prompt
from dynamo_core.errors import DataError
from dynamo_core.rewards.protocol import make_reward
from dynamo_core.rollout.batch import policy_batch
from dynamo_core.rollout.collector import Collector, PromptSampler, PromptTask
from dynamo_core.rollout.engine import ScriptedEngine
from dynamo_core.training.distributed import Ranks
from dynamo_core.types import Sampling
from tests.builders import prompt_row, tiny_tokenizer

GOLDS = {"1+2=?": "3", "4+5=?": "9", "7-6=?": "1"}
COUNTS = np.array([2, 4, 3])
ALONE = Ranks(0, 1, torch.device("cpu"), None)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def tasks(tokenizer, golds=GOLDS):
    rows = [prompt_row(text, gold) for text, gold in golds.items()]
    return {row.prompt_id: PromptTask(row, encode_prompt(tokenizer, row.messages)) for row in rows}


def own_answer(tokenizer):
    """Every prompt is answered with its own right answer."""
    return ScriptedEngine(lambda request, rollout: tokenizer.encode(f"#### {GOLDS[request.prompt_id]}"))


def collect(engine, tokenizer, ranks=ALONE, **golds):
    collector = Collector(
        engine, tokenizer, make_reward(MathAnswerReward()), tasks(tokenizer, {**GOLDS, **golds}), ranks
    )
    return collector.collect(list(GOLDS), COUNTS, step=1, sampling=Sampling(1.0, 20, 0))


def test_each_answer_is_judged_by_its_own_prompt(tokenizer):
    scored = collect(own_answer(tokenizer), tokenizer)
    assert [(item.rollout.prompt_id, item.rollout.rollout) for item in scored] == [
        (prompt_id, rollout) for prompt_id, n in zip(GOLDS, COUNTS, strict=True) for rollout in range(n)
    ]
    assert all(item.verdict.correct for item in scored)


class Mangled:
    """An engine whose rollouts are tampered with before they are returned."""

    weight_version = 0

    def __init__(self, engine, tamper):
        self.engine, self.tamper = engine, tamper

    def generate(self, requests):
        return self.tamper(self.engine.generate(requests))


def relabelled(rollouts):
    """Ids repeated by other counts than the answers: the fault of the released code."""
    ids = [rollout.prompt_id for rollout in rollouts]
    return [replace(rollout, prompt_id=other) for rollout, other in zip(rollouts, ids[1:] + ids[:1], strict=True)]


@pytest.mark.parametrize(
    "tamper",
    [relabelled, lambda rollouts: rollouts[1:], lambda rollouts: [rollouts[0], *rollouts]],
    ids=["relabelled", "one missing", "one twice"],
)
def test_rows_that_lost_their_prompt_are_noticed(tokenizer, tamper):
    with pytest.raises(AssertionError):
        collect(Mangled(own_answer(tokenizer), tamper), tokenizer)


def test_order_alone_is_harmless(tokenizer):
    backwards = Mangled(own_answer(tokenizer), lambda rollouts: rollouts[::-1])
    found, expected = (
        [
            (item.rollout.prompt_id, item.rollout.rollout, item.completion, item.verdict)
            for item in collect(engine, tokenizer)
        ]
        for engine in (backwards, own_answer(tokenizer))
    )
    assert found == expected


def test_unscorable_rollouts_leave_the_batch(tokenizer):
    scored = collect(own_answer(tokenizer), tokenizer, **{"4+5=?": "nine apples"})
    assert [item.verdict.score for item in scored] == [1.0, 1.0, None, None, None, None, 1.0, 1.0, 1.0]
    assert policy_batch(scored, list(GOLDS)).group_B.tolist() == [0, 0, 2, 2, 2]
    with pytest.raises(DataError, match="none of the step's 4 rollouts could be scored"):
        policy_batch(scored[2:6], list(GOLDS))


def test_a_batch_puts_values_after_each_prompt(tokenizer):
    batch = policy_batch(collect(own_answer(tokenizer), tokenizer), list(GOLDS))
    for row, old_L, mask_L in zip(batch.rows, batch.old_log_prob_BL, batch.mask_BL, strict=True):
        assert (old_L != 0).tolist() == mask_L.tolist()
        assert mask_L[: len(row.token_ids)].tolist() == list(row.target_mask)


def test_the_sampler_wraps_without_repeating_a_prompt_within_a_step():
    ids = [f"p{index}" for index in range(10)]
    sampler, again = PromptSampler(ids, seed=3), PromptSampler(ids, seed=3)
    steps = [sampler.next(4) for _ in range(25)]
    assert steps == [again.next(4) for _ in range(25)]
    assert all(len(set(step)) == 4 for step in steps)
    counts = np.unique([prompt_id for step in steps for prompt_id in step], return_counts=True)[1]
    assert counts.tolist() == [10] * 10  # 100 draws over 10 prompts
    assert steps != [PromptSampler(ids, seed=4).next(4) for _ in range(25)]
