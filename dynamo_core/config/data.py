"""Where rows come from and how they are split."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dynamo_core.config.base import Frozen, PositiveInt, Share


class ArithmeticSource(Frozen):
    """The built-in task: chains of additions and subtractions, with noisy worked solutions.

    Each problem also has a preference pair: the right solution, and one with a slip.
    """

    type: Literal["arithmetic"]
    problems: PositiveInt = 3600
    """Distinct problems, over all splits."""
    terms: Annotated[tuple[Annotated[int, Field(ge=2, le=8)], ...], Field(min_length=1)] = (3, 4, 5)
    """Numbers of terms, equally frequent; the number of terms is the difficulty."""
    wrong_share: Annotated[tuple[Share, ...], Field(min_length=1)] = (0.2, 0.45, 0.7)
    """Share of demonstrations whose final answer is wrong, for each entry of `terms`."""

    @model_validator(mode="after")
    def _one_share_a_term(self) -> Self:
        if len(self.terms) != len(self.wrong_share):
            raise ValueError(
                f"wrong_share needs one entry for each entry of terms: {len(self.wrong_share)} for {len(self.terms)}"
            )
        if len(set(self.terms)) != len(self.terms):
            raise ValueError(f"terms {list(self.terms)} holds a number twice")
        return self


class MessagesSource(Frozen):
    """A JSON-lines file: {"messages": [{"role", "content"}, ...], "answer": "...", "difficulty": "...", "id": "..."}.

    Rows that end with an assistant turn are demonstrations; rows with an answer are tasks; a row may be both. Rows that
    end with a user turn may bring "chosen" and "rejected", each a text or a list of one assistant message: a preference
    pair.
    """

    type: Literal["messages"]
    path: Annotated[str, Field(min_length=1)]


Source = Annotated[ArithmeticSource | MessagesSource, Field(discriminator="type")]


class Split(Frozen):
    """Shares of the prompts, decided by each prompt's digest: adding rows never moves an old one."""

    validation: Share = 0.05
    test: Share = 0.1

    @model_validator(mode="after")
    def _leaves_training_rows(self) -> Self:
        if self.validation + self.test >= 1:
            raise ValueError(f"validation + test must be below 1, got {self.validation + self.test:g}")
        return self
