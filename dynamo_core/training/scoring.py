"""One number a token for all rows of a step, each rank computing its share: critic values, reference log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dynamo_core.data.batching import TokenRow, micro_batches
from dynamo_core.data.packing import LaidOut, lay_out
from dynamo_core.training.distributed import Ranks

Compute = Callable[[LaidOut], torch.Tensor]
"""Rows on the rank's device -> values_PC, one a cell."""


@torch.no_grad()
def score_rows(compute: Compute, rows: Sequence[TokenRow], size: int, ranks: Ranks, *, packed: bool) -> torch.Tensor:
    """[B, L] on the CPU, on every rank, zero beyond a row's end; L is the longest row.

    Args:
        size: rows computed at once.
        packed: how they stand in a batch.
    """
    lengths = [len(row.token_ids) for row in rows]
    found_BL: torch.Tensor | None = None
    for chosen in micro_batches(lengths, size, ranks.rank, ranks.world_size):
        # A rank without rows computes one too: all take part in whatever the module gathers.
        batch = lay_out([rows[index] for index in chosen] or [rows[0]], packed=packed).to(ranks.device)
        values_BL = batch.by_sequence(compute(batch)).cpu()
        if found_BL is None:
            found_BL = values_BL.new_zeros(len(rows), max(lengths))
        for place, index in enumerate(chosen):
            found_BL[index, : lengths[index]] = values_BL[place, : lengths[index]]
    assert found_BL is not None, "every rank has at least one micro-batch"
    return ranks.sum_tensor(found_BL)
