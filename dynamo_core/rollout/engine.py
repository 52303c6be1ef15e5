"""The seam between the trainer and whatever samples answers, and a scripted engine for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from dynamo_core.types import FinishReason, Rollout, RolloutRequest, Segment


class RolloutEngine(Protocol):
    """Samples answers.

    Contract: the rollouts of request i come in its order, `n` of them, numbered from `first_rollout`, each carrying
    the request's `prompt_id`; no result depends on which requests are answered together, nor on ranks, unless a draw
    falls within rounding of an edge of the cumulative distribution (counted in `near_edge_draws`).
    """

    weight_version: int
    """Stamped on every rollout; the trainer raises it after each update."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """All rollouts of all requests."""
        ...


class ScriptedEngine:
    """Answers from a function instead of a model: `script(request, rollout) -> response token ids`."""

    def __init__(self, script: Callable[[RolloutRequest, int], Sequence[int]], log_prob: float = -1.0) -> None:
        self._script = script
        self._log_prob = log_prob
        self.weight_version = 0

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """One segment a rollout, every token with the same log-probability."""
        return [
            self._rollout(request, rollout)
            for request in requests
            for rollout in range(request.first_rollout, request.first_rollout + request.n)
        ]

    def _rollout(self, request: RolloutRequest, rollout: int) -> Rollout:
        tokens = tuple(self._script(request, rollout))[: request.sampling.max_new_tokens]
        size = len(tokens)
        segment = Segment(
            token_ids=tokens,
            loss_mask=np.ones(size, dtype=np.bool_),
            log_probs=np.full(size, self._log_prob, dtype=np.float32),
            entropies=np.ones(size, dtype=np.float32),
            brackets=np.zeros(size, dtype=np.float32),
        )
        cut = size == request.sampling.max_new_tokens
        return Rollout(
            prompt_id=request.prompt_id,
            rollout=rollout,
            prompt_token_ids=request.prompt_token_ids,
            segments=(segment,),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.EOS,
            weight_version=self.weight_version,
        )
