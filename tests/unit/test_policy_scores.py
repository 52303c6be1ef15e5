"""Chunked scores against plain float64 logits: values and gradients, for plain, biased and capped output layers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, PhiConfig

from dynamo_core.data.batching import TokenRow, pad_rows
from dynamo_core.training import policy
from dynamo_core.training.policy import TargetStates, TokenScorer
from tests.builders import tiny_model, tiny_tokenizer

ROWS = [
    TokenRow((4, 5, 6, 7, 8, 9), (False, False, True, True, False, True)),
    TokenRow((9, 3, 2, 11), (False, True, True, True)),
    TokenRow((12, 1), (False, True)),
]
TEMPERATURE = 0.7


def capped() -> torch.nn.Module:
    config = Gemma2Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0, attn_logit_softcapping=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def biased() -> torch.nn.Module:
    config = PhiConfig(vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.normal_(model.lm_head.bias)
    return model


MODELS = {"plain": lambda: tiny_model(tiny_tokenizer()), "biased": biased, "capped": capped}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().double().eval()


def naive(model, batch):
    """log_prob, entropy, bracket [B, L] from full logits, with loops over tokens."""
    outputs = [torch.zeros(batch.token_ids_BL.shape, dtype=torch.float64) for _ in range(3)]
    for b, row in enumerate(ROWS):
        logits_LV = model(input_ids=torch.tensor([row.token_ids])).logits[0] / TEMPERATURE
        for position, wanted in enumerate(row.target_mask):
            if not wanted:
                continue
            log_p_V = torch.log_softmax(logits_LV[position - 1], -1)
            p_V, token = log_p_V.exp(), row.token_ids[position]
            entropy = -(p_V * log_p_V).sum()
            lambda_V = log_p_V + entropy
            values = (log_p_V[token], entropy, p_V[token] * lambda_V[token] - (p_V**2 * lambda_V).sum())
            for output, value in zip(outputs, values, strict=True):
                output[b, position] = value
    return outputs


def gradient(model, log_prob_BL):
    weights_BL = torch.linspace(-1, 2, log_prob_BL.numel(), dtype=torch.float64).reshape(log_prob_BL.shape)
    model.zero_grad()
    (weights_BL * log_prob_BL).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("chunk_elements", [1 << 24, 64])
def test_scores_and_gradients_equal_those_of_full_logits(model, chunk_elements, monkeypatch):
    monkeypatch.setattr(policy, "CHUNK_ELEMENTS", chunk_elements)
    batch = pad_rows(ROWS)
    scores = TokenScorer(model)(batch.token_ids_BL, batch.target_mask_BL, TEMPERATURE)
    expected = naive(model, batch)
    for ours, theirs in zip(scores, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert not scores.entropy_BL.requires_grad
    ours, theirs = gradient(model, scores.log_prob_BL), gradient(model, naive(model, batch)[0])
    assert ours.keys() == theirs.keys()
    for name in theirs:  # some normalisation layers reduce in float32 whatever the weights are
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7, msg=name)


def test_only_a_capped_model_takes_the_path_of_its_own_logits():
    torch.manual_seed(0)
    assert [TargetStates(make().eval()).plain for make in MODELS.values()] == [True, True, False]


def test_padding_and_row_order_change_nothing():
    scorer = TokenScorer(tiny_model(tiny_tokenizer()).double())
    batch, wide = pad_rows(ROWS), pad_rows(ROWS[::-1], length=11)
    with torch.no_grad():
        ours = scorer(batch.token_ids_BL, batch.target_mask_BL)
        padded = scorer(wide.token_ids_BL, wide.target_mask_BL)
    for a_BL, b_BL in zip(ours, padded, strict=True):
        torch.testing.assert_close(a_BL, b_BL.flip(0)[:, : a_BL.shape[1]], rtol=1e-12, atol=1e-13)
        assert not b_BL[:, a_BL.shape[1] :].any()
