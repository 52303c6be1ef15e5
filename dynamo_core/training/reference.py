"""The reference: the starting model, which a KL penalty pulls towards, and the penalty's coefficient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynamo_core.algorithms import kl
from dynamo_core.config.method import Kl
from dynamo_core.data.packing import LaidOut
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.lora import adapters_off
from dynamo_core.training.objective import KlTerm
from dynamo_core.training.policy import TokenScorer, TokenScores
from dynamo_core.training.policy_update import PolicyBatch
from dynamo_core.training.scoring import score_rows

Scorer = Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor | None], TokenScores]
"""(token_ids_BL, target_mask_BL, temperature, position_BL of packed rows) -> scores."""


class WithoutAdapters:
    """Scores of the policy's own base, so that no frozen copy of it is needed."""

    def __init__(self, scorer: TokenScorer) -> None:
        self._scorer = scorer

    def __call__(
        self,
        token_ids_BL: torch.Tensor,
        target_mask_BL: torch.Tensor,
        temperature: float,
        position_BL: torch.Tensor | None,
    ) -> TokenScores:
        """Like the scorer, its model's adapters switched off meanwhile."""
        with adapters_off(self._scorer.model):
            scores: TokenScores = self._scorer(token_ids_BL, target_mask_BL, temperature, position_BL)
            return scores


class Reference:
    """Scores a step's rollouts and keeps the coefficient, which belongs in checkpoints."""

    def __init__(
        self, scorer: Scorer, config: Kl, ranks: Ranks, *, temperature: float, size: int, packed: bool
    ) -> None:
        """
        Args:
            scorer: of a model that never changes.
            temperature: the one that rollouts are sampled with: it divides logits on every log-prob path.
            size: rows scored at once.
            packed: how they stand in a batch.
        """
        self._scorer = scorer
        self._config = config
        self._ranks = ranks
        self._temperature = temperature
        self._size = size
        self._packed = packed
        self._controller: kl.FixedController = (
            kl.FixedController(config.coefficient)
            if config.target is None
            else kl.AdaptiveController(config.coefficient, target=config.target, horizon=config.horizon)
        )

    def log_probs(self, batch: PolicyBatch) -> torch.Tensor:
        """The reference's log-prob of every target token, [B, L]."""

        def compute(rows: LaidOut) -> torch.Tensor:
            scores = self._scorer(rows.token_ids_PC, rows.target_mask_PC, self._temperature, rows.position_PC)
            return scores.log_prob_BL

        return score_rows(compute, batch.rows, self._size, self._ranks, packed=self._packed)

    def penalty(self, batch: PolicyBatch, reference_BL: torch.Tensor) -> torch.Tensor | None:
        """What each token's reward loses, [B, L]; None where the penalty is in the loss."""
        if self._config.place != "reward":
            return None
        return kl.reward_penalty(
            batch.old_log_prob_BL, reference_BL, batch.mask_BL,
            coefficient=self._controller.coefficient, kind=self._config.kind,
        )  # fmt: skip

    @property
    def term(self) -> KlTerm | None:
        """The part of the loss; None where the penalty is in the reward."""
        return KlTerm(self._config.kind, self._controller.coefficient) if self._config.place == "loss" else None

    def observe(self, batch: PolicyBatch, reference_BL: torch.Tensor) -> dict[str, float]:
        """Move the coefficient, once a step, by the mean KL over all ranks; returns what there is to report."""
        estimate_BL = kl.estimate(batch.old_log_prob_BL, reference_BL, "k3")
        mean = float(estimate_BL[batch.mask_BL].mean())
        used = self._controller.coefficient
        self._controller.update(mean, len(batch.rows))
        return {"kl/reference": mean, "kl/coefficient": used}

    def state_dict(self) -> dict[str, Any]:
        """The coefficient."""
        return self._controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with it."""
        self._controller.load_state_dict(state)
