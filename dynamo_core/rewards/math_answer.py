"""1 for a completion whose final answer equals the prompt's own answer, else 0. Plain numbers only, compared exactly.

Numbers are compared as fractions and never as floats, so 2**53 and 2**53 + 1 differ and 0.5 equals 1/2. Text is never
evaluated. Every step is linear in the length of the text; long digit strings and huge exponents are refused.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Final

from dynamo_core.config.reinforce import MathAnswerReward
from dynamo_core.types import PromptRow, Verdict

MAX_LENGTH: Final = 10_000
"""Longest text that is read as a number, in characters: two such numbers are compared within milliseconds."""
MAX_EXPONENT: Final = 1_000
"""Largest power of ten: written out, 1e1000000000 would fill the memory."""

_SIGNS: Final = str.maketrans(dict.fromkeys("\u2212\u2013\uff0d\ufe63", "-") | {"\uff0b": "+"})
_SEPARATORS: Final = str.maketrans({"\uff0e": ".", "\uff0c": ",", "\uff0f": "/", "\u00a0": " ", "\u200b": None})
_NUMBER: Final = re.compile(
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE](?P<exponent>[+-]?[0-9]{1,9}))?"
)
_QUOTIENT: Final = re.compile(r"([^/]+)/([^/]+)")
_FRAC: Final = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_WRAPPED: Final = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|boxed|fbox)\s*\{(.*)\}", re.DOTALL)
_SPACING: Final = re.compile(r"\\[,;: ]")
_BRACES: Final = re.compile(r"\\[{}\\]|\\(?:boxed|fbox)\s*\{|[{}]")


class MathAnswer:
    """Compares the final answer of a completion with the prompt's answer."""

    def __init__(self, config: MathAnswerReward) -> None:
        self._extract = {"gsm8k": after_marker, "boxed": last_box}[config.format]

    def __call__(self, prompt: PromptRow, completion: str) -> Verdict:
        """Verdict with the reason `correct`, `wrong`, `not_a_number`, `no_answer` or `unverifiable_gold`."""
        gold = self._gold(prompt.answer)
        if gold is None:
            return Verdict(None, None, "unverifiable_gold")
        answer = self._extract(completion)
        if answer is None:
            return Verdict(0.0, False, "no_answer")
        number = parse_number(answer)
        if number is None:
            return Verdict(0.0, False, "not_a_number")
        correct = number == gold
        return Verdict(float(correct), correct, "correct" if correct else "wrong")

    def _gold(self, text: str) -> Fraction | None:
        """The gold answer: a number, or a worked solution that marks one in the same way as completions do."""
        number = parse_number(text)
        marked = self._extract(text) if number is None else None
        return parse_number(marked) if marked is not None else number


def after_marker(text: str) -> str | None:
    """What follows the last `####` on its line; None where there is no marker or nothing after it."""
    _before, marker, after = text.rpartition("####")
    answer = after.split("\n", 1)[0].strip()
    return answer if marker and answer else None


def last_box(text: str) -> str | None:
    """What is in the last complete \\boxed{} after the last </think>; None where there is none or it is empty.

    Reasoning that was never closed holds no answer. A box that was cut off is no answer either.
    """
    text = text.rpartition("</think>")[2]
    if "<think>" in text:
        return None
    open_braces: list[int | None] = []  # for each open brace: where its box's content starts, None for other braces
    found: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        brace = match.group()
        if brace == "}" and open_braces:
            start = open_braces.pop()
            found = found if start is None else (start, match.start())
        elif brace.endswith("{") and brace != r"\{":
            open_braces.append(None if brace == "{" else match.end())
    answer = "" if found is None else text[found[0] : found[1]].strip()
    return answer or None


def parse_number(text: str) -> Fraction | None:
    """The exact value of a plain number, or None.

    Understood: signs, thousands commas, decimals, powers of ten (1e5), a/b, \\frac{a}{b}, a currency sign, a final
    full stop, a font command around the whole, full-width digits and decimal digits of other scripts.
    """
    if len(text) > MAX_LENGTH:
        return None
    text = _plain_characters(text).strip().strip("$").strip()
    while wrapped := _WRAPPED.fullmatch(text):
        text = wrapped.group(1).strip().strip("$").strip()
    return _signed(text.removesuffix(".").rstrip(), _unsigned)


def _plain_characters(text: str) -> str:
    """ASCII for signs, separators and decimal digits of other scripts. Superscripts stay: 5² is not 52."""
    if not text.isascii():
        text = text.translate(_SIGNS).translate(_SEPARATORS)
        text = "".join(str(unicodedata.decimal(one)) if one.isdecimal() else one for one in text)
    return _SPACING.sub(" ", text.replace(r"\$", "$").replace(r"\!", "").replace("{,}", ","))


def _signed(text: str, read: Callable[[str], Fraction | None]) -> Fraction | None:
    """One optional sign, then what `read` understands."""
    body = text[1:].lstrip() if text[:1] in ("+", "-") else text
    value = read(body.removeprefix("$").lstrip())
    return -value if value is not None and text.startswith("-") else value


def _unsigned(text: str) -> Fraction | None:
    """A fraction of two numbers, or a number."""
    if written := _FRAC.fullmatch(text):
        top, bottom = written[1] or written[2], written[3] or written[4]
    elif written := _QUOTIENT.fullmatch(text):
        top, bottom = written[1], written[2]
    else:
        return _number(text)
    if top is None or bottom is None:
        return None
    numerator, denominator = _signed(top.strip(), _number), _signed(bottom.strip(), _number)
    return None if numerator is None or not denominator else numerator / denominator


def _number(text: str) -> Fraction | None:
    """An unsigned decimal number. Built from text through Decimal, whose constructor never rounds."""
    match = _NUMBER.fullmatch(text)
    if match is None or abs(int(match["exponent"] or 0)) > MAX_EXPONENT:
        return None
    return Fraction(Decimal(text.replace(",", "")))
