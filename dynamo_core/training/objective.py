"""What a micro-batch adds to the loss: the policy loss and whatever else the recipe switches on, one weight a token.

Letters: B rows, L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dynamo_core.algorithms import entropy_methods, kl, losses
from dynamo_core.config.method import ClipCov, EntropyMethod, ForkTokens, KlCov, PolicyLoss


@dataclass(frozen=True)
class TokenTerms:
    """The constants of every token's loss, [B, L]: advantage, sampling log-prob, weights, tokens that pay a penalty.

    `reference_BL` is the reference's log-prob, where the loss has a KL term.
    """

    advantages_BL: torch.Tensor
    old_log_prob_BL: torch.Tensor
    weights_BL: torch.Tensor
    penalised_BL: torch.Tensor  # bool
    reference_BL: torch.Tensor | None = None

    def rows(self, picked: torch.Tensor, width: int, device: torch.device) -> TokenTerms:
        """Those of some rows, cut to `width` tokens."""

        def part(values_BL: torch.Tensor) -> torch.Tensor:
            return values_BL[picked, :width].to(device)

        return TokenTerms(
            part(self.advantages_BL),
            part(self.old_log_prob_BL),
            part(self.weights_BL),
            part(self.penalised_BL),
            None if self.reference_BL is None else part(self.reference_BL),
        )


def token_terms(
    method: EntropyMethod | None,
    advantages_BL: torch.Tensor,
    old_log_prob_BL: torch.Tensor,
    entropy_BL: torch.Tensor,
    weights_BL: torch.Tensor,
    *,
    seed: int,
) -> TokenTerms:
    """The terms of a mini-batch; tokens of weight 0 are not part of it.

    Entropy methods choose their tokens at the sampling policy, over the whole mini-batch: the choice does not depend
    on micro-batches and ranks. Denominators stay: a dropped token still counts in them.
    """
    inside_BL = weights_BL != 0
    penalised_BL = torch.zeros_like(inside_BL)
    if isinstance(method, ClipCov):
        keep_BL = entropy_methods.clip_cov(
            old_log_prob_BL, advantages_BL, inside_BL, share=method.share, low=method.low, high=method.high,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        weights_BL = torch.where(keep_BL, weights_BL, 0.0)
    elif isinstance(method, ForkTokens):
        keep_BL = entropy_methods.fork_tokens(entropy_BL, inside_BL, share=method.share)
        weights_BL = torch.where(keep_BL, weights_BL, 0.0)
    elif isinstance(method, KlCov):
        penalised_BL = entropy_methods.kl_cov(old_log_prob_BL, advantages_BL, inside_BL, share=method.share)
    return TokenTerms(advantages_BL, old_log_prob_BL, weights_BL, penalised_BL)


@dataclass(frozen=True)
class KlTerm:
    """The KL part of the loss: which estimate, and its present coefficient."""

    kind: str
    coefficient: float


@dataclass(frozen=True)
class Objective:
    """The parts of the loss that a recipe switches on."""

    loss: PolicyLoss
    method: EntropyMethod | None = None
    kl: KlTerm | None = None

    @property
    def needs_every_row(self) -> bool:
        """False when a row without advantage has no gradient."""
        return self.loss.entropy_coefficient > 0 or self.kl is not None or isinstance(self.method, KlCov)

    def __call__(self, log_prob_BL: torch.Tensor, entropy_BL: torch.Tensor, terms: TokenTerms) -> torch.Tensor:
        """The weighted sum of all terms, scalar."""
        total = _policy_loss(self.loss, log_prob_BL, terms)
        weights_BL, old_BL = terms.weights_BL, terms.old_log_prob_BL
        if self.loss.entropy_coefficient:
            total = total + losses.entropy_bonus(entropy_BL, weights_BL, coefficient=self.loss.entropy_coefficient)
        if isinstance(self.method, KlCov):
            total = total + entropy_methods.kl_cov_penalty(
                log_prob_BL, old_BL, weights_BL, terms.penalised_BL, coefficient=self.method.coefficient
            )
        if self.kl is not None and terms.reference_BL is not None:
            total = total + self.kl.coefficient * kl.loss(
                log_prob_BL, terms.reference_BL, weights_BL, kind=self.kl.kind, old_log_prob=old_BL
            )
        return total


def _policy_loss(loss: PolicyLoss, log_prob_BL: torch.Tensor, terms: TokenTerms) -> torch.Tensor:
    old_BL, advantages_BL, weights_BL = terms.old_log_prob_BL, terms.advantages_BL, terms.weights_BL
    low, high = loss.eps_low, loss.eps_high
    if loss.type == "gspo":
        return losses.gspo_loss(log_prob_BL, old_BL, advantages_BL, weights_BL, eps_low=low, eps_high=high)
    if loss.type == "cispo":
        return losses.cispo_loss(log_prob_BL, old_BL, advantages_BL, weights_BL, eps_low=low, eps_high=high)
    return losses.policy_loss(
        log_prob_BL, old_BL, advantages_BL, weights_BL, eps_low=low, eps_high=high, dual_clip=loss.dual_clip
    )


def clip_metrics(
    loss: PolicyLoss, log_prob_BL: torch.Tensor, terms: TokenTerms, token_mean_BL: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Token means by `token_mean_BL`; under gspo the ratio is the sequence's, as in its loss."""
    old_BL = terms.old_log_prob_BL
    if loss.type == "gspo":
        mean_B1 = losses.sequence_log_ratio(log_prob_BL, old_BL, terms.weights_BL != 0).unsqueeze(-1)
        log_prob_BL = old_BL + mean_B1
    return losses.clip_metrics(
        log_prob_BL, old_BL, terms.advantages_BL, token_mean_BL,
        eps_low=loss.eps_low, eps_high=loss.eps_high, dual_clip=loss.dual_clip,
    )  # fmt: skip
