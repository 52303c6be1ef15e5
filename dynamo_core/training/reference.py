"""The reference: the frozen model that a KL penalty pulls towards, and the penalty's coefficient."""

from __future__ import annotations

from typing import Any

import torch

from dynamo_core.algorithms import kl
from dynamo_core.config.method import Kl
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.objective import KlTerm
from dynamo_core.training.policy import TokenScorer
from dynamo_core.training.policy_update import PolicyBatch
from dynamo_core.training.scoring import score_rows


class Reference:
    """Scores a step's rollouts and keeps the coefficient, which belongs in checkpoints."""

    def __init__(self, scorer: TokenScorer, config: Kl, ranks: Ranks, *, temperature: float, size: int) -> None:
        """
        Args:
            scorer: of the frozen model.
            temperature: the one that rollouts are sampled with: it divides logits on every log-prob path.
            size: rows scored at once.
        """
        self._scorer = scorer
        self._config = config
        self._ranks = ranks
        self._temperature = temperature
        self._size = size
        self._controller: kl.FixedController = (
            kl.FixedController(config.coefficient)
            if config.target is None
            else kl.AdaptiveController(config.coefficient, target=config.target, horizon=config.horizon)
        )

    def log_probs(self, batch: PolicyBatch) -> torch.Tensor:
        """The reference's log-prob of every target token, [B, L]."""

        def compute(token_ids_BL: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
            scores_BL: torch.Tensor = self._scorer(token_ids_BL, mask_BL, self._temperature).log_prob_BL
            return scores_BL

        return score_rows(compute, batch.rows, self._size, self._ranks)

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
