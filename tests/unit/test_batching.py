"""Padding, micro-batches and length buckets."""

from __future__ import annotations

import numpy as np
import pytest

from dynamo_core.data.batching import TokenRow, left_pad, length_bucketed_batches, micro_batches, pad_rows
from dynamo_core.errors import DataError

ROWS = [TokenRow((5, 6, 7), (False, True, True)), TokenRow((8, 9), (False, True))]


def test_rows_are_padded_on_the_right_and_pads_are_no_targets():
    batch = pad_rows(ROWS)
    assert batch.token_ids_BL.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.target_mask_BL.tolist() == [[False, True, True], [False, True, False]]


def test_prompts_are_padded_on_the_left():
    token_ids_BL, mask_BL = left_pad([(5, 6, 7), (8,)])
    assert token_ids_BL.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask_BL.tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("rows", [[], [TokenRow((1, 2), (True, True))]])
def test_nothing_to_predict_from_is_refused(rows):
    with pytest.raises(DataError):
        pad_rows(rows)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 5, 16])
def test_ranks_share_every_row_once_and_agree_on_the_number_of_micro_batches(world_size, count):
    lengths = np.random.default_rng(count).integers(2, 40, count).tolist()
    parts = [micro_batches(lengths, 4, rank, world_size) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    assert len(parts[0]) >= 1
    assert sorted(int(row) for part in parts for rows in part for row in rows) == list(range(count))
    assert all(len(rows) <= 4 for part in parts for rows in part)


def test_length_buckets_use_every_row_equally_often_and_keep_lengths_together():
    lengths = np.random.default_rng(0).integers(5, 60, 96).tolist()
    batches = length_bucketed_batches(lengths, 8, 24, np.random.default_rng(1))
    assert len(batches) == 24
    counts = np.bincount(np.concatenate(batches), minlength=96)
    assert counts.tolist() == [2] * 96  # 24 batches of 8 are two epochs of 96 rows
    spread = np.mean([np.ptp(np.array(lengths)[batch]) for batch in batches])
    assert spread < np.ptp(lengths) / 3
