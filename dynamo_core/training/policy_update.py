"""The policy update: a step's rollouts in mini-batches of whole prompts, one optimizer step each.

Every rank holds the whole step, so aggregation weights and modulation are global by construction; ranks differ only
in the rows they run forward and backward.
Letters: B rollouts, L tokens of the longest sequence (prompt and response), columns as in data/batching.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import numpy.typing as npt
import torch

from dynamo_core.algorithms import losses
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.data.batching import TokenRow, micro_batches
from dynamo_core.data.packing import lay_out
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.gates import ratio_gates
from dynamo_core.training.objective import Objective, TokenTerms, clip_metrics, token_terms


@dataclass(frozen=True)
class PolicyBatch:
    """All scorable rollouts of one step. [B, L] arrays are zero outside the policy's own tokens."""

    rows: Sequence[TokenRow]
    group_B: torch.Tensor  # int64: the prompt's place in the step
    rewards_B: torch.Tensor
    mask_BL: torch.Tensor  # bool
    old_log_prob_BL: torch.Tensor
    entropy_BL: torch.Tensor
    bracket_BL: torch.Tensor
    truncated_B: torch.Tensor  # bool: cut off at max_new_tokens
    prompt_ids: Sequence[str] = ()  # of the step, by group; for messages

    def prompts_of(self, rows: npt.NDArray[np.int64]) -> list[str]:
        """The prompt ids of some rows."""
        return [self.prompt_ids[int(group)] for group in self.group_B[rows]] if self.prompt_ids else []

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row, prompt included."""
        return np.array([len(row.token_ids) for row in self.rows], dtype=np.int64)


@dataclass(frozen=True)
class UpdateReport:
    """Means over the optimizer steps that were taken for one rollout step."""

    values: dict[str, float]
    padding_share: float


def aggregation_weights(batch: PolicyBatch, stage: ReinforceStage, rows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Token weights [len(rows), L] of the mini-batch `rows`: its only denominator, over all ranks."""
    return losses.aggregation_weights(
        batch.mask_BL[rows],
        batch.group_B[rows],
        aggregation=stage.aggregation,
        horizon=stage.sampling.max_new_tokens if stage.aggregation.endswith("-norm") else None,
    )


def mini_batches(batch: PolicyBatch, stage: ReinforceStage) -> Iterator[npt.NDArray[np.int64]]:
    """Row indices of each mini-batch: equally many whole prompts, in the step's order."""
    prompts = stage.prompts_per_step // stage.updates_per_step
    part_B = (batch.group_B // prompts).numpy()
    for part in range(stage.updates_per_step):
        yield np.flatnonzero(part_B == part)


def update(
    engine: TrainingEngine,
    batch: PolicyBatch,
    advantages_BL: torch.Tensor,
    stage: ReinforceStage,
    ranks: Ranks,
    *,
    objective: Objective,
    seed: Sequence[int],
    reference_BL: torch.Tensor | None = None,
    first: bool = False,
) -> UpdateReport:
    """`stage.updates_per_step` optimizer steps on `batch`, fewer where the policy moves past `stage.target_kl`.

    Args:
        objective: what is minimised.
        reference_BL: the reference's log-prob of each token, for a KL term in the loss.
        seed: numbers that name this step; for what is drawn at random (the tokens that Clip-Cov drops).
        first: the policy's first update ever: its ratio gate must hold.

    Raises:
        NumericalFailure: a non-finite loss or gradient, or a gate that does not hold.
    """
    totals: dict[str, float] = {}
    gates: dict[str, float] = {}
    taken = skipped = cells = real = 0
    moved = False
    seeds = np.random.SeedSequence(list(seed)).generate_state(stage.updates_per_step).tolist()
    for part, rows in enumerate(mini_batches(batch, stage)):
        if not batch.mask_BL[rows].any():  # none of its rollouts could be scored or kept, which all ranks see alike
            continue
        terms = replace(_terms(batch, stage, rows, advantages_BL, seeds[part]), reference_BL=reference_BL)
        active = _active(rows, terms, objective)
        arrays = _Arrays(batch, terms, objective, tokens=int(batch.mask_BL[active].sum()))
        sums = dict.fromkeys(("policy/loss", *_CLIP_METRICS, *_OFF_POLICY), 0.0)
        for chosen in micro_batches(
            batch.lengths[active].tolist(), stage.micro_batch_size, ranks.rank, ranks.world_size
        ):
            cells += _micro_step(engine, arrays, stage, active[chosen], sums)
            real += int(batch.lengths[active[chosen]].sum())
        values = dict(zip(sums, ranks.sum(list(sums.values())), strict=True))
        off_by, off_by_log = (values.pop(name) for name in _OFF_POLICY)
        if first and not gates and not moved and arrays.tokens:
            gates = ratio_gates(off_by, off_by_log, stage.engine.precision, step=seed[-1])
        done = engine.step(sums["policy/loss"])
        moved |= done.update_rms > 0
        values.update({"policy/grad_norm": done.grad_norm, "policy/lr": done.lr, "policy/update_rms": done.update_rms})
        totals = {name: totals.get(name, 0.0) + value for name, value in values.items()}
        taken += 1
        if stage.target_kl is not None and values["policy/approx_kl"] > stage.target_kl:
            skipped = stage.updates_per_step - part - 1
            break
    means = {name: total / taken for name, total in totals.items()}
    if stage.target_kl is not None:
        means["policy/skipped_updates"] = float(skipped)
    cells_all, real_all = ranks.sum([cells, real])
    return UpdateReport({**means, **gates}, 1 - real_all / cells_all if cells_all else 0.0)


_OFF_POLICY = ("off_by", "off_by_log")
"""Token means of |ratio - 1| and |log ratio|."""
_CLIP_METRICS = tuple(f"policy/{name}" for name in ("clipfrac", "dual_clipfrac", "ppo_kl", "approx_kl", "ratio"))


def _terms(
    batch: PolicyBatch, stage: ReinforceStage, rows: npt.NDArray[np.int64], advantages_BL: torch.Tensor, seed: int
) -> TokenTerms:
    """Of the mini-batch `rows`, spread over the step's rows; weights are 0 elsewhere."""
    weights_BL = torch.zeros_like(advantages_BL)
    weights_BL[rows] = aggregation_weights(batch, stage, rows).to(weights_BL.dtype)
    return token_terms(
        stage.entropy_method, advantages_BL, batch.old_log_prob_BL, batch.entropy_BL, weights_BL, seed=seed
    )


def _active(rows: npt.NDArray[np.int64], terms: TokenTerms, objective: Objective) -> npt.NDArray[np.int64]:
    """The rows of a mini-batch that have a gradient; denominators count the others too."""
    acts_BL = terms.weights_BL[rows] != 0
    if not objective.needs_every_row:
        acts_BL &= terms.advantages_BL[rows] != 0
    active: npt.NDArray[np.int64] = rows[acts_BL.any(-1).numpy()]
    return active


@dataclass(frozen=True)
class _Arrays:
    """What a mini-batch's micro-batches pick rows from."""

    batch: PolicyBatch
    terms: TokenTerms
    objective: Objective
    tokens: int
    """Tokens of all active rows, over all ranks: the denominator of the clip metrics."""


def _micro_step(
    engine: TrainingEngine,
    arrays: _Arrays,
    stage: ReinforceStage,
    picked: npt.NDArray[np.int64],
    sums: dict[str, float],
) -> int:
    """Forward and backward of some rows, added to `sums`; returns the padded cells computed.

    No rows: one row with weight 0 keeps the ranks' collectives symmetric.
    """
    rows = picked if picked.size else np.array([0], dtype=np.int64)
    device = engine.device
    laid_out = lay_out([arrays.batch.rows[row] for row in rows], packed=stage.batching == "packed").to(device)
    width = laid_out.token_ids_PC.shape[1]
    terms = arrays.terms.rows(torch.from_numpy(rows), width, device)
    if not picked.size:
        terms = replace(terms, weights_BL=torch.zeros_like(terms.weights_BL))
    scores = engine.forward(
        laid_out.token_ids_PC, laid_out.target_mask_PC, stage.sampling.temperature, laid_out.position_PC
    )
    log_prob_BL, entropy_BL = (laid_out.by_sequence(part) for part in (scores.log_prob_BL, scores.entropy_BL))
    parts = arrays.objective.parts(log_prob_BL, entropy_BL, terms)
    loss = reduce(torch.add, parts.values())
    engine.accumulate(loss, parts, arrays.batch.prompts_of(picked))
    if not picked.size:
        return 0
    token_mean_BL = (arrays.batch.mask_BL[rows, :width] / arrays.tokens).to(device)
    metrics = clip_metrics(stage.loss, log_prob_BL.detach(), terms, token_mean_BL)
    log_ratio_BL = (log_prob_BL.detach() - terms.old_log_prob_BL) * (token_mean_BL != 0)
    sums["off_by"] += float((token_mean_BL * log_ratio_BL.expm1().abs()).sum())
    sums["off_by_log"] += float((token_mean_BL * log_ratio_BL.abs()).sum())
    sums["policy/loss"] += float(loss.detach())
    for name in _CLIP_METRICS:
        sums[name] += float(metrics[name.removeprefix("policy/")])
    return laid_out.cells
