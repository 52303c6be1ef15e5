"""Where rows stand in a batch: one to a line and padded, or several to a line, one behind the other.

Packed rows do not see each other: attention is block-diagonal, which transformers derives from positions that start
at 0 again with each row. Pads at a line's end are a sequence of their own.
Letters: B rows, L tokens of the longest row, P lines, C their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dynamo_core.data.batching import TokenRow, pad_rows


@dataclass(frozen=True)
class LaidOut:
    """Rows as a model reads them, and the way back to one row a line."""

    token_ids_PC: torch.Tensor  # int64
    target_mask_PC: torch.Tensor  # bool
    position_PC: torch.Tensor | None  # int64: place in its own row; None where rows are padded, which needs none
    place_BL: torch.Tensor | None  # int64: where each token stands among the P * C cells, -1 beyond a row's end

    def to(self, device: torch.device) -> LaidOut:
        """The same on another device."""
        return LaidOut(*(None if part is None else part.to(device) for part in vars(self).values()))  # type: ignore[arg-type]

    @property
    def cells(self) -> int:
        """Tokens computed, pads included."""
        return self.token_ids_PC.numel()

    def by_sequence(self, values_PC: torch.Tensor) -> torch.Tensor:
        """Values of a model's lines as [B, L], one row a line; zero beyond a packed row's end."""
        if self.place_BL is None:
            return values_PC
        padded = nn.functional.pad(values_PC.flatten(), (0, 1))  # the place -1
        return padded[self.place_BL]


def lay_out(rows: Sequence[TokenRow], *, packed: bool) -> LaidOut:
    """Rows padded to the longest of them, or packed into lines of that width.

    Raises:
        DataError: no rows, or a row with a target in first place, which nothing predicts.
    """
    padded = pad_rows(rows)
    if not packed:
        return LaidOut(padded.token_ids_BL, padded.target_mask_BL, None, None)
    lengths = [len(row.token_ids) for row in rows]
    width = max(lengths)
    lines = first_fit(lengths, width)
    position_PC = np.zeros((len(lines), width), dtype=np.int64)
    place_BL = np.full((len(rows), width), -1, dtype=np.int64)
    for line, members in enumerate(lines):
        start = 0
        for row in members:
            end = start + lengths[row]
            position_PC[line, start:end] = np.arange(lengths[row])
            place_BL[row, : lengths[row]] = np.arange(line * width + start, line * width + end)
            start = end
        position_PC[line, start:] = np.arange(width - start)
    real_BL = torch.from_numpy(place_BL >= 0)
    place = torch.from_numpy(place_BL)
    token_ids_PC = torch.zeros(position_PC.shape, dtype=torch.int64)
    target_mask_PC = torch.zeros(position_PC.shape, dtype=torch.bool)
    token_ids_PC.view(-1)[place[real_BL]] = padded.token_ids_BL[real_BL]
    target_mask_PC.view(-1)[place[real_BL]] = padded.target_mask_BL[real_BL]
    return LaidOut(token_ids_PC, target_mask_PC, torch.from_numpy(position_PC), place)


def first_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Row indices of each line: the longest row first, each into the first line with room (first-fit decreasing)."""
    lines: list[list[int]] = []
    room: list[int] = []
    order: npt.NDArray[np.int64] = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    for row in order.tolist():
        line = next((index for index, left in enumerate(room) if left >= lengths[row]), len(lines))
        if line == len(lines):
            lines.append([])
            room.append(width)
        lines[line].append(row)
        room[line] -= lengths[row]
    return lines
