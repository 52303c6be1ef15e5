"""From checked rows to splits: one task per prompt, no copies, no contradictions, and no prompt in two splits.

A prompt's split is decided by the digest of its own text, so adding rows never moves an old one, and all rows of a
prompt share one split. The digest ignores layout (white space, Unicode composition), so that variants of one prompt
cannot end up on both sides of the fence.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_core.config.data import Split
from dynamo_core.data.rows import SCHEMAS, order_key
from dynamo_core.data.schema import CheckedRow, Reason, Rejected, excerpt
from dynamo_core.types import Message


@dataclass
class Prompt:
    """All that is known of one prompt."""

    prompt_id: str
    first: CheckedRow
    answer: str | None
    replies: dict[str, CheckedRow] = field(default_factory=dict)
    """Distinct demonstrations by their text, in the order of the source."""
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """Distinct (chosen, rejected), in the order of the source."""


def prompt_digest(messages: Sequence[Message], answer: str | None = None) -> str:
    """sha256 over the exact prompt and, where there is one, its answer: the id of a row that brings none."""
    content = [[message.role, message.content] for message in messages]
    return _sha256([content] if answer is None else [content, answer])


def split_of(messages: Sequence[Message], split: Split) -> str:
    """`test`, `validation` or `train`, by the prompt's digest alone."""
    canonical = [[message.role, " ".join(_composed(message.content).split())] for message in messages]
    place = int(_sha256(canonical)[:16], 16) / 16**16
    if place < split.test:
        return "test"
    return "validation" if place < split.test + split.validation else "train"


def merge_prompts(rows: Iterable[CheckedRow]) -> tuple[list[Prompt], list[Rejected]]:
    """One `Prompt` for each distinct prompt text, and the rows that add nothing or contradict others.

    - Two answers for one prompt: all its rows that carry an answer are rejected, for none of them can be trusted.
    - A row whose demonstration, answer and pair are known already is a duplicate; the first one stays.
    - One id on two prompts: the rows of the later prompt are rejected, since everything is joined on the id.
    """
    groups: dict[str, list[CheckedRow]] = {}
    for row in rows:
        groups.setdefault(prompt_digest(row.prompt), []).append(row)
    prompts: list[Prompt] = []
    rejected: list[Rejected] = []
    taken: set[str] = set()
    for group in groups.values():
        sound, conflicting = _without_conflicts(group)
        rejected.extend(conflicting)
        if not sound:
            continue
        prompt, copies = _merge(sound)
        if prompt.prompt_id in taken:
            rejected.extend(_reject(row, Reason.CONFLICTING_ID, prompt.prompt_id) for row in sound)
            continue
        taken.add(prompt.prompt_id)
        prompts.append(prompt)
        rejected.extend(copies)
    return prompts, rejected


def split_rows(prompts: Iterable[Prompt], split: Split, rl_prompts: int | None) -> dict[str, list[dict[str, Any]]]:
    """Stored rows by split, in their final order. Demonstrations and pairs are kept for training prompts only.

    Args:
        rl_prompts: how many training prompts the split `rl` keeps, those of lowest digest; None: all.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
    for prompt in sorted(prompts, key=lambda prompt: order_key(prompt.prompt_id)):
        part = split_of(prompt.first.prompt, split)
        if part == "train":
            found["sft"].extend(_stored(prompt, row.reply) for row in prompt.replies.values())
            found["preference"].extend(_stored_pair(prompt, *pair) for pair in prompt.pairs)
        if prompt.answer is not None:
            found["rl" if part == "train" else part].append(_stored(prompt, None))
    if rl_prompts is not None:
        del found["rl"][rl_prompts:]
    return found


def _without_conflicts(group: list[CheckedRow]) -> tuple[list[CheckedRow], list[Rejected]]:
    answers = list(dict.fromkeys(row.answer for row in group if row.answer is not None))
    if len(answers) < 2:
        return group, []
    sound = [row for row in group if row.answer is None]
    shown = " / ".join(answers)
    return sound, [_reject(row, Reason.CONFLICTING_GOLD, shown) for row in group if row.answer is not None]


def _merge(group: list[CheckedRow]) -> tuple[Prompt, list[Rejected]]:
    """One prompt from rows that share their text and do not contradict each other."""
    answer = next((row.answer for row in group if row.answer is not None), None)
    own_id = next((row.own_id for row in group if row.own_id is not None), None)
    prompt = Prompt(own_id or prompt_digest(group[0].prompt, answer), group[0], answer)
    copies, answered = [], False
    for row in group:
        new_reply = row.reply is not None and row.reply.content not in prompt.replies
        new_answer = row.answer is not None and not answered
        new_pair = row.pair is not None and row.pair not in prompt.pairs
        if not (new_reply or new_answer or new_pair):
            copies.append(_reject(row, Reason.DUPLICATE_EXACT, row.prompt[-1].content))
        if new_reply and row.reply is not None:
            prompt.replies[row.reply.content] = row
        if new_pair and row.pair is not None:
            prompt.pairs.append(row.pair)
        answered = answered or new_answer
    return prompt, copies


def _stored(prompt: Prompt, reply: Message | None) -> dict[str, Any]:
    messages = [*prompt.first.prompt, *([] if reply is None else [reply])]
    return {
        "prompt_id": prompt.prompt_id,
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "answer": prompt.answer,
        "difficulty": prompt.first.difficulty,
        "source": prompt.first.source,
    }


def _stored_pair(prompt: Prompt, chosen: str, rejected: str) -> dict[str, Any]:
    row = _stored(prompt, None)
    del row["answer"]
    return {**row, "chosen": chosen, "rejected": rejected}


def _reject(row: CheckedRow, reason: Reason, value: str) -> Rejected:
    return Rejected(row.file, row.row, reason, excerpt(value))


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()
