"""One weight per token: the loss of a mini-batch is sum_it w_it l_it, whatever it is split into.

M tokens, B rows, N prompts, n_i rows of prompt i, T_ij tokens of row j, L the horizon:
    token-mean                        1 / M
    seq-mean-token-sum                1 / B
    seq-mean-token-mean               1 / (B T_ij)
    seq-mean-token-sum-norm           1 / (B L)                 Dr.GRPO
    prompt-mean-seq-mean-token-mean   1 / (N n_i T_ij)
    prompt-mean-token-mean            1 / (N sum_j T_ij)
    prompt-mean-token-sum-norm        1 / (N n_i L)             unbiased under any allocation
    official-seq-mean-token-sum-norm(no batch mean)   1 / T, T the padded width: the release's
Rows without a token are padding: they count in neither B, N nor n_i. The weights are computed once,
over the whole mini-batch of all ranks, before it is split, and shared by every term of the loss.

Shapes: B rows, T response tokens (padded), K prompts of the mini-batch.
"""

from __future__ import annotations

from typing import Final

import torch

from dynamo_core.algorithms.checks import choice, fail, matrix, number, selection, vector

OFFICIAL_SUM_NORM: Final = "official-seq-mean-token-sum-norm(no batch mean)"
AGGREGATIONS: Final = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean-seq-mean-token-mean",
    "prompt-mean-token-mean",
    "prompt-mean-token-sum-norm",
    OFFICIAL_SUM_NORM,
)


def _prompt_sums(group: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[B]: the sum of `rows` [B] over the rows of the same prompt."""
    _, row = torch.unique(group, return_inverse=True)
    sums = torch.zeros(int(row.max()) + 1, dtype=rows.dtype, device=rows.device)
    return sums.index_add(0, row, rows)[row]


def _horizon(aggregation: str, horizon: float | None) -> float:
    if horizon is None or horizon <= 0:
        fail("horizon", horizon, f"positive for aggregation '{aggregation}'")
    return number("horizon", horizon, 0)


def aggregation_weights(
    mask: torch.Tensor,
    group: torch.Tensor,
    *,
    aggregation: str,
    horizon: float | None = None,
) -> torch.Tensor:
    """w [B, T], float64, zero outside the mask (module docstring).

    Args:
        mask: [B, T], non-zero on the tokens that are trained.
        group: integer prompt id of each row, [B].
        aggregation: a name of AGGREGATIONS.
        horizon: L, for the "-norm" names: the token limit of a response. Ignored by the others.

    Raises:
        AlgorithmError: unknown aggregation, shapes that do not match, empty mask, horizon missing.
    """
    choice("aggregation", aggregation, AGGREGATIONS)
    matrix("mask", mask)
    vector("group", group, mask.shape[0])
    tokens = selection(mask).double()
    length_B = tokens.sum(-1)
    row_B = (length_B > 0).double()
    if aggregation.startswith("prompt-mean"):
        size_B = _prompt_sums(group, row_B).clamp(min=1)
        prompts = (row_B / size_B).sum().round()
        scale_B = 1 / (prompts * size_B)
    else:
        scale_B = (1 / row_B.sum()).expand_as(length_B)
    if aggregation == "token-mean":
        weight_B = (1 / length_B.sum()).expand_as(length_B)
    elif aggregation == "seq-mean-token-sum":
        weight_B = scale_B
    elif aggregation == "prompt-mean-token-mean":
        weight_B = scale_B * size_B / _prompt_sums(group, length_B).clamp(min=1)
    elif aggregation.endswith("seq-mean-token-mean"):
        weight_B = scale_B / length_B.clamp(min=1)
    elif aggregation == OFFICIAL_SUM_NORM:
        weight_B = torch.full_like(length_B, 1 / mask.shape[1])
    else:
        weight_B = scale_B / _horizon(aggregation, horizon)
    return tokens * weight_B.unsqueeze(-1)
