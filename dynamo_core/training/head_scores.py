"""Scores of target tokens from hidden states through a linear output layer, without their logits ever being whole.

Tiles of tokens meet chunks of the vocabulary. The backward pass computes each chunk of logits again, and each chunk's
rows of the weight's gradient are then done with: nothing of size [N, V], and no second [V, H].
Letters: N target tokens, H width, V vocabulary, C a chunk of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from dynamo_core.algorithms.checks import at_least_float32
from dynamo_core.algorithms.logit_statistics import LOWEST, LogitSums, row_blocks

TILE_TOKENS = 1024
"""Tokens that meet a chunk of the vocabulary at once."""
CHUNK_ELEMENTS = 1 << 23
"""Logits held at once: 32 MiB in float32, and a second buffer of that size."""


@dataclass(frozen=True)
class Head:
    """The output layer: logits = (hidden weight^T + bias) / temperature, reduced in float32 or better."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    temperature: float

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Chunks of the vocabulary for a tile of `tokens`."""
        size, vocabulary = max(1, CHUNK_ELEMENTS // tokens), self.weight_VH.shape[0]
        return (slice(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size))

    def logits(self, hidden_NH: torch.Tensor, chunk: slice, buffer: torch.Tensor) -> torch.Tensor:
        """[N, C], in `buffer` where the precision allows it; free to be overwritten."""
        weight_CH = self.weight_VH[chunk]
        bias_C = None if self.bias_V is None else self.bias_V[chunk]
        if hidden_NH.dtype == buffer.dtype == weight_CH.dtype:
            logits_NC = buffer[: len(hidden_NH) * len(weight_CH)].view(len(hidden_NH), len(weight_CH))
            torch.mm(hidden_NH, weight_CH.T, out=logits_NC)
            if bias_C is not None:
                logits_NC.add_(bias_C)
        else:
            logits_NC = at_least_float32(nn.functional.linear(hidden_NH, weight_CH, bias_C))
        return logits_NC.div_(self.temperature) if self.temperature != 1.0 else logits_NC

    def buffer(self, tokens: int) -> torch.Tensor:
        """Room for the logits of one tile and chunk."""
        size = min(tokens, TILE_TOKENS) * self.weight_VH.shape[0]
        dtype = torch.promote_types(self.weight_VH.dtype, torch.float32)
        return self.weight_VH.new_empty(min(size, max(CHUNK_ELEMENTS, TILE_TOKENS)), dtype=dtype)


class Scores(NamedTuple):
    """Of N target tokens, all [N]; `log_normaliser` is log sum exp of the logits, for the backward pass."""

    log_prob: torch.Tensor
    entropy: torch.Tensor
    bracket: torch.Tensor
    log_normaliser: torch.Tensor


@dataclass(frozen=True)
class Gradients:
    """Where the backward pass adds to: [N, H], [V, H] and [V], in float32 or better; none where not wanted."""

    hidden_NH: torch.Tensor | None
    weight_VH: torch.Tensor | None
    bias_V: torch.Tensor | None

    def add(self, head: Head, hidden_NH: torch.Tensor, delta_NC: torch.Tensor, *, tile: slice, chunk: slice) -> None:
        """Add what the logits' gradient `delta_NC` of one tile and chunk leads to."""
        if self.hidden_NH is not None:
            weight_CH = head.weight_VH[chunk]
            if weight_CH.dtype == delta_NC.dtype:
                self.hidden_NH[tile].addmm_(delta_NC, weight_CH)
            else:
                self.hidden_NH[tile] += delta_NC.to(weight_CH.dtype) @ weight_CH
        if self.weight_VH is not None:
            self.weight_VH[chunk].addmm_(delta_NC.T, hidden_NH.to(delta_NC.dtype))
        if self.bias_V is not None:
            self.bias_V[chunk] += delta_NC.sum(0)


@torch.no_grad()
def forward(head: Head, hidden_NH: torch.Tensor, targets_N: torch.Tensor) -> Scores:
    """The scores of every target."""
    buffer = head.buffer(len(targets_N))
    parts = [_forward_tile(head, hidden_NH[tile], targets_N[tile], buffer) for tile in tiles(len(targets_N))]
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def tiles(tokens: int) -> list[slice]:
    """At least one, so that no tokens give empty scores."""
    return [slice(start, min(start + TILE_TOKENS, tokens)) for start in range(0, max(tokens, 1), TILE_TOKENS)]


def _forward_tile(head: Head, hidden_NH: torch.Tensor, targets_N: torch.Tensor, buffer: torch.Tensor) -> Scores:
    sums = LogitSums(overwrite=True)
    target_logit_N = buffer.new_zeros(len(targets_N))
    for chunk in head.chunks(max(len(targets_N), 1)):
        logits_NC = head.logits(hidden_NH, chunk, buffer)
        here, column = inside(targets_N, chunk)
        target_logit_N[here] = logits_NC[here, column]
        sums.update(logits_NC)
    token = sums.statistics(target_logit_N)
    return Scores(token.log_prob, token.entropy, token.bracket, sums.log_normaliser())


def inside(targets_N: torch.Tensor, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens' targets lie in the chunk, and in which of its columns."""
    here = ((targets_N >= chunk.start) & (targets_N < chunk.stop)).nonzero().squeeze(-1)
    return here, targets_N[here] - chunk.start


@torch.no_grad()
def backward(
    head: Head,
    hidden_NH: torch.Tensor,
    targets_N: torch.Tensor,
    scores: Scores,
    into: Gradients,
    *,
    grad_log_prob_N: torch.Tensor,
    grad_entropy_N: torch.Tensor | None = None,
) -> None:
    """Add the gradient of sum(grad_log_prob log_prob + grad_entropy entropy).

        d log p_a / dz = e_a - p          dH / dz = -p (log p + H)
    """
    buffer = head.buffer(len(targets_N))
    for tile in tiles(len(targets_N)):
        grad_N = grad_log_prob_N[tile]
        for chunk in head.chunks(max(len(grad_N), 1)):
            logits_NC = head.logits(hidden_NH[tile], chunk, buffer)
            for rows in row_blocks(*logits_NC.shape):
                log_p_NC = logits_NC[rows].sub_(scores.log_normaliser[tile][rows].unsqueeze(-1))
                factor_NC = -grad_N[rows].unsqueeze(-1)
                if grad_entropy_N is not None:
                    log_p_NC.clamp_(min=LOWEST)  # an impossible token: 0, not -inf * 0
                    lambda_NC = log_p_NC + scores.entropy[tile][rows].unsqueeze(-1)
                    factor_NC = factor_NC - grad_entropy_N[tile][rows].unsqueeze(-1) * lambda_NC
                log_p_NC.exp_().mul_(factor_NC)
            delta_NC = logits_NC
            here, column = inside(targets_N[tile], chunk)
            delta_NC[here, column] += grad_N[here]
            if head.temperature != 1.0:
                delta_NC.div_(head.temperature)
            into.add(head, hidden_NH[tile], delta_NC, tile=tile, chunk=chunk)


class HeadScores(torch.autograd.Function):
    """(log_prob, entropy, bracket) of targets, [N] each; the bracket carries no gradient."""

    @staticmethod
    def forward(  # noqa: PLR0917  (torch passes arguments by position)
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = forward(Head(weight_VH, bias_V, temperature), hidden_NH, targets_N)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, *scores)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(scores.bracket)
        return scores.log_prob, scores.entropy, scores.bracket

    @staticmethod
    def backward(
        ctx: Any, grad_log_prob_N: torch.Tensor | None, grad_entropy_N: torch.Tensor | None, _: torch.Tensor | None
    ) -> Any:
        hidden_NH, weight_VH, bias_V, targets_N, *kept = ctx.saved_tensors
        scores = Scores(*kept)
        if grad_log_prob_N is None:
            if grad_entropy_N is None:
                return None, None, None, None, None
            grad_log_prob_N = torch.zeros_like(grad_entropy_N)
        wanted = (
            torch.zeros_like(tensor, dtype=scores.log_prob.dtype) if needed and tensor is not None else None
            for tensor, needed in zip((hidden_NH, weight_VH, bias_V), ctx.needs_input_grad, strict=False)
        )
        into = Gradients(*wanted)
        head = Head(weight_VH, bias_V, ctx.temperature)
        backward(
            head, hidden_NH, targets_N, scores, into, grad_log_prob_N=grad_log_prob_N, grad_entropy_N=grad_entropy_N
        )
        return (
            None if into.hidden_NH is None else into.hidden_NH.to(hidden_NH.dtype),
            None if into.weight_VH is None else into.weight_VH.to(weight_VH.dtype),
            None if into.bias_V is None or bias_V is None else into.bias_V.to(bias_V.dtype),
            None,
            None,
        )
