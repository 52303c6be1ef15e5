"""Packed rows: where they stand, that they do not see each other, and that padding and packing train alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from dynamo_core.config.base import Resources
from dynamo_core.data.batching import TokenRow
from dynamo_core.data.packing import first_fit, lay_out
from dynamo_core.errors import RecipeError
from dynamo_core.training import distributed
from dynamo_core.training.critic import Critic
from dynamo_core.training.policy import TokenScorer, require_packing
from dynamo_core.training.scoring import score_rows
from dynamo_core.training.supervised import DistillationLoss, NextTokenLoss, tokens
from tests.builders import tiny_model, tiny_tokenizer

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
ARCHITECTURES = {
    "llama": SMALL,
    "mixtral": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 2},
    "gemma": {**SMALL, "num_key_value_heads": 2, "head_dim": 8},
    "gpt2": {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2},
}


def rows(*lengths: int) -> list[TokenRow]:
    generator = torch.Generator().manual_seed(3)
    return [
        TokenRow(tuple(torch.randint(4, 40, (length,), generator=generator).tolist()),
                 (False,) + (True,) * (length - 1))
        for length in lengths
    ]  # fmt: skip


def random_model(kind: str, **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()
    for parameter in model.parameters():  # logits that depend on what is seen
        if parameter.ndim > 1:
            parameter.data *= 8
    return model


def test_rows_share_lines_of_the_longest_rows_width():
    batch = lay_out(rows(3, 7, 2, 4), packed=True)
    assert batch.position_PC.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]]
    assert batch.cells == 21
    ids = batch.token_ids_PC.flatten()
    for row, place_L in zip(rows(3, 7, 2, 4), batch.place_BL, strict=True):
        assert ids[place_L[place_L >= 0]].tolist() == list(row.token_ids)
        assert batch.target_mask_PC.flatten()[place_L[place_L >= 0]].tolist() == list(row.target_mask)
    assert int(batch.target_mask_PC.sum()) == 2 + 6 + 1 + 3


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
def test_every_row_has_one_place_and_no_line_overflows(lengths):
    width = max(lengths)
    lines = first_fit(lengths, width)
    assert sorted(row for line in lines for row in line) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in line) <= width for line in lines)
    # No two lines would fit into one: at least one of them is more than half full.
    assert sum(2 * sum(lengths[row] for row in line) <= width for line in lines) <= 1


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_values_find_their_way_back(lengths):
    given_rows = [TokenRow(tuple(range(100 * index, 100 * index + n)), (False,) * n)
                  for index, n in enumerate(lengths, start=1)]  # fmt: skip
    batch = lay_out(given_rows, packed=True)
    found_BL = batch.by_sequence(batch.token_ids_PC.double())
    assert torch.equal(found_BL, lay_out(given_rows, packed=False).token_ids_PC.double())


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_packed_rows_score_as_they_do_alone(kind):
    model = random_model(kind, **ARCHITECTURES[kind])
    require_packing(model, "packed")
    scorer = TokenScorer(model)
    batch = lay_out(rows(9, 3, 4, 2, 5), packed=True)
    assert len(batch.token_ids_PC) == 3
    scores = scorer(batch.token_ids_PC, batch.target_mask_PC, 0.7, batch.position_PC)
    for values, name in zip(scores, scores._fields, strict=True):
        found_BL = batch.by_sequence(values)
        for index, row in enumerate(rows(9, 3, 4, 2, 5)):
            one = lay_out([row], packed=False)
            expected_L = getattr(scorer(one.token_ids_PC, one.target_mask_PC, 0.7), name)[0]
            torch.testing.assert_close(found_BL[index, : len(row.token_ids)], expected_L, rtol=1e-4, atol=1e-4)
            assert not found_BL[index, len(row.token_ids) :].any()


def test_a_model_whose_rows_see_each_other_is_refused():
    model = random_model("bloom", vocab_size=40, hidden_size=16, n_layer=2, n_head=2)
    require_packing(model, "padded")
    with pytest.raises(RecipeError, match=r"BloomForCausalLM does not keep rows apart .*use batching: padded"):
        require_packing(model.train(), "packed")
    assert model.training


def test_the_critic_values_packed_rows_as_alone():
    critic = Critic(tiny_model(tiny_tokenizer()))
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    with distributed.start(Resources()) as ranks:
        padded, packed = (
            score_rows(lambda batch: critic(batch.token_ids_PC, batch.position_PC), rows(9, 3, 4, 2, 5), 4, ranks,
                       packed=way)
            for way in (False, True)
        )  # fmt: skip
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)
    assert padded[0, :9].abs().min() > 0


@pytest.mark.parametrize("kind", ["next token", "distillation"])
def test_losses_and_gradients_of_packed_rows(kind):
    tokenizer = tiny_tokenizer()
    student, teacher = tiny_model(tokenizer).double(), tiny_model(tokenizer, seed=9).double()
    module = NextTokenLoss(student) if kind == "next token" else DistillationLoss(
        student, teacher, temperature=2.0, kl_weight=0.4
    )  # fmt: skip
    found = {}
    for batching in ("padded", "packed"):
        student.zero_grad()
        values = module(*tokens(batching).inputs(rows(9, 3, 4, 2, 5), 18.0))
        values[0].backward()
        found[batching] = [*(value.detach() for value in values), *(p.grad.clone() for p in student.parameters())]
    assert module(*tokens("packed").inputs(rows(9, 3, 4, 2, 5), 18.0))[0] > 0
    for ours, theirs in zip(found["packed"], found["padded"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-12)
