"""What one step of reinforce reports: metrics, the allocation table and a few samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dynamo_core.algorithms import effective_weights, modulation
from dynamo_core.rollout.collector import ScoredRollout
from dynamo_core.training.credit import PromptWeights
from dynamo_core.training.policy_update import PolicyBatch, UpdateReport

SAMPLES_A_STEP = 4


@dataclass(frozen=True)
class StepReport:
    """Everything a step produced; the methods only read it."""

    step: int
    prompt_ids: Sequence[str]
    variance: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    scored: Sequence[ScoredRollout]
    batch: PolicyBatch
    credit_BL: torch.Tensor
    advantages_BL: torch.Tensor
    updated: UpdateReport
    weights: PromptWeights

    def values(self) -> dict[str, float]:
        """Metrics that two runs of one recipe share."""
        return {
            **self._rewards(),
            **self._allocation(),
            **self._rollouts(),
            **self._effective_weights(),
            **{
                f"modulation/{name}": value
                for name, value in modulation.modulation_metrics(
                    self.credit_BL, self.advantages_BL, self.batch.mask_BL
                ).items()
            },
            **self.updated.values,
        }

    def timings(self, started: float, collected: float, ended: float) -> dict[str, float]:
        """Seconds by phase and tokens/s; `padding_share` depends on ranks and micro-batches, so it stands here."""
        generated = sum(len(item.rollout.response_token_ids) for item in self.scored)
        return {
            "seconds/step": ended - started,
            "seconds/collect": collected - started,
            "seconds/update": ended - collected,
            "tokens_per_second": generated / (collected - started),
            "padding_share": self.updated.padding_share,
        }

    def _rewards(self) -> dict[str, float]:
        scores = [item.verdict.score for item in self.scored if item.verdict.score is not None]
        correct = [item.verdict.correct for item in self.scored if item.verdict.correct is not None]
        # Rollouts follow need, so their mean is not the policy's pass rate: prompts weigh equally here.
        per_prompt = [np.mean(values) for values in self._correct_by_prompt().values() if values]
        return {
            "reward/mean": float(np.mean(scores)),
            "reward/correct": float(np.mean(correct)),
            "reward/prompt_mean_correct": float(np.mean(per_prompt)),
            "reward/unscored": float(len(self.scored) - len(scores)),
        }

    def _allocation(self) -> dict[str, float]:
        groups = self._correct_by_prompt()
        dead = [prompt_id for prompt_id, values in groups.items() if len(set(values)) < 2]
        size = dict(zip(self.prompt_ids, self.counts.tolist(), strict=True))
        uniform = self.variance.sum() * len(self.counts) / self.counts.sum()
        return {
            "allocation/budget": float(self.counts.sum()),
            "allocation/min": float(self.counts.min()),
            "allocation/max": float(self.counts.max()),
            "allocation/std": float(self.counts.std()),
            "allocation/variance_ratio": float((self.variance / self.counts).sum() / uniform),
            "allocation/zero_variance_groups": len(dead) / len(groups),
            "allocation/wasted_rollouts": sum(size[prompt_id] for prompt_id in dead) / float(self.counts.sum()),
        }

    def _rollouts(self) -> dict[str, float]:
        rollouts = [item.rollout for item in self.scored]
        mask_BL = self.batch.mask_BL
        return {
            "rollout/tokens": float(np.mean([len(rollout.response_token_ids) for rollout in rollouts])),
            "rollout/truncated_share": float(np.mean([rollout.truncated for rollout in rollouts])),
            "rollout/near_edge_draws": float(sum(rollout.near_edge_draws for rollout in rollouts)),
            "policy/entropy": float(self.batch.entropy_BL[mask_BL].mean()),
        }

    def _effective_weights(self) -> dict[str, float]:
        """By band of success rate; the weights of two methods compare within a run, not between (a scale is free)."""
        weights = self.weights
        by_band = effective_weights.by_band(weights.success_rate_P, weights.weight_P)
        return {
            **{f"effective_weight/p_{band}": value for band, value in by_band.items()},
            "effective_weight/kappa_mean": float(weights.kappa_P.mean()),
            "effective_weight/kappa_min": float(weights.kappa_P.min()),
            "effective_weight/kappa_max": float(weights.kappa_P.max()),
        }

    def _correct_by_prompt(self) -> Mapping[str, list[bool]]:
        found: dict[str, list[bool]] = {prompt_id: [] for prompt_id in self.prompt_ids}
        for item in self.scored:
            if item.verdict.correct is not None:
                found[item.rollout.prompt_id].append(item.verdict.correct)
        return found

    def allocation_rows(self) -> list[dict[str, Any]]:
        """One row a prompt."""
        correct = self._correct_by_prompt()
        return [
            {
                "step": self.step,
                "prompt_id": prompt_id,
                "n": int(n),
                "correct": sum(correct[prompt_id]),
                "scored": len(correct[prompt_id]),
                "variance": float(c),
            }
            for prompt_id, n, c in zip(self.prompt_ids, self.counts, self.variance, strict=True)
        ]

    def sample_rows(self) -> list[dict[str, Any]]:
        """A few rollouts, spread over the step."""
        stride = max(1, len(self.scored) // SAMPLES_A_STEP)
        return [
            {
                "step": self.step,
                "prompt_id": item.rollout.prompt_id,
                "rollout": item.rollout.rollout,
                "completion": item.completion,
                "score": item.verdict.score,
                "correct": item.verdict.correct,
                "reason": item.verdict.reason,
                "finish_reason": item.rollout.finish_reason.value,
                "tokens": len(item.rollout.response_token_ids),
            }
            for item in self.scored[::stride][:SAMPLES_A_STEP]
        ]
