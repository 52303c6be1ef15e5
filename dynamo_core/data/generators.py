"""Built-in data: chains of additions and subtractions with worked solutions, some of them wrong.

    user       8+7-6+9=?
    assistant  8+7=15
               15-6=9
               9+9=18
               #### 18

A *noisy* demonstration has a slip in one partial result. Everything after it is worked out correctly from the wrong
value, so the final answer is off by exactly the slip: a noisy demonstration is never right by accident. Imitation
learns this noise; a verifiable reward removes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from dynamo_core.config.data import ArithmeticSource
from dynamo_core.data.schema import RawRow
from dynamo_core.errors import DataError

# Settled by training the quickstart recipe's student: single digits and results below 21 leave a model of 0.3 M
# parameters about 400 facts to learn, which takes it some hundred updates after it has learned to copy the terms.
LIMIT: Final = 20
"""Partial results lie within 0..LIMIT."""
FIRST: Final = 9
"""Largest first term."""
OTHERS: Final = 9
"""Largest further term."""
SLIPS: Final = (-10, -2, -1, 1, 2, 10)
"""What a slip adds to a partial result: a lost carry, or a miscount by one or two."""
_TRIES: Final = 20
"""Draws allowed per problem wanted before the range of distinct problems counts as used up."""


@dataclass(frozen=True)
class Chain:
    """A problem: terms and the operations between them, worked out from left to right."""

    terms: tuple[int, ...]
    operations: tuple[str, ...]

    @property
    def question(self) -> str:
        """The problem as the user asks it."""
        rest = (f"{operation}{term}" for operation, term in zip(self.operations, self.terms[1:], strict=True))
        return f"{self.terms[0]}{''.join(rest)}=?"

    def partial_results(self, slip_at: int = -1, slip: int = 0) -> list[int]:
        """The result after each operation, with `slip` added to that of operation `slip_at`."""
        results, value = [], self.terms[0]
        for index, (operation, term) in enumerate(zip(self.operations, self.terms[1:], strict=True)):
            value = _apply(value, operation, term) + (slip if index == slip_at else 0)
            results.append(value)
        return results

    def solution(self, results: Sequence[int]) -> str:
        """The worked solution that has these partial results."""
        lines, value = [], self.terms[0]
        for operation, term, result in zip(self.operations, self.terms[1:], results, strict=True):
            lines.append(f"{value}{operation}{term}={result}")
            value = result
        return "\n".join([*lines, f"#### {value}"])


def generate(source: ArithmeticSource, seed: int) -> Iterator[RawRow]:
    """`source.problems` distinct problems, each with its right answer, a demonstration that may be wrong, and a pair.

    A pair prefers the right solution to one with a slip. Problems and pairs depend on the seed and the numbers of terms
    alone: other shares of noise leave them as they are.

    Raises:
        DataError: there are not enough distinct problems with some number of terms.
    """
    row = 0
    for index, (terms, wrong_share) in enumerate(zip(source.terms, source.wrong_share, strict=True)):
        count = source.problems // len(source.terms) + (index < source.problems % len(source.terms))
        noise, slips = np.random.default_rng([seed, terms, 1]), np.random.default_rng([seed, terms, 2])
        for chain in _distinct_chains(count, terms, np.random.default_rng([seed, terms, 0])):
            results = chain.partial_results()
            shown = _with_slip(chain, noise) if noise.random() < wrong_share else results
            yield RawRow(
                file=source.type,
                row=row,
                source=source.type,
                turns=(("user", chain.question), ("assistant", chain.solution(shown))),
                answer=str(results[-1]),
                answer_given=True,
                difficulty=str(terms),
                own_id=None,
                pair=(chain.solution(results), chain.solution(_with_slip(chain, slips))),
            )
            row += 1


def _distinct_chains(count: int, terms: int, rng: np.random.Generator) -> list[Chain]:
    chains: dict[Chain, None] = {}
    for _ in range(_TRIES * count):
        if len(chains) == count:
            break
        chains.setdefault(_draw_chain(terms, rng))
    if len(chains) < count:
        raise DataError(
            f"there are not enough distinct problems with {terms} terms: {count} wanted, {len(chains)} found",
            "lower source.problems or add larger entries to source.terms",
        )
    return list(chains)


def _draw_chain(terms: int, rng: np.random.Generator) -> Chain:
    """A random problem all of whose partial results lie within 0..LIMIT."""
    value = int(rng.integers(1, FIRST, endpoint=True))
    values, operations = [value], []
    while len(values) < terms:
        term = int(rng.integers(1, OTHERS, endpoint=True))
        possible = [sign for sign in "+-" if 0 <= _apply(value, sign, term) <= LIMIT]
        operation = possible[int(rng.integers(len(possible)))]
        value = _apply(value, operation, term)
        values.append(term)
        operations.append(operation)
    return Chain(tuple(values), tuple(operations))


def _with_slip(chain: Chain, rng: np.random.Generator) -> list[int]:
    """Partial results with one slip, chosen evenly among those that keep all of them within 0..LIMIT.

    There always is one: a slip in the last operation, up or down.
    """
    slipped = (chain.partial_results(at, slip) for at in range(len(chain.operations)) for slip in SLIPS)
    possible = [results for results in slipped if all(0 <= value <= LIMIT for value in results)]
    return possible[int(rng.integers(len(possible)))]


def _apply(value: int, operation: str, term: int) -> int:
    return value + term if operation == "+" else value - term
