"""The loop behind sft, distill and dpo: batches of rows, one denominator a batch over all ranks.

The losses of sft and distill are here too, that of dpo is in preference.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynamo_core.algorithms.distillation import cross_entropy, forward_kl
from dynamo_core.config.stage_base import Batching
from dynamo_core.data.batching import TokenRow, length_bucketed_batches, micro_batches
from dynamo_core.data.packing import lay_out
from dynamo_core.data.templates import encode_demonstration
from dynamo_core.errors import DataError
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.policy import TargetStates, TokenScorer
from dynamo_core.types import Demonstration

CHUNK_ELEMENTS = 1 << 24
"""Logits of one model held at once while distilling, in elements."""


Row = TypeVar("Row")


class Report(Protocol):
    """Where a step's metrics go."""

    def __call__(self, step: int, values: Mapping[str, float], timings: Mapping[str, float]) -> None:
        """Record one step."""
        ...


class Loss(nn.Module):
    """What is trained: called with a collation's inputs, it returns (loss, *parts), scalars."""

    parts: tuple[str, ...]
    """Metric names."""


class NextTokenLoss(Loss):
    """Cross-entropy with the data, weighted by token."""

    parts = ("train/cross_entropy",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._scorer = [TokenScorer(model)]  # in a list: its parameters are the model's own

    def external_parameters(self) -> list[nn.Parameter]:
        """Those of the scorer."""
        return self._scorer[0].external_parameters()

    def forward(
        self,
        token_ids_BL: torch.Tensor,
        target_mask_BL: torch.Tensor,
        weights_BL: torch.Tensor,
        position_BL: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """(loss, *parts), scalars; `weights_BL` carry the denominator, `position_BL` comes with packed rows."""
        scores = self._scorer[0](token_ids_BL, target_mask_BL, 1.0, position_BL)
        loss = -(weights_BL * scores.log_prob_BL).sum()
        return loss, loss.detach()


class DistillationLoss(Loss):
    """Forward KL to the teacher at a temperature, mixed with cross-entropy with the data (Hinton et al. 2015)."""

    parts = ("train/cross_entropy", "train/kl")

    def __init__(
        self, student: PreTrainedModel, teacher: PreTrainedModel, *, temperature: float, kl_weight: float
    ) -> None:
        super().__init__()
        self.model = student
        self._targets = (TargetStates(student), TargetStates(teacher))
        self._temperature = temperature
        self._kl_weight = kl_weight

    def forward(
        self,
        token_ids_BL: torch.Tensor,
        target_mask_BL: torch.Tensor,
        weights_BL: torch.Tensor,
        position_BL: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """(loss, *parts), scalars; `weights_BL` carry the denominator, `position_BL` comes with packed rows."""
        predicts_BL = target_mask_BL[:, 1:]
        targets_N = token_ids_BL[:, 1:][predicts_BL]
        weights_N = weights_BL[:, 1:][predicts_BL]
        student, teacher = self._targets
        student_NH = student.states(token_ids_BL, predicts_BL, position_BL)
        with torch.no_grad():
            teacher_NH = teacher.states(token_ids_BL, predicts_BL, position_BL)
        vocabulary = student.logits(student_NH[:1]).shape[-1]
        size = max(1, CHUNK_ELEMENTS // vocabulary)
        sums = [
            checkpoint(
                self._chunk, student_NH[rows], teacher_NH[rows], targets_N[rows], weights_N[rows], use_reentrant=False
            )
            for rows in (slice(start, start + size) for start in range(0, len(targets_N), size))
        ]
        entropy, divergence = (torch.stack(column).sum() for column in zip(*sums, strict=True))
        loss = self._kl_weight * divergence + (1 - self._kl_weight) * entropy
        return loss, entropy.detach(), divergence.detach()

    def _chunk(
        self, student_NH: torch.Tensor, teacher_NH: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        student, teacher = self._targets
        logits_NV = student.logits(student_NH)
        with torch.no_grad():
            teacher_logits_NV = teacher.logits(teacher_NH)
        entropy = cross_entropy(logits_NV, targets_N, weights_N)
        # Sizes of one family pad the same vocabulary differently (TRL#2215): compare over what both have.
        common = min(logits_NV.shape[-1], teacher_logits_NV.shape[-1])
        logits_NV, teacher_logits_NV = logits_NV[:, :common], teacher_logits_NV[:, :common]
        # The temperature's square keeps the gradient's size (Hinton et al. 2015, section 2).
        scale = self._temperature**2
        return entropy, forward_kl(logits_NV, teacher_logits_NV, weights_N, temperature=self._temperature) * scale


@dataclass(frozen=True)
class Collation(Generic[Row]):
    """How rows become what the loss's module is called with."""

    length: Callable[[Row], int]
    """Tokens of a row; rows of similar length are batched together."""
    count: Callable[[Row], int]
    """What a row adds to the batch's denominator."""
    inputs: Callable[[Sequence[Row], float], tuple[torch.Tensor, ...]]
    """(rows, denominator) -> arguments of the module; an infinite denominator makes every weight zero."""


def tokens(batching: Batching) -> Collation[TokenRow]:
    """Every target token counts the same."""

    def inputs(rows: Sequence[TokenRow], denominator: float) -> tuple[torch.Tensor, ...]:
        batch = lay_out(rows, packed=batching == "packed")
        weights_PC = batch.target_mask_PC.float() / denominator
        given = batch.token_ids_PC, batch.target_mask_PC, weights_PC
        return given if batch.position_PC is None else (*given, batch.position_PC)

    return Collation(length=lambda row: len(row.token_ids), count=lambda row: sum(row.target_mask), inputs=inputs)


@dataclass(frozen=True)
class EncodedRows(Generic[Row]):
    """Rows as tokens, and the prompt ids of those left out as too long."""

    rows: list[Row] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)
    prompt_ids: list[str] = field(default_factory=list)
    """Of `rows`."""


def encode_rows(
    tokenizer: PreTrainedTokenizerBase, demonstrations: Sequence[Demonstration], max_length: int
) -> EncodedRows[TokenRow]:
    """Encode demonstrations; only assistant tokens are targets.

    Raises:
        DataError: every row is longer than `max_length`.
    """
    encoded = EncodedRows[TokenRow]()
    for demonstration in demonstrations:
        row = encode_demonstration(tokenizer, demonstration.messages)
        if len(row.token_ids) > max_length:
            encoded.too_long.append(demonstration.prompt_id)
        else:
            encoded.rows.append(TokenRow(tuple(row.token_ids), tuple(row.loss_mask)))
            encoded.prompt_ids.append(demonstration.prompt_id)
    if not encoded.rows:
        raise DataError(f"all {len(demonstrations)} demonstrations are longer than max_length {max_length} tokens")
    return encoded


def train(
    engine: TrainingEngine,
    rows: Sequence[Row],
    ranks: Ranks,
    report: Report,
    *,
    collation: Collation[Row],
    parts: Sequence[str],
    steps: int,
    batch_size: int,
    micro_batch_size: int,
    seed: int,
    start: int = 0,
    prompt_ids: Sequence[str] = (),
) -> None:
    """`steps` optimizer steps over length-bucketed batches of `rows`.

    Args:
        parts: metric names of what the engine's module returns after the loss.
        start: steps that were already taken, by an earlier process.
        prompt_ids: of `rows`, for messages.
    """
    generator = np.random.Generator(np.random.Philox(seed))
    lengths = np.array([collation.length(row) for row in rows])
    batches = length_bucketed_batches(lengths.tolist(), batch_size, steps, generator)
    for step, batch in islice(enumerate(batches, start=1), start, None):
        started = time.perf_counter()
        denominator = sum(collation.count(rows[index]) for index in batch)
        totals = torch.zeros(1 + len(parts), dtype=torch.float64)
        for chosen in micro_batches(lengths[batch].tolist(), micro_batch_size, ranks.rank, ranks.world_size):
            picked = [batch[place] for place in chosen]
            names = [prompt_ids[index] for index in picked] if prompt_ids else []
            used = [rows[index] for index in picked or batch[:1]]
            # A rank without rows of its own computes one for nothing, to keep collectives symmetric.
            inputs = collation.inputs(used, denominator if picked else math.inf)
            totals += _micro_step(engine, inputs, parts, names)
        done = engine.step(float(totals[0]))
        values = dict(zip(("train/loss", *parts), ranks.sum(totals.tolist()), strict=True))
        seconds = time.perf_counter() - started
        report(
            step,
            {**values, "train/grad_norm": done.grad_norm, "train/lr": done.lr},
            {"seconds/step": seconds, "tokens_per_second": int(lengths[batch].sum()) / seconds},
        )


def _micro_step(
    engine: TrainingEngine, inputs: Sequence[torch.Tensor], parts: Sequence[str], prompt_ids: Sequence[str]
) -> torch.Tensor:
    """Forward and backward of one micro-batch: (loss, *parts)."""
    loss, *values = engine.forward(*(tensor.to(engine.device) for tensor in inputs))
    engine.accumulate(loss, {"loss": loss, **dict(zip(parts, values, strict=True))}, prompt_ids)
    return torch.tensor([float(loss.detach()), *(float(value) for value in values)], dtype=torch.float64)
