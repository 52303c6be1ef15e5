"""Tokens and masks: a prompt is a prefix of its demonstration; the loss covers the answer and its end of turn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from dynamo_core.config.data import ArithmeticSource
from dynamo_core.data.generators import generate
from dynamo_core.data.templates import (
    all_eos_ids,
    encode_demonstration,
    encode_prompt,
    train_tokenizer,
)
from dynamo_core.errors import DataError
from dynamo_core.types import Message

TURN = (Message("user", "14+5-8=?"), Message("assistant", "14+5=19\n19-8=11\n#### 11"))
TALK = (
    Message("system", "Be brief."),
    Message("user", "1+1=?"),
    Message("assistant", "\n 2 "),
    Message("user", "And 2+2?"),
    Message("assistant", "4"),
)
PLAIN_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def conversations() -> list[tuple[Message, ...]]:
    rows = generate(ArithmeticSource(type="arithmetic", problems=300), seed=0)
    return [tuple(Message(str(role), str(content)) for role, content in row.turns) for row in rows]


@pytest.fixture(scope="module")
def small() -> PreTrainedTokenizerFast:
    """A tokenizer that knows the bytes of the arithmetic data only."""
    return train_tokenizer((message.content for talk in conversations() for message in talk), 64)


@pytest.fixture
def full() -> PreTrainedTokenizerFast:
    """A tokenizer that knows every byte."""
    return train_tokenizer((message.content for message in TURN + TALK), 400)


def masked_text(tokenizer: PreTrainedTokenizerFast, token_ids: tuple[int, ...], mask: tuple[bool, ...]) -> str:
    return tokenizer.decode([token for token, learnt in zip(token_ids, mask, strict=True) if learnt])


def test_the_mask_is_exactly_the_answer_and_its_end(small: PreTrainedTokenizerFast) -> None:
    for prompt, answer in conversations():
        encoded = encode_demonstration(small, (prompt, answer))
        header = encode_prompt(small, (prompt,))
        assert masked_text(small, encoded.token_ids, encoded.loss_mask) == answer.content + "<|im_end|>"
        assert encoded.token_ids[: len(header)] == header
        assert encoded.loss_mask == (False,) * len(header) + (True,) * (len(encoded.token_ids) - len(header))
        assert encoded.token_ids[-1] == small.eos_token_id


def test_single_digits_and_distinct_special_tokens(small: PreTrainedTokenizerFast) -> None:
    ids = encode_demonstration(small, TURN).token_ids
    tokens = small.convert_ids_to_tokens(list(ids))
    assert all(sum(one.isdigit() for one in token) <= 1 for token in tokens)
    assert tokens[:3] == ["<|im_start|>", "user", "\u010a"]  # U+010A stands for the newline byte
    assert small.bos_token_id is None
    assert len({small.pad_token_id, small.eos_token_id, small.unk_token_id}) == 3
    assert small.convert_ids_to_tokens(small.eos_token_id) == "<|im_end|>"
    assert len(small) <= 64


def test_every_assistant_turn_is_learnt(full: PreTrainedTokenizerFast) -> None:
    marked = encode_demonstration(full, TALK)
    assert masked_text(full, marked.token_ids, marked.loss_mask) == "\n 2 <|im_end|>4<|im_end|>"
    assert encode_prompt(full, TALK[:-1]) == marked.token_ids[: len(encode_prompt(full, TALK[:-1]))]


def test_templates_without_markers_give_the_same_mask(full: PreTrainedTokenizerFast) -> None:
    marked = [encode_demonstration(full, talk) for talk in (TURN, TALK)]
    full.chat_template = PLAIN_CHATML
    assert [encode_demonstration(full, talk) for talk in (TURN, TALK)] == marked


def test_markers_around_the_text_alone_gain_the_end_of_turn(full: PreTrainedTokenizerFast) -> None:
    expected = encode_demonstration(full, TALK)
    full.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    assert encode_demonstration(full, TALK) == expected


def test_any_text_survives_a_full_vocabulary(full: PreTrainedTokenizerFast) -> None:
    answer = "h\u00e9llo \u4e16\u754c \U0001f600\n\n\n  x\t\u2028y 2024"
    encoded = encode_demonstration(full, (Message("user", "?"), Message("assistant", answer)))
    assert masked_text(full, encoded.token_ids, encoded.loss_mask) == answer + "<|im_end|>"


def test_unknown_characters_are_refused(small: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="cannot encode a character"):
        encode_prompt(small, (Message("user", "h\u00e9"),))
    with pytest.raises(DataError, match="cannot encode a character"):
        encode_demonstration(small, (Message("user", "1+1=?"), Message("assistant", "z")))


def test_a_vocabulary_that_cannot_hold_the_bytes_is_refused() -> None:
    with pytest.raises(DataError, match="vocab_size 32 is too small"):
        train_tokenizer(["the quick brown fox jumps over the lazy dog 0123456789"], 32)


def test_the_tokenizer_repeats_and_survives_saving(small: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    small.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert encode_demonstration(loaded, TURN) == encode_demonstration(small, TURN)
    assert loaded.chat_template == small.chat_template
    code = (
        "import json, sys; from dynamo_core.data.templates import train_tokenizer;"
        "print(train_tokenizer(json.load(sys.stdin), 64).backend_tokenizer.to_str(), end='');"
        "assert 'torch' not in sys.modules"
    )
    texts = json.dumps([message.content for talk in reversed(conversations()) for message in talk])
    done = subprocess.run([sys.executable, "-c", code], input=texts, capture_output=True, text=True, check=True)
    assert done.stdout == small.backend_tokenizer.to_str()


def test_one_bos_where_template_and_tokenizer_both_add_one() -> None:
    words = ["<s>", "</s>", "<unk>", "user", "assistant", "a", "b", ":"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' ' }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
    )
    assert tokenizer("a")["input_ids"] == [0, 5]
    encoded = encode_demonstration(tokenizer, (Message("user", "a"), Message("assistant", "b")))
    assert encoded.token_ids == (0, 3, 7, 5, 4, 7, 6, 1)  # <s> user : a assistant : b </s>
    assert encoded.loss_mask == (False,) * 6 + (True, True)  # the end is learnt although pad equals eos
    assert encode_prompt(tokenizer, (Message("user", "a"),)) == (0, 3, 7, 5, 4, 7)


def test_a_template_that_rewrites_history_is_refused(full: PreTrainedTokenizerFast) -> None:
    full.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
        "{{ m['content'] if loop.last or m['role'] == 'user' else '...' }}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    encode_demonstration(full, TURN)
    with pytest.raises(DataError, match="rewrites earlier turns"):
        encode_demonstration(full, TALK[1:])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('no system turn') }}", "refuses the messages: no system turn"),
        ("{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}", "instead of a special token"),
        (
            "{% for m in messages %}{{ m['content'] }}{% endfor %}"
            "{% if not messages %}{% generation %}{% endgeneration %}{% endif %}",
            "no tokens to learn from",
        ),
    ],
)
def test_templates_that_cannot_be_used(full: PreTrainedTokenizerFast, template: str | None, message: str) -> None:
    full.chat_template = template
    with pytest.raises(DataError, match=message):
        encode_demonstration(full, TURN)


def test_a_conversation_without_answer_is_no_demonstration(full: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="must end with an assistant turn"):
        encode_demonstration(full, TURN[:1])


def test_all_ends_of_an_answer_are_found(full: PreTrainedTokenizerFast) -> None:
    end, start, pad = (full.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|im_start|>", "<|pad|>"))
    assert all_eos_ids(full, None) == (end,)
    assert all_eos_ids(full, GenerationConfig(eos_token_id=[start, end])) == tuple(sorted({start, end}))
    full.eos_token = "<|pad|>"  # as in base models whose template ends turns with another token
    assert all_eos_ids(full, GenerationConfig(eos_token_id=pad)) == tuple(sorted({pad, end}))
    full.eos_token, full.chat_template = None, None
    with pytest.raises(DataError, match="names a token that ends an answer"):
        all_eos_ids(full, None)
