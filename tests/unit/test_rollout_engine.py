"""The rollout contract: ragged groups, shared prefill, independence of batching, scores equal to the trainer's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dynamo_core.data.batching import TokenRow, pad_rows
from dynamo_core.errors import AlgorithmError
from dynamo_core.rollout.transformers_engine import TransformersEngine
from dynamo_core.training.models import eos_ids
from dynamo_core.training.policy import TokenScorer
from dynamo_core.types import FinishReason
from tests.builders import requests, tiny_model, tiny_tokenizer

COUNTS = {"1+2=?": 3, "40-7+12=?": 7, "9=?": 1, "3*4+5-6+7=?": 5}


@pytest.fixture(scope="module")
def policy():
    tokenizer = tiny_tokenizer()
    return tiny_model(tokenizer), tokenizer


def engine(policy, batch_tokens=100_000):
    model, tokenizer = policy
    return TransformersEngine(model, eos_token_ids=eos_ids(model, tokenizer), batch_tokens=batch_tokens)


def answers(rollouts):
    return {(item.prompt_id, item.rollout): item.response_token_ids for item in rollouts}


def test_groups_are_ragged_and_come_in_order(policy):
    rollouts = engine(policy).generate(requests(policy[1], COUNTS))
    assert [(item.prompt_id, item.rollout) for item in rollouts] == [
        (prompt_id, rollout) for prompt_id, n in COUNTS.items() for rollout in range(n)
    ]
    assert len(set(answers(rollouts).values())) > 8  # rollouts of one prompt differ


def test_answers_do_not_depend_on_what_shares_the_batch(policy):
    asked = requests(policy[1], COUNTS)
    together = answers(engine(policy).generate(asked))
    assert answers(engine(policy, batch_tokens=60).generate(asked[::-1])) == together
    alone = [item for request in asked for item in engine(policy).generate([request])]
    assert answers(alone) == together


def test_a_pilot_and_its_top_up_equal_one_group(policy):
    (request,) = requests(policy[1], {"40-7+12=?": 6})
    whole = answers(engine(policy).generate([request]))
    parts = engine(policy).generate([replace(request, n=2), replace(request, n=4, first_rollout=2)])
    assert answers(parts) == whole


def test_scores_of_the_decoder_are_those_of_the_trainer(policy):
    model, tokenizer = policy
    rollouts = engine(policy).generate(requests(tokenizer, COUNTS, temperature=0.7))
    rows = [
        TokenRow(
            item.prompt_token_ids + item.response_token_ids,
            (False,) * len(item.prompt_token_ids) + (True,) * len(item.response_token_ids),
        )
        for item in rollouts
    ]
    batch = pad_rows(rows)
    with torch.no_grad():
        scores = TokenScorer(model)(batch.token_ids_BL, batch.target_mask_BL, 0.7)
    for index, item in enumerate(rollouts):
        columns = slice(len(item.prompt_token_ids), len(item.prompt_token_ids) + len(item.response_token_ids))
        (segment,) = item.segments
        for ours, theirs in zip(scores, (segment.log_probs, segment.entropies, segment.brackets), strict=True):
            np.testing.assert_allclose(ours[index, columns].numpy(), theirs, atol=1e-4)


def test_rollouts_end_at_any_end_token_or_are_marked_as_cut(policy):
    model, tokenizer = policy
    asked = requests(tokenizer, COUNTS, max_new_tokens=12)
    plain = engine(policy).generate(asked)
    second_eos = max(set(plain[3].response_token_ids), key=plain[3].response_token_ids.index)
    both = TransformersEngine(model, eos_token_ids=(tokenizer.eos_token_id, second_eos), batch_tokens=100_000)
    for item in both.generate(asked):
        ends = [token in (tokenizer.eos_token_id, second_eos) for token in item.response_token_ids]
        assert not any(ends[:-1])
        assert ends[-1] == (item.finish_reason is FinishReason.EOS)
        if not ends[-1]:
            assert item.truncated
            assert len(item.response_token_ids) == 12


def test_finished_rows_leave_the_batch_and_each_prompt_is_prefilled_once(policy):
    model, tokenizer = policy
    shapes = []
    hook = model.register_forward_pre_hook(lambda *args: shapes.append(args[2]["input_ids"].shape), with_kwargs=True)
    often = TransformersEngine(model, eos_token_ids=range(0, len(tokenizer), 5), batch_tokens=100_000)
    try:
        rollouts = often.generate(requests(tokenizer, {"9=?": 40, "1+2=?": 24}, max_new_tokens=30))
    finally:
        hook.remove()
    assert shapes[0][0] == 2  # each prompt prefilled once
    rows = [shape[0] for shape in shapes[1:]]
    assert rows == sorted(rows, reverse=True)
    unfinished = [
        sum(len(item.response_token_ids) > position for item in rollouts) for position in range(1, len(rows) + 1)
    ]
    assert all(row <= left / 0.8 for row, left in zip(rows, unfinished, strict=True))


def test_greedy_takes_the_most_likely_token(policy):
    model, tokenizer = policy
    (request,) = requests(tokenizer, {"1+2=?": 1}, temperature=0.0)
    (item,) = engine(policy).generate([request])
    prompt = torch.tensor([item.prompt_token_ids])
    with torch.no_grad():
        assert item.response_token_ids[0] == int(model(prompt).logits[0, -1].argmax())


def test_one_way_of_sampling_a_call(policy):
    mixed = requests(policy[1], {"1+2=?": 1}) + requests(policy[1], {"9=?": 1}, temperature=0.5)
    with pytest.raises(AlgorithmError, match="share one Sampling"):
        engine(policy).generate(mixed)
