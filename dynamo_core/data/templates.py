"""Conversations as token ids, with a loss mask on what the assistant says.

The chat template places every special token itself, so rendered text is always tokenised with
`add_special_tokens=False`: a tokenizer that adds its own BOS would otherwise double it (OpenRLHF #393, NeMo #747,
TRL #1114). The mask is taken from positions in the rendered text and never from token values: where pad equals eos,
a mask by value hides the real end of turn and the model never learns to stop (TRL #3200, #6357).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jinja2.exceptions import TemplateError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dynamo_core.errors import DataError
from dynamo_core.types import Message

if TYPE_CHECKING:
    from transformers import GenerationConfig  # loads torch

PAD, START, END, UNKNOWN = SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<|unk|>")
ROLES: Final = ("system", "user", "assistant")
CHAT_TEMPLATE: Final = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}"
    "{{- '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML. The generation markers enclose the end of turn: stopping is learnt, the role header is not."""
_GENERATION_MARKER: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BYTES: Final = sorted(pre_tokenizers.ByteLevel.alphabet())


@dataclass(frozen=True)
class EncodedDemonstration:
    """A conversation up to its last end of turn. `loss_mask` is True on the assistant's tokens, ends of turn included.

    Example (one token a word): <|im_start|> user \\n 3 <|im_end|> \\n <|im_start|> assistant \\n 4 <|im_end|>
                                F            F    F  F F          F  F            F         F  T T
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with single digits, a ChatML template, and distinct pad and eos; it adds no BOS.

    With room for all 256 bytes every text can be encoded. A smaller vocabulary holds the bytes of `texts` and of the
    role names only; other bytes become <|unk|>, and `encode_prompt` and `encode_demonstration` refuse such text.

    Args:
        texts: what the vocabulary is fitted to. The result does not depend on their order.
        vocab_size: upper bound, special tokens included.

    Raises:
        DataError: the bytes of `texts` do not fit into `vocab_size`.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    newline_alone = pre_tokenizers.Split(Regex("\n"), "isolated")  # a prompt that ends in \n stays a token prefix
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([newline_alone, digits, pre_tokenizers.ByteLevel(False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=_BYTES if vocab_size >= len(_BYTES) + len(SPECIAL_TOKENS) else [],
    )
    tokenizer.train_from_iterator(_with_roles(texts), trainer)
    if tokenizer.get_vocab_size() > vocab_size:
        raise DataError(
            f"vocab_size {vocab_size} is too small: the data needs at least {tokenizer.get_vocab_size()} tokens",
            f"set vocab_size to {tokenizer.get_vocab_size()} or more",
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids of `messages` and of the header of the assistant turn that follows.

    Raises:
        DataError: the tokenizer has no chat template, the template refuses the messages, or a character is unknown.
    """
    return _tokenize(tokenizer, _render(tokenizer, messages, generation_prompt=True))


def encode_demonstration(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> EncodedDemonstration:
    """Token ids and loss mask of a conversation that ends with an assistant turn, cut after its end of turn.

    Assistant turns are found by the template's generation markers or, where it has none, by rendering prefixes of the
    conversation. A template that rewrites earlier turns (drops their reasoning, say) makes such prefixes differ from
    the whole, and the row is refused rather than masked at wrong places (verl #3287, open-instruct #1806, TRL #6363).

    Raises:
        DataError: as `encode_prompt`; or there is no assistant turn, the template is unstable, it ends no turn with
            a special token, or the prompt's tokens are not a prefix of the conversation's.
    """
    if not messages or messages[-1].role != "assistant":
        raise DataError("a demonstration must end with an assistant turn")
    if _has_markers(tokenizer):
        token_ids, mask = _mask_by_markers(tokenizer, messages)
    else:
        token_ids, mask = _mask_by_prefixes(tokenizer, messages)
    mask = _with_stop_tokens(tokenizer, token_ids, mask)
    if not any(mask):
        raise DataError("the chat template gives the assistant's turns no tokens to learn from")
    end = len(mask) - mask[::-1].index(True)
    token_ids, mask = token_ids[:end], mask[:end]
    if token_ids[-1] not in _special_ids(tokenizer):
        ending = tokenizer.decode(list(token_ids[-1:]))
        raise DataError(f"the chat template ends the last turn with {ending!r} instead of a special token")
    prompt = encode_prompt(tokenizer, messages[:-1])
    if token_ids[: len(prompt)] != prompt:
        raise DataError("the tokens of the prompt are not a prefix of the tokens of prompt and answer")
    return EncodedDemonstration(token_ids, tuple(mask))


def all_eos_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> tuple[int, ...]:
    """Every token that ends an answer, ascending: the tokenizer's, the generation config's and the template's.

    Base models often name one token as eos and end their turns with another; decoding that knows only one of them
    runs to the length limit (TRL #2387, OpenRLHF #238).

    Raises:
        DataError: there is none.
    """
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    configured = None if generation_config is None else generation_config.eos_token_id
    if configured is not None:
        found.update([configured] if isinstance(configured, int) else configured)
    if tokenizer.chat_template:
        example = encode_demonstration(tokenizer, (Message("user", "user"), Message("assistant", "user")))
        found.add(example.token_ids[-1])
    if not found:
        raise DataError("neither tokenizer, generation config nor chat template names a token that ends an answer")
    return tuple(sorted(found))


def _with_roles(texts: Iterable[str]) -> Iterator[str]:
    """The role names come with every text, as the template writes them, so that they earn tokens of their own."""
    yield from (f"{role}\n" for role in ROLES)
    for text in texts:
        yield text
        yield from (f"{role}\n" for role in ROLES[1:])


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | {int(index) for index in tokenizer.all_special_ids}


def _has_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    template = tokenizer.chat_template
    return isinstance(template, str) and _GENERATION_MARKER.search(template) is not None


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, generation_prompt: bool) -> str:
    if not tokenizer.chat_template:
        raise DataError("the tokenizer has no chat template", "set one in its folder (chat_template.jinja)")
    try:
        text = tokenizer.apply_chat_template(
            _as_dicts(messages), tokenize=False, add_generation_prompt=generation_prompt
        )
    except TemplateError as error:
        raise DataError(f"the chat template refuses the messages: {error}") from error
    return str(text)


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    _check_known(tokenizer, token_ids, text)
    return token_ids


def _check_known(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], text: str) -> None:
    unknown = tokenizer.unk_token_id
    if unknown is not None and unknown != tokenizer.eos_token_id and unknown in token_ids:
        raise DataError(f"the tokenizer cannot encode a character of {text[:200]!r}", "use a larger vocab_size")


def _mask_by_markers(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[tuple[int, ...], list[bool]]:
    """Token ids of the whole conversation and the mask that the template's generation markers give."""
    text = _render(tokenizer, messages, generation_prompt=False)
    encoded: Any = tokenizer.apply_chat_template(
        _as_dicts(messages), return_dict=True, return_assistant_tokens_mask=True
    )
    token_ids = tuple(encoded["input_ids"])
    _check_known(tokenizer, token_ids, text)
    return token_ids, [bool(flag) for flag in encoded["assistant_masks"]]


def _mask_by_prefixes(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[tuple[int, ...], list[bool]]:
    """Token ids of the whole conversation and a mask from the rendered length of each prefix, checked by decoding."""
    text = _render(tokenizer, messages, generation_prompt=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    token_ids = tuple(encoded["input_ids"])
    _check_known(tokenizer, token_ids, text)
    mask = [False] * len(token_ids)
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = _render(tokenizer, messages[:index], generation_prompt=True)
        after = _render(tokenizer, messages[: index + 1], generation_prompt=False).rstrip()
        if not (text.startswith(before) and text.startswith(after)):
            raise DataError(f"the chat template rewrites earlier turns: turn {index} reads differently in context")
        inside = [len(before) <= start < end <= len(after) for start, end in encoded["offset_mapping"]]
        decoded = tokenizer.decode([token for token, flag in zip(token_ids, inside, strict=True) if flag])
        if message.content.strip() not in decoded:
            raise DataError(f"the tokens of assistant turn {index} do not decode to its text: {decoded[:200]!r}")
        mask = [flag or other for flag, other in zip(mask, inside, strict=True)]
    return token_ids, mask


def _with_stop_tokens(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], mask: Sequence[bool]) -> list[bool]:
    """`mask` with the special token right after each span added, where markers enclose the text alone."""
    special = _special_ids(tokenizer)
    extended = list(mask)
    for index in range(1, len(mask)):
        follows = mask[index - 1] and not mask[index]
        if follows and token_ids[index] in special and token_ids[index - 1] not in special:
            extended[index] = True
    return extended
