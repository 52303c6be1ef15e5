"""From scored rollouts to the arrays that an update works on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dynamo_core.algorithms.losses import overlong_mask
from dynamo_core.data.batching import TokenRow, pad_rows
from dynamo_core.errors import DataError
from dynamo_core.rollout.collector import ScoredRollout
from dynamo_core.training.policy_update import PolicyBatch
from dynamo_core.types import Rollout


def policy_batch(
    scored: Sequence[ScoredRollout],
    prompt_ids: Sequence[str],
    *,
    overlong: str = "keep",
    truncation_penalty: float = 0.0,
) -> PolicyBatch:
    """Arrays of the rollouts that have a score; the others leave loss and statistics (they are counted elsewhere).

    Args:
        overlong: "mask" takes the tokens of rollouts that were cut off out of the loss.
        truncation_penalty: subtracted from the reward of such rollouts.

    Raises:
        DataError: no rollout of the step could be scored, or none is left.
    """
    usable = [item for item in scored if item.verdict.score is not None]
    if not usable:
        raise DataError(
            f"none of the step's {len(scored)} rollouts could be scored: {scored[0].verdict.reason}",
            "check the answers of the data against reward.format",
        )
    rows = [_row(item.rollout) for item in usable]
    tokens = pad_rows(rows)
    mask_BL = tokens.target_mask_BL
    truncated_B = torch.tensor([item.rollout.truncated for item in usable])
    if overlong == "mask":
        mask_BL = overlong_mask(mask_BL, truncated_B)
    if not mask_BL.any():
        raise DataError(
            f"all {len(usable)} scored rollouts of the step were cut off, and overlong is 'mask'",
            "raise sampling.max_new_tokens, or set overlong: keep",
        )
    rewards_B = torch.tensor([item.verdict.score for item in usable], dtype=torch.float32)
    place = {prompt_id: index for index, prompt_id in enumerate(prompt_ids)}
    width = tokens.token_ids_BL.shape[1]
    return PolicyBatch(
        rows=rows,
        group_B=torch.tensor([place[item.rollout.prompt_id] for item in usable]),
        rewards_B=rewards_B - truncation_penalty * truncated_B,
        mask_BL=mask_BL,
        old_log_prob_BL=_spread([item.rollout for item in usable], "log_probs", width),
        entropy_BL=_spread([item.rollout for item in usable], "entropies", width),
        bracket_BL=_spread([item.rollout for item in usable], "brackets", width),
        truncated_B=truncated_B,
        prompt_ids=tuple(prompt_ids),
    )


def _row(rollout: Rollout) -> TokenRow:
    mask = [False] * len(rollout.prompt_token_ids)
    for segment in rollout.segments:
        mask.extend(bool(value) for value in segment.loss_mask)
    return TokenRow(rollout.prompt_token_ids + rollout.response_token_ids, tuple(mask))


def _spread(rollouts: Sequence[Rollout], field: str, width: int) -> torch.Tensor:
    """One value a token as [B, width], after each rollout's prompt."""
    dtype = np.result_type(*(getattr(segment, field) for rollout in rollouts for segment in rollout.segments))
    values_BL = np.zeros((len(rollouts), width), dtype=dtype)
    for index, rollout in enumerate(rollouts):
        start = len(rollout.prompt_token_ids)
        for segment in rollout.segments:
            stop = start + len(segment.token_ids)
            values_BL[index, start:stop] = getattr(segment, field)
            start = stop
    return torch.from_numpy(values_BL)
