"""Public faults of chat templates and masks: the tokens and labels that are right."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from dynamo_core.data.batching import TokenRow, left_pad, pad_rows
from dynamo_core.data.templates import encode_demonstration, encode_prompt
from dynamo_core.training.policy import TokenScorer
from dynamo_core.training.supervised import encode_rows
from dynamo_core.types import Demonstration, Message
from tests.builders import tiny_model, tiny_tokenizer
from tests.cases.support import solves

IGNORED = -100


def labels(rows: list[TokenRow]) -> list[list[int]]:
    """What a row is trained to predict, token by token."""
    batch = pad_rows(rows)
    return torch.where(batch.target_mask_BL, batch.token_ids_BL, IGNORED).tolist()


def words(vocabulary: list[str], template: str, **special: str) -> PreTrainedTokenizerFast:
    """One token a word; the template decides everything else."""
    backend = Tokenizer(models.WordLevel({word: place for place, word in enumerate(vocabulary)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if "bos_token" in special:
        first = (special["bos_token"], vocabulary.index(special["bos_token"]))
        backend.post_processor = processors.TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>", **special)
    tokenizer.chat_template = template
    return tokenizer


TURNS = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)
TALK = ["<unk>", "</s>", "<user>", "<assistant>", "hi", "yo", "more", "a", "b", "c"]


@solves("t-template-01")
def test_the_end_is_learnt_where_pad_equals_eos(given, expected):
    rows = []
    for ids, attended, start in zip(given["input_ids"], given["attention_mask"], given["prompt_len"], strict=True):
        length = sum(attended)
        rows.append(TokenRow(tuple(ids[:length]), tuple(place >= start for place in range(length))))
    assert labels(rows) == expected["labels"]


@solves("t-loss-10")
def test_prompts_are_no_targets(given, expected):
    prompt, answer = given["prompt_ids"], given["completion_ids"]
    row = TokenRow((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer))
    assert labels([row]) == [expected["labels"]]


@solves("t-template-05")
def test_the_mask_holds_the_answer_and_its_end(given, expected):
    """A conversation that goes on after the answer is cut there: what follows is never trained on."""
    tokenizer = words(TALK, TURNS)
    encoded = encode_demonstration(tokenizer, (Message("user", "hi"), Message("assistant", "yo")))
    length = len(encoded.token_ids)
    assert tokenizer.convert_ids_to_tokens(list(encoded.token_ids)) == given["tokens"][:length]
    assert [int(flag) for flag in encoded.loss_mask] == expected["assistant_mask"][:length]
    assert not any(expected["assistant_mask"][length:])


@solves("t-template-06")
def test_a_turn_that_does_not_fit_is_left_out_and_named(given, expected):
    """Cut after six tokens the answer would never end; the row is left out whole instead, and named."""
    tokenizer = words(TALK, TURNS)
    whole = (Message("user", "hi"), Message("assistant", "a b c"))
    mask = encode_demonstration(tokenizer, whole).loss_mask
    assert [int(flag) for flag in mask[: given["max_length"]]] == expected["assistant_mask"]
    short = (Message("user", "hi"), Message("assistant", "yo"))
    kept = encode_rows(tokenizer, [Demonstration("long", whole), Demonstration("short", short)], given["max_length"])
    assert (kept.too_long, kept.prompt_ids) == (["long"], ["short"])


@solves("t-template-07", "t-template-09")
def test_one_start_token_or_none(given, expected):
    names = {7: "seven", 8: "eight", 9: "nine"}
    vocabulary = ["<unk>", "<s>", "</s>", "p3", "p4", "p5", "p6", "seven", "eight", "nine"]
    text = " ".join(names[token] for token in given.get("text_ids_without_bos", given.get("text_ids")))
    if given["bos_id"] is None:
        tokenizer = words(vocabulary, "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}")
    else:
        template = "{{ bos_token + ' ' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        tokenizer = words(vocabulary, template, bos_token="<s>")
    assert list(encode_prompt(tokenizer, (Message("user", text),))) == expected["input_ids"]


@solves("t-template-14")
def test_padding_on_the_left_moves_no_position(given, expected):
    rows = [tuple(range(5, 5 + sum(row))) for row in given["attention_mask"]]
    token_ids, mask = left_pad(rows)
    assert mask.tolist() == given["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    found = [row[flags.bool()].tolist() for row, flags in zip(positions, mask, strict=True)]
    assert found == expected["position_ids_on_real_tokens"]
    model = tiny_model(tiny_tokenizer())
    padded = model(token_ids, attention_mask=mask, position_ids=positions).logits[:, -1]
    alone = torch.stack([model(torch.tensor([row])).logits[0, -1] for row in rows])
    assert torch.allclose(padded, alone, atol=1e-5)


def test_right_padding_changes_no_score():
    """Training pads on the right, where causal attention never looks."""
    scorer = TokenScorer(tiny_model(tiny_tokenizer()))
    row = TokenRow((5, 6, 7), (False, True, True))
    narrow, wide = pad_rows([row]), pad_rows([row], length=9)
    first = scorer(narrow.token_ids_BL, narrow.target_mask_BL).log_prob_BL
    second = scorer(wide.token_ids_BL, wide.target_mask_BL).log_prob_BL
    assert second[:, :3].detach().numpy() == pytest.approx(first.detach().numpy(), abs=1e-6)
