"""The preference loss on pairs of token rows, against a frozen copy of the model as it was."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynamo_core.algorithms.preference import dpo_loss, dpo_metrics, implicit_reward
from dynamo_core.data.batching import TokenRow, pad_rows
from dynamo_core.data.templates import encode_demonstration, encode_prompt
from dynamo_core.errors import DataError
from dynamo_core.training.policy import TokenScorer
from dynamo_core.training.supervised import Collation, EncodedRows, Loss
from dynamo_core.types import Message, PreferencePair


@dataclass(frozen=True)
class TokenPair:
    """Two answers to one prompt, each behind the prompt; only answers are targets."""

    chosen: TokenRow
    rejected: TokenRow


class PreferenceLoss(Loss):
    """Sigmoid DPO with label smoothing. The reference is the model as it is now."""

    parts = ("preference/margin", "preference/accuracy", "preference/chosen_reward", "preference/rejected_reward")

    def __init__(self, model: PreTrainedModel, *, beta: float, label_smoothing: float) -> None:
        super().__init__()
        self.model = model
        frozen = copy.deepcopy(model).eval().requires_grad_(False)
        # In a tuple: the policy's parameters are the model's own, and the reference's are no part of what is trained.
        self._scorers = (TokenScorer(model), TokenScorer(frozen))
        self._beta = beta
        self._label_smoothing = label_smoothing

    def external_parameters(self) -> list[nn.Parameter]:
        """Those of the policy's scorer."""
        return self._scorers[0].external_parameters()

    def forward(
        self, token_ids_BL: torch.Tensor, target_mask_BL: torch.Tensor, weights_P: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """(loss, *parts), scalars, of B = 2P rows: the chosen of all pairs, then the rejected in the same order.

        Args:
            weights_P: of pairs; they carry the denominator.
        """
        policy, reference = self._scorers
        policy_B = policy(token_ids_BL, target_mask_BL).log_prob_BL.sum(-1)
        with torch.no_grad():
            reference_B = reference(token_ids_BL, target_mask_BL).log_prob_BL.sum(-1)
        chosen_P, rejected_P = (
            implicit_reward(ours_P, frozen_P, weights_P, beta=self._beta)
            for ours_P, frozen_P in zip(policy_B.chunk(2), reference_B.chunk(2), strict=True)
        )
        loss = dpo_loss(chosen_P, rejected_P, weights_P, label_smoothing=self._label_smoothing)
        metrics = dpo_metrics(chosen_P, rejected_P, weights_P)
        return loss, *(metrics[name.removeprefix("preference/")] for name in self.parts)


def _pair_inputs(pairs: Sequence[TokenPair], denominator: float) -> tuple[torch.Tensor, ...]:
    batch = pad_rows([*(pair.chosen for pair in pairs), *(pair.rejected for pair in pairs)])
    return batch.token_ids_BL, batch.target_mask_BL, torch.ones(len(pairs)) / denominator


PAIRS: Final = Collation[TokenPair](
    length=lambda pair: len(pair.chosen.token_ids) + len(pair.rejected.token_ids),
    count=lambda pair: 1,
    inputs=_pair_inputs,
)
"""Every pair counts the same."""


def encode_pairs(
    tokenizer: PreTrainedTokenizerBase, pairs: Sequence[PreferencePair], max_length: int
) -> EncodedRows[TokenPair]:
    """Encode pairs; only the tokens of the two answers are targets, their ends of turn included.

    Raises:
        DataError: every pair has a row longer than `max_length`.
    """
    encoded = EncodedRows[TokenPair]()
    for pair in pairs:
        chosen, rejected = (_encode(tokenizer, pair.messages, text) for text in (pair.chosen, pair.rejected))
        if max(len(chosen.token_ids), len(rejected.token_ids)) > max_length:
            encoded.too_long.append(pair.prompt_id)
        else:
            encoded.rows.append(TokenPair(chosen, rejected))
            encoded.prompt_ids.append(pair.prompt_id)
    if not encoded.rows:
        raise DataError(f"all {len(pairs)} preference pairs are longer than max_length {max_length} tokens")
    return encoded


def _encode(tokenizer: PreTrainedTokenizerBase, messages: tuple[Message, ...], answer: str) -> TokenRow:
    whole = encode_demonstration(tokenizer, (*messages, Message("assistant", answer)))
    prompt = len(encode_prompt(tokenizer, messages))
    # Assistant turns inside the prompt are targets of a demonstration, not of a pair.
    return TokenRow(whole.token_ids, (False,) * prompt + whole.loss_mask[prompt:])
