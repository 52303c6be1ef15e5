"""From rewards to token advantages: the estimator, then DynaMO's factors; all of a step's rollouts at once.

Letters: B rollouts, L tokens of the longest sequence, N prompts of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
import numpy.typing as npt
import torch

from dynamo_core.algorithms import advantages, entropy_methods, modulation
from dynamo_core.algorithms.effective_weights import Estimator, kappa
from dynamo_core.config.method import Critic, EntropyAdvantage
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.training.critic import Values
from dynamo_core.training.policy_update import PolicyBatch, aggregation_weights

_W_REINFORCE_POSITIVE: Final = {"w_reinforce": 0.1, "nsr": 0.0}


def _w_reinforce(positive: float) -> Estimator:
    def estimate(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
        return entropy_methods.w_reinforce(rewards, positive=positive).to(rewards.dtype)

    return estimate


_KAPPA: Final[dict[str, str | Estimator]] = {
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "posterior_std_grpo": "rloo",  # then divided by the posterior's std
    "reinforce_pp": lambda rewards, group: rewards,  # one baseline and one scale for all prompts: they cancel
    "gae": lambda rewards, group: rewards,  # the critic's baseline does not depend on this step's rewards
    **{name: _w_reinforce(positive) for name, positive in _W_REINFORCE_POSITIVE.items()},
}


@dataclass(frozen=True)
class PromptWeights:
    """Success rate, kappa and effective weight of the P prompts that were trained on, float64[P] each."""

    success_rate_P: torch.Tensor
    kappa_P: torch.Tensor
    weight_P: torch.Tensor


@dataclass(frozen=True)
class Credit:
    """Token advantages of a step, and what the critic should have said, [B, L] each."""

    advantages_BL: torch.Tensor
    returns_BL: torch.Tensor | None = None


def credit(
    stage: ReinforceStage,
    batch: PolicyBatch,
    variance_N: npt.NDArray[np.float64],
    *,
    values: Values | None = None,
    penalty_BL: torch.Tensor | None = None,
) -> Credit:
    """The estimator's advantage of each token.

    Args:
        variance_N: each prompt's reward variance by its history, before this step.
        values: of the critic, for estimator `gae`.
        penalty_BL: what is added to each token's reward (minus the KL to the reference); a rollout's sum of it where
            the estimator compares rollouts.
    """
    dtype = batch.old_log_prob_BL.dtype
    if stage.critic is not None and values is not None:
        bootstrap = stage.overlong == "bootstrap"
        advantages_BL, returns_BL = _gae(stage.critic, batch, values, penalty_BL, bootstrap=bootstrap)
        result = Credit(advantages_BL.to(dtype), returns_BL)
    else:
        rewards_B = batch.rewards_B
        if penalty_BL is not None:
            rewards_B = rewards_B + penalty_BL.sum(-1).to(rewards_B.dtype)
        advantages_B = _estimate(stage.estimator, replace(batch, rewards_B=rewards_B), variance_N)
        result = Credit(torch.where(batch.mask_BL, advantages_B.unsqueeze(-1).to(dtype), 0.0))
    method = stage.entropy_method
    if isinstance(method, EntropyAdvantage):
        changed_BL = entropy_methods.entropy_advantage(
            result.advantages_BL, batch.entropy_BL, batch.mask_BL, alpha=method.alpha, kappa=method.kappa
        )
        result = replace(result, advantages_BL=changed_BL)
    return result


def _gae(
    config: Critic, batch: PolicyBatch, values: Values, penalty_BL: torch.Tensor | None, *, bootstrap: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns) with the reward on each rollout's last token, whitened as the recipe says."""
    mask_BL = batch.mask_BL
    rewards_BL = torch.zeros_like(values.values_BL)
    kept_B = mask_BL.any(-1)
    last_B = mask_BL.shape[1] - 1 - mask_BL.flip(-1).int().argmax(-1)
    rewards_BL[kept_B, last_B[kept_B]] = batch.rewards_B[kept_B].to(rewards_BL.dtype)
    if penalty_BL is not None:
        rewards_BL += penalty_BL
    after_B = torch.where(batch.truncated_B, values.after_B, 0.0) if bootstrap else None
    advantages_BL, returns_BL = advantages.gae(
        rewards_BL, values.values_BL, mask_BL, gamma=config.gamma, lam=config.lam, bootstrap=after_B
    )
    if config.whiten != "none":
        weight_B = None
        if config.whiten == "prompts":
            _, row_B, size_P = torch.unique(batch.group_B, return_inverse=True, return_counts=True)
            weight_B = 1 / size_P[row_B].to(advantages_BL.dtype)
        advantages_BL = advantages.whiten(advantages_BL, mask_BL, weight=weight_B)
    return advantages_BL, returns_BL


def _estimate(estimator: str, batch: PolicyBatch, variance_N: npt.NDArray[np.float64]) -> torch.Tensor:
    """[B], by the estimator's own needs."""
    rewards_B, group_B = batch.rewards_B, batch.group_B
    if estimator == "reinforce_pp":
        return advantages.reinforce_pp(rewards_B, group_B, lengths=batch.mask_BL.sum(-1))
    if estimator == "posterior_std_grpo":
        variance_B = torch.from_numpy(variance_N)[group_B].to(rewards_B.dtype)
        return advantages.posterior_std_grpo(rewards_B, group_B, posterior_variance=variance_B)
    if estimator in _W_REINFORCE_POSITIVE:
        return _w_reinforce(_W_REINFORCE_POSITIVE[estimator])(rewards_B, group_B)
    return cast(torch.Tensor, advantages.ESTIMATORS[estimator](rewards_B, group_B))


def modulated(stage: ReinforceStage, batch: PolicyBatch, advantages_BL: torch.Tensor) -> torch.Tensor:
    """Advantages times the token factors, [B, L].

    Entropy and its change are those of the sampling policy (ratio 1, nothing clipped), over all of the step's
    rollouts: one scope, whatever the mini-batches, micro-batches and ranks.
    """
    config = stage.modulation
    if not (config.compensation or config.stabilisation):
        return advantages_BL
    constants = modulation.Modulation(
        alpha=config.alpha, lambda_min=config.lambda_min, gamma=config.gamma, tau=config.tau,
        normaliser=config.normaliser, compensation=config.compensation, stabilisation=config.stabilisation,
    )  # fmt: skip
    change_BL = _entropy_change(stage, batch, advantages_BL)
    return modulation.modulate(advantages_BL, batch.entropy_BL, change_BL, batch.mask_BL, config=constants)


def _entropy_change(stage: ReinforceStage, batch: PolicyBatch, advantages_BL: torch.Tensor) -> torch.Tensor:
    bracket_BL, old_BL = batch.bracket_BL, batch.old_log_prob_BL
    if stage.modulation.expectation == "sequence":
        bracket_BL = modulation.sequence_bracket(old_BL.exp() * (old_BL + batch.entropy_BL), batch.mask_BL)
    weight_BL = None
    if stage.aggregation != "token-mean":
        # Times the number of tokens: about 1 on average, as stabilisation's small constant expects.
        weight_BL = aggregation_weights(batch, stage, np.arange(len(batch.rows))) * int(batch.mask_BL.sum())
    return modulation.entropy_change_from_bracket(
        bracket_BL, old_BL, old_BL, advantages_BL, batch.mask_BL,
        eps_low=stage.loss.eps_low, eps_high=stage.loss.eps_high, weight=weight_BL,
    )  # fmt: skip


def prompt_weights(
    stage: ReinforceStage,
    batch: PolicyBatch,
    success_rate_N: npt.NDArray[np.float64],
    variance_N: npt.NDArray[np.float64],
) -> PromptWeights:
    """How much each prompt of the step really weighs (algorithms/effective_weights.py).

    A rollout weighs what each of its tokens does, since its score is their sum: under `token-mean` every rollout
    alike, under `prompt-mean-token-sum-norm` every prompt alike. Denominators are those of one mini-batch holding the
    whole step; kappa is exact for binary rewards on policy and leaves out clipping and modulation.

    Args:
        success_rate_N, variance_N: each prompt's posterior mean of p, and the variance that `credit` was given.
    """
    weights_BL = aggregation_weights(batch, stage, np.arange(len(batch.rows)))
    prompts, row_B = torch.unique(batch.group_B, return_inverse=True)
    share_P = torch.zeros(len(prompts), dtype=weights_BL.dtype).index_add(0, row_B, weights_BL.amax(-1))
    n_P = torch.bincount(row_B)
    p_P = torch.from_numpy(success_rate_N)[prompts]
    kappa_P = torch.zeros_like(p_P)
    for n in n_P.unique().tolist():
        here = n_P == n
        kappa_P[here] = kappa(p_P[here], n, _KAPPA[stage.estimator])
    if stage.estimator == "posterior_std_grpo":
        kappa_P /= torch.from_numpy(variance_N)[prompts].sqrt()
    return PromptWeights(p_P, kappa_P, kappa_P * share_P * (len(prompts) / share_P.sum()))
