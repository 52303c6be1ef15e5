"""Log-probability, entropy and entropy-change bracket of target tokens, in one pass over the model.

The formulas are those of algorithms/logit_statistics.py, on logits divided by the rollout temperature. Only
hidden states of target tokens reach the output layer (head_scores.py): no [B, L, V] tensor ever exists. Reductions are
in float32 or better.
Letters: B rows, L tokens of a row, N target tokens of the batch, H width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dynamo_core.algorithms.checks import at_least_float32
from dynamo_core.algorithms.logit_statistics import logit_statistics
from dynamo_core.config.stage_base import Batching
from dynamo_core.data.batching import TokenRow
from dynamo_core.data.packing import LaidOut, lay_out
from dynamo_core.errors import RecipeError
from dynamo_core.training.head_scores import HeadScores


class TokenScores(NamedTuple):
    """All [B, L], float32 or better, zero where a token is no target. The bracket carries no gradient.

    A tuple, because DeepSpeed looks for tensors to hook in tuples, lists and dicts only.
    """

    log_prob_BL: torch.Tensor
    entropy_BL: torch.Tensor
    bracket_BL: torch.Tensor


def positions(position_BL: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A model's argument for packed rows; none for padded ones."""
    return {} if position_BL is None else {"position_ids": position_BL}


@torch.no_grad()
def require_packing(model: PreTrainedModel, batching: Batching) -> None:
    """Two rows packed into one line must score as each does alone.

    Raises:
        RecipeError: packed rows are wanted, and this model lets them see each other.
    """
    if batching == "padded":
        return
    first, second = TokenRow((3, 2, 1, 2, 3), (False, *(True,) * 4)), TokenRow((1, 3, 3, 1), (False, *(True,) * 3))
    joined = TokenRow(first.token_ids + second.token_ids, first.target_mask + second.target_mask)
    longer = TokenRow(joined.token_ids, (False,) * len(joined.token_ids))
    training = model.training
    scorer = TokenScorer(model.eval())
    try:
        alone_N = _log_probs(scorer, lay_out([first, second], packed=False))
        seen_N = _log_probs(scorer, lay_out([joined], packed=False))
        packed_N = _log_probs(scorer, lay_out([first, second, longer], packed=True))
        apart = bool((packed_N - alone_N).norm() <= 0.1 * (seen_N - alone_N).norm())
    except TypeError:  # no argument of that name
        apart = False
    finally:
        model.train(training)
    if not apart:
        raise RecipeError(
            f"a {type(model).__name__} does not keep rows apart that are packed into one line", "use batching: padded"
        )


def _log_probs(scorer: TokenScorer, rows: LaidOut) -> torch.Tensor:
    rows = rows.to(scorer.model.device)
    scores = scorer(rows.token_ids_PC, rows.target_mask_PC, 1.0, rows.position_PC)
    log_prob_BL: torch.Tensor = rows.by_sequence(scores.log_prob_BL)
    return log_prob_BL[rows.by_sequence(rows.target_mask_PC)]


class TargetStates:
    """Where a model's target logits come from: hidden states and an output layer applied to a few of them at a time.

    Architectures that scale or cap logits after the output layer have no such layer; their `states` are the logits.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.plain = _has_plain_head(model)

    def states(
        self, token_ids_BL: torch.Tensor, predicts_BL: torch.Tensor, position_BL: torch.Tensor | None
    ) -> torch.Tensor:
        """[N, H] states that predict the target tokens; `predicts_BL` is the target mask shifted by one, [B, L-1]."""
        # Right padding and causal attention: no attention mask is needed.
        inputs = {"input_ids": token_ids_BL, "use_cache": False, **positions(position_BL)}
        states_BLH = self._model.base_model(**inputs).last_hidden_state if self.plain else self._model(**inputs).logits
        states_NH: torch.Tensor = states_BLH[:, :-1][predicts_BL]
        return states_NH

    def logits(self, states_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] logits in float32 or better."""
        if not self.plain:
            return at_least_float32(states_NH)
        return at_least_float32(self.head(states_NH))

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

    def external_parameters(self) -> list[nn.Parameter]:
        """What `forward` reads without calling its owner: the output layer's own."""
        if not self._targets.plain:
            return []
        return list(self._targets.head.parameters(recurse=False))

    def forward(
        self,
        token_ids_BL: torch.Tensor,
        target_mask_BL: torch.Tensor,
        temperature: float = 1.0,
        position_BL: torch.Tensor | None = None,
    ) -> TokenScores:
        """Scores of every target token under right-padded rows (data/batching.py) or packed ones (data/packing.py).

        Args:
            temperature: divides the logits; the one that rollouts are sampled with.
            position_BL: of packed rows.
        """
        predicts_BL = target_mask_BL[:, 1:]
        targets_N = token_ids_BL[:, 1:][predicts_BL]
        states_NH = self._targets.states(token_ids_BL, predicts_BL, position_BL)
        if self._targets.plain:
            head = self._targets.head
            flat = HeadScores.apply(  # type: ignore[no-untyped-call]
                states_NH, head.weight, head.bias, targets_N, temperature
            )
        else:
            token = logit_statistics(self._targets.logits(states_NH) / temperature, targets_N)
            flat = (token.log_prob, token.entropy, token.bracket.detach())
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
