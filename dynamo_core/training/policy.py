"""Log-probability, entropy and entropy-change bracket of target tokens, in one pass over the model.

The formulas are those of algorithms/logit_statistics.py, on logits divided by the rollout temperature. Only
hidden states of target tokens reach the output layer, a few hundred tokens at a time, and the backward pass computes
each chunk's logits again: no [B, L, V] tensor ever exists. Reductions are in float32 or better.
Letters: B rows, L tokens of a row, N target tokens of the batch, H width, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dynamo_core.algorithms.checks import at_least_float32
from dynamo_core.algorithms.logit_statistics import logit_statistics

CHUNK_ELEMENTS = 1 << 24
"""Logits held at once, in elements: 64 MiB in float32."""


class TokenScores(NamedTuple):
    """All [B, L], float32 or better, zero where a token is no target. Only `log_prob` carries gradients.

    A tuple, because DeepSpeed looks for tensors to hook in tuples, lists and dicts only.
    """

    log_prob_BL: torch.Tensor
    entropy_BL: torch.Tensor
    bracket_BL: torch.Tensor


class _HeadScores(torch.autograd.Function):
    """Scores from hidden states through a linear output layer, chunk by chunk, logits recomputed in backward."""

    @staticmethod
    def forward(  # noqa: PLR0917  (torch passes arguments by position)
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N)
        ctx.temperature = temperature
        parts = [
            logit_statistics(_logits(hidden_NH[rows], weight_VH, bias_V, temperature), targets_N[rows])[:3]
            for rows in _chunks(hidden_NH.shape[0], weight_VH.shape[0])
        ]
        log_prob_N, entropy_N, bracket_N = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.mark_non_differentiable(entropy_N, bracket_N)
        return log_prob_N, entropy_N, bracket_N

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor, *_: torch.Tensor) -> Any:
        hidden_NH, weight_VH, bias_V, targets_N = ctx.saved_tensors
        grad_hidden_NH = torch.empty_like(hidden_NH)
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=grad_N.dtype)
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=grad_N.dtype)
        for rows in _chunks(hidden_NH.shape[0], weight_VH.shape[0]):
            # d log p_a / d z = (e_a - p) / temperature
            delta_NV = -torch.softmax(_logits(hidden_NH[rows], weight_VH, bias_V, ctx.temperature), dim=-1)
            delta_NV.scatter_add_(-1, targets_N[rows].unsqueeze(-1), torch.ones_like(delta_NV[:, :1]))
            delta_NV.mul_((grad_N[rows] / ctx.temperature).unsqueeze(-1))
            grad_hidden_NH[rows] = (delta_NV.to(weight_VH.dtype) @ weight_VH).to(hidden_NH.dtype)
            grad_weight_VH += delta_NV.T @ hidden_NH[rows].to(delta_NV.dtype)
            if grad_bias_V is not None:
                grad_bias_V += delta_NV.sum(0)
        grad_bias = None if bias_V is None or grad_bias_V is None else grad_bias_V.to(bias_V.dtype)
        return grad_hidden_NH, grad_weight_VH.to(weight_VH.dtype), grad_bias, None, None


def _chunks(tokens: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size)]


def _logits(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    logits_NV = at_least_float32(nn.functional.linear(hidden_NH, weight_VH, bias_V))
    return logits_NV / temperature if temperature != 1.0 else logits_NV


class TargetStates:
    """Where a model's target logits come from: hidden states and an output layer applied to a few of them at a time.

    Architectures that scale or cap logits after the output layer have no such layer; their `states` are the logits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.plain = _has_plain_head(model)

    def states(self, token_ids_BL: torch.Tensor, predicts_BL: torch.Tensor) -> torch.Tensor:
        """[N, H] states that predict the target tokens; `predicts_BL` is the target mask shifted by one, [B, L-1]."""
        # Right padding and causal attention: no attention mask is needed.
        if self.plain:
            states_BLH = self._model.base_model(input_ids=token_ids_BL, use_cache=False).last_hidden_state
        else:
            states_BLH = self._model(input_ids=token_ids_BL, use_cache=False).logits
        states_NH: torch.Tensor = states_BLH[:, :-1][predicts_BL]
        return states_NH

    def logits(self, states_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] logits in float32 or better."""
        if not self.plain:
            return at_least_float32(states_NH)
        return _logits(states_NH, self.head.weight, self.head.bias, 1.0)

    @property
    def head(self) -> nn.Linear:
        """The output layer, where `plain`."""
        return cast(nn.Linear, self._model.get_output_embeddings())


class TokenScorer(nn.Module):
    """A causal language model that answers with scores of target tokens instead of logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._targets = TargetStates(model)

    def forward(
        self, token_ids_BL: torch.Tensor, target_mask_BL: torch.Tensor, temperature: float = 1.0
    ) -> TokenScores:
        """Scores of every target token under right-padded rows (data/batching.py).

        Args:
            temperature: divides the logits; the one that rollouts are sampled with.
        """
        predicts_BL = target_mask_BL[:, 1:]
        targets_N = token_ids_BL[:, 1:][predicts_BL]
        states_NH = self._targets.states(token_ids_BL, predicts_BL)
        if self._targets.plain:
            head = self._targets.head
            flat = _HeadScores.apply(  # type: ignore[no-untyped-call]
                states_NH, head.weight, head.bias, targets_N, temperature
            )
        else:
            token = logit_statistics(self._targets.logits(states_NH) / temperature, targets_N)
            flat = (token.log_prob, token.entropy.detach(), token.bracket.detach())
        where_BL = torch.zeros_like(target_mask_BL)
        where_BL[:, 1:] = predicts_BL
        return TokenScores(*(_spread(values_N, where_BL) for values_N in flat))


def _spread(values_N: torch.Tensor, where_BL: torch.Tensor) -> torch.Tensor:
    spread_BL = values_N.new_zeros(where_BL.shape)
    return spread_BL.masked_scatter(where_BL, values_N)


@torch.no_grad()
def _has_plain_head(model: PreTrainedModel) -> bool:
    """True when the logits are exactly the output layer applied to the last hidden state.

    Some architectures scale or cap logits afterwards; those take the slower path through the model's own forward.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    token_ids_BL = torch.arange(4, device=model.device).unsqueeze(0)
    hidden_BLH = model.base_model(input_ids=token_ids_BL, use_cache=False).last_hidden_state
    logits_BLV = model(input_ids=token_ids_BL, use_cache=False).logits
    return bool(torch.allclose(head(hidden_BLH).float(), logits_BLV.float(), rtol=1e-3, atol=1e-4))
