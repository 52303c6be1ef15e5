"""The numerical guard of an engine: names the first number that is not finite, before any weight moves.

Gradients are watched by autograd hooks, before DeepSpeed sums or shards them: so the parameter has a name and the
micro-batch that brought it is known, whatever the ZeRO stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import nn

from dynamo_core.errors import NumericalFailure
from dynamo_core.training.distributed import Ranks

SHOWN: Final = 5
"""Prompt ids that a message names; the others are counted."""


def named(prompt_ids: Iterable[str]) -> str:
    """The distinct ids in words: at most SHOWN of them, then a count."""
    distinct = list(dict.fromkeys(prompt_ids))
    if not distinct:
        return "unknown prompts"
    more = f" and {len(distinct) - SHOWN} more" if len(distinct) > SHOWN else ""
    return f"prompts {', '.join(repr(prompt_id) for prompt_id in distinct[:SHOWN])}{more}"


@dataclass(frozen=True)
class Offence:
    """What was not finite, and in which micro-batch."""

    term: str
    prompt_ids: tuple[str, ...]
    rank: int


class Guard:
    """Watches every backward pass of one module on this rank."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sums: dict[str, torch.Tensor] = {}
        self._prompt_ids: list[str] = []
        self._offence: Offence | None = None
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._watch, name))

    def _watch(self, name: str, gradient: torch.Tensor) -> None:
        # A sum is finite only if every entry is, and no pass over them is cheaper: no mask, no wait for the device.
        total = _sum(gradient)
        self._sums[name] = self._sums[name] + total if name in self._sums else total

    def observe(self, terms: Mapping[str, torch.Tensor], prompt_ids: Sequence[str]) -> None:
        """After a backward pass: was everything of it finite?

        Args:
            terms: the parts of its loss by name, scalars.
            prompt_ids: of its rows.
        """
        self._prompt_ids.extend(prompt_ids)
        sums, self._sums = self._sums, {}
        scalars = torch.stack([value.detach().float() for value in (*terms.values(), *sums.values())])
        if self._offence is None and not bool(scalars.isfinite().all()):
            bad = [
                (name, value)
                for name, value in zip((*terms, *sums), scalars.tolist(), strict=True)
                if not math.isfinite(value)
            ]
            self._offence = Offence(_words(bad, terms), tuple(prompt_ids), self._ranks.rank)

    def check(self, loss: float, step: int) -> float:
        """The loss over all ranks, once all of the step's backward passes were finite on all of them.

        Args:
            loss: of this rank.
            step: the optimizer step that comes next.

        Raises:
            NumericalFailure: on all ranks alike.
        """
        total, offences = self._ranks.sum([loss, float(self._offence is not None)])
        if offences:
            first = self._ranks.gather(self._offence)[0]
            where = "" if self._ranks.world_size == 1 else f" on rank {first.rank}"
            raise NumericalFailure(
                f"{first.term} at optimizer step {step}{where}, in a micro-batch of {named(first.prompt_ids)}",
                "lower optimizer.lr, and look at these prompts",
                step,
            )
        if not math.isfinite(total):
            raise self._failure(f"the loss is {total}", step)
        return total

    def check_norm(self, norm: float, step: int) -> None:
        """Of the gradient over all ranks: the last look before weights move.

        Raises:
            NumericalFailure: on all ranks alike, as the norm is.
        """
        if not math.isfinite(norm):
            raise self._failure(f"the gradient norm is {norm}", step)

    def _failure(self, what: str, step: int) -> NumericalFailure:
        where = named(self._prompt_ids)
        return NumericalFailure(f"{what} at optimizer step {step}, trained on {where}", "lower optimizer.lr", step)

    def step_is_over(self) -> None:
        """The next backward pass belongs to another optimizer step."""
        self._prompt_ids.clear()


def _sum(values: torch.Tensor) -> torch.Tensor:
    return values.detach().sum(dtype=torch.float32 if values.dtype.itemsize < 4 else None)


def _words(bad: Sequence[tuple[str, float]], terms: Iterable[str]) -> str:
    """A loss that is not finite spoils every gradient: then the loss is the cause."""
    of_loss = [(name, value) for name, value in bad if name in terms]
    if of_loss:
        return " and ".join(f"the {_title(name)} is {value}" for name, value in of_loss)
    more = f" and of {len(bad) - 1} more parameters" if len(bad) > 1 else ""
    return f"the gradient of '{bad[0][0]}'{more} is not finite"


def _title(name: str) -> str:
    return name if name == "loss" else f"loss part '{name}'"


def check_weights(module: nn.Module, ranks: Ranks, step: int) -> None:
    """Called before anything is saved.

    Raises:
        NumericalFailure: a weight is not finite, on all ranks alike.
    """
    names = [name for name, _ in module.named_parameters()]
    finite = torch.stack([_sum(parameter) for parameter in module.parameters()]).isfinite().tolist()
    bad = [name for name, good in zip(names, finite, strict=True) if not good]
    (count,) = ranks.sum([float(len(bad))])
    if count:
        first = ranks.gather(bad[0] if bad else None)[0]
        raise NumericalFailure(
            f"weight '{first}' is not finite after optimizer step {step}: nothing is saved", "lower optimizer.lr", step
        )
