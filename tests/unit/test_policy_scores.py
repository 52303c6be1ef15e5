"""Chunked scores against plain float64 logits: values and gradients, for plain, biased and capped output layers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, PhiConfig

from dynamo_core.data.batching import TokenRow, pad_rows
from dynamo_core.training import head_scores
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


@pytest.mark.parametrize(("chunk_elements", "tile_tokens"), [(1 << 24, 1024), (64, 1024), (9, 3)])
def test_scores_and_gradients_equal_those_of_full_logits(model, chunk_elements, tile_tokens, monkeypatch):
    monkeypatch.setattr(head_scores, "CHUNK_ELEMENTS", chunk_elements)
    monkeypatch.setattr(head_scores, "TILE_TOKENS", tile_tokens)
    batch = pad_rows(ROWS)
    scores = TokenScorer(model)(batch.token_ids_BL, batch.target_mask_BL, TEMPERATURE)
    expected = naive(model, batch)
    for ours, theirs in zip(scores, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert not scores.bracket_BL.requires_grad
    combine = {"log-prob": (1.0, 0.0), "entropy": (0.0, 1.0), "both": (1.0, -0.3)}
    for title, (a, b) in combine.items():
        scores = TokenScorer(model)(batch.token_ids_BL, batch.target_mask_BL, TEMPERATURE)
        expected = naive(model, batch)
        parts = [scores[i] for i, c in enumerate((a, b)) if c], [expected[i] for i, c in enumerate((a, b)) if c]
        ours, theirs = (
            gradient(model, sum(c * x for c, x in zip(filter(None, (a, b)), p, strict=True))) for p in parts
        )
        assert ours.keys() == theirs.keys()
        for name in theirs:  # some normalisation layers reduce in float32 whatever the weights are
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7, msg=f"{title} {name}")


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


def problem(dtype=torch.float64, bias=True):
    """(head, hidden, targets) of 7 tokens, width 5, vocabulary 11."""
    generator = torch.Generator().manual_seed(3)
    weight, hidden = (torch.randn(n, 5, generator=generator, dtype=torch.float64).to(dtype) for n in (11, 7))
    bias_V = torch.randn(11, generator=generator, dtype=torch.float64).to(dtype) if bias else None
    return head_scores.Head(weight, bias_V, 0.7), hidden, torch.tensor([0, 10, 3, 3, 8, 1, 5])


def test_gradients_are_added_to_what_is_there(monkeypatch):
    """Micro-batches accumulate: two backward passes into the same buffers are the sum of both."""
    monkeypatch.setattr(head_scores, "CHUNK_ELEMENTS", 12)
    head, hidden, targets = problem()
    scores = head_scores.forward(head, hidden, targets)
    ones = torch.ones(7, dtype=torch.float64)

    def into():
        return head_scores.Gradients(*(torch.zeros(n, dtype=torch.float64) for n in ((7, 5), (11, 5), (11,))))

    once, twice, entropies = into(), into(), into()
    head_scores.backward(head, hidden, targets, scores, once, grad_log_prob_N=ones)
    head_scores.backward(head, hidden, targets, scores, entropies, grad_log_prob_N=0 * ones, grad_entropy_N=ones)
    head_scores.backward(head, hidden, targets, scores, twice, grad_log_prob_N=ones)
    head_scores.backward(head, hidden, targets, scores, twice, grad_log_prob_N=ones, grad_entropy_N=ones)
    for a, b, both in zip(vars(once).values(), vars(entropies).values(), vars(twice).values(), strict=True):
        torch.testing.assert_close(both, 2 * a + b)
    assert once.weight_VH.sum(0).abs().max() < 1e-12  # d log p / dz sums to zero over the vocabulary


@pytest.mark.parametrize("bias", [True, False])
def test_half_precision_weights_are_reduced_in_float32(bias):
    head, hidden, targets = problem(torch.bfloat16, bias)
    scores = head_scores.forward(head, hidden, targets)
    assert scores.log_prob.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden, head.weight_VH, head.bias_V).float() / 0.7
    torch.testing.assert_close(scores.log_prob, logits.log_softmax(-1)[torch.arange(7), targets], rtol=1e-6, atol=1e-6)
    leaves = [t.requires_grad_() for t in (hidden, head.weight_VH, head.bias_V) if t is not None]
    log_prob, *_ = head_scores.HeadScores.apply(hidden, head.weight_VH, head.bias_V, targets, 0.7)
    log_prob.sum().backward()
    assert all(leaf.grad.dtype == torch.bfloat16 for leaf in leaves)


def test_a_frozen_output_layer_gets_no_gradient_and_no_tokens_are_no_scores():
    head, hidden, targets = problem()
    hidden.requires_grad_()
    log_prob, *_ = head_scores.HeadScores.apply(hidden, head.weight_VH, head.bias_V, targets, 0.7)
    log_prob.sum().backward()
    assert hidden.grad is not None
    assert head.weight_VH.grad is None
    empty = head_scores.forward(head, hidden[:0].detach(), targets[:0])
    assert [len(part) for part in empty] == [0, 0, 0, 0]


def test_a_token_that_cannot_occur_leaves_everything_else_finite():
    head, hidden, targets = problem()
    head.bias_V[5] = -torch.inf
    keep = targets != 5  # the one whose target is impossible
    finite = head_scores.Head(*(part[torch.arange(11) != 5] for part in (head.weight_VH, head.bias_V)), 0.7)
    expected = head_scores.forward(finite, hidden, targets - (targets > 5).long())
    found = head_scores.forward(head, hidden, targets)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[keep], theirs[keep])
    assert found.log_prob[~keep] == -torch.inf
    into = head_scores.Gradients(torch.zeros_like(hidden), torch.zeros_like(head.weight_VH), None)
    ones = keep.double()
    head_scores.backward(head, hidden, targets, found, into, grad_log_prob_N=ones, grad_entropy_N=ones)
    assert all(torch.isfinite(part).all() for part in (into.hidden_NH, into.weight_VH))
    assert not into.weight_VH[5].any()
