"""Rows of unequal length as padded batches: the only padding code.

Padding is on the right, so that with causal attention no real token ever sees a pad and positions need no shifting.
Letters: B rows, L tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from dynamo_core.errors import DataError


@dataclass(frozen=True)
class TokenRow:
    """One sequence. `target_mask` marks the tokens that are to be predicted; the first token never is.

    Example:
        TokenRow((5, 6, 7, 2), (False, False, True, True))   # prompt 5 6, response 7 2
    """

    token_ids: tuple[int, ...]
    target_mask: tuple[bool, ...]


@dataclass(frozen=True)
class TokenBatch:
    """Padded rows. A value of token l stands in column l of every [B, L] array, zero where not a target."""

    token_ids_BL: torch.Tensor  # int64
    target_mask_BL: torch.Tensor  # bool


def pad_rows(rows: Sequence[TokenRow], length: int | None = None) -> TokenBatch:
    """Pad `rows` to `length` (default: the longest of them). Pads carry token 0 and are no targets.

    Raises:
        DataError: no rows, or a row with a target in first place, which nothing predicts.
    """
    if not rows:
        raise DataError("a batch needs at least one row")
    width = max(len(row.token_ids) for row in rows) if length is None else length
    token_ids_BL = np.zeros((len(rows), width), dtype=np.int64)
    target_mask_BL = np.zeros((len(rows), width), dtype=np.bool_)
    for index, row in enumerate(rows):
        if row.target_mask[0]:
            raise DataError(f"row {index} of a batch asks for its first token to be predicted; a prompt is missing")
        token_ids_BL[index, : len(row.token_ids)] = row.token_ids
        target_mask_BL[index, : len(row.token_ids)] = row.target_mask
    return TokenBatch(torch.from_numpy(token_ids_BL), torch.from_numpy(target_mask_BL))


def left_pad(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts padded on the left, for decoding: (token_ids_BL int64, attention_mask_BL int64)."""
    width = max(len(row) for row in rows)
    token_ids_BL = np.zeros((len(rows), width), dtype=np.int64)
    mask_BL = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        token_ids_BL[index, width - len(row) :] = row
        mask_BL[index, width - len(row) :] = 1
    return torch.from_numpy(token_ids_BL), torch.from_numpy(mask_BL)


def micro_batches(lengths: Sequence[int], size: int, rank: int = 0, world_size: int = 1) -> list[npt.NDArray[np.int64]]:
    """Row indices of this rank's micro-batches: similar lengths together, the longest first.

    Rows are dealt to ranks in order of length, so that all ranks get nearly equal work. Every rank gets the same
    number of micro-batches, at least one, so that collectives stay symmetric (verl#5591); one may be empty.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    shares = [order[other::world_size] for other in range(world_size)]
    count = max(1, *(-(-len(share) // size) for share in shares))
    mine = shares[rank]
    return [mine[start * size : (start + 1) * size] for start in range(count)]


def length_bucketed_batches(
    lengths: Sequence[int], batch_size: int, steps: int, generator: np.random.Generator, window: int = 8
) -> list[npt.NDArray[np.int64]]:
    """`steps` batches of row indices, in epochs over all rows, each batch of similar lengths.

    Each epoch is a new permutation; within `window` batches rows are sorted by length, then the batches of the
    window are shuffled. Epochs are joined before they are cut, so no row is dropped and every batch is full.
    """
    wanted = steps * batch_size
    epochs = [generator.permutation(len(lengths)) for _ in range(-(-wanted // len(lengths)))]
    rows = np.concatenate(epochs)[:wanted]
    all_lengths = np.asarray(lengths, dtype=np.int64)
    batches: list[npt.NDArray[np.int64]] = []
    for start in range(0, wanted, window * batch_size):
        part = rows[start : start + window * batch_size]
        part = part[np.argsort(all_lengths[part], kind="stable")]
        chunks = part.reshape(-1, batch_size)
        batches.extend(chunks[index] for index in generator.permutation(len(chunks)))
    return batches
