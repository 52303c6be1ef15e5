"""Counter-based uniforms and the inverse CDF."""

from __future__ import annotations

import numpy as np
import torch

from dynamo_core.rollout.sampling import draw_tokens, stream_key, stream_keys, uniforms


def test_streams_differ_in_every_part_of_their_key():
    base = stream_key(1, 2, "a", 3)
    assert (
        len(
            {
                base,
                stream_key(2, 2, "a", 3),
                stream_key(1, 3, "a", 3),
                stream_key(1, 2, "b", 3),
                stream_key(1, 2, "a", 4),
            }
        )
        == 5
    )


def test_uniforms_are_uniform_and_independent_of_their_neighbours():
    keys = stream_keys(0, 0, "p", range(4000))
    draws = np.stack([uniforms(keys, position) for position in range(8)])
    assert draws.min() >= 0
    assert draws.max() < 1
    # Mean and variance of 32,000 uniforms: 1/2 +- 0.0016 and 1/12 +- 0.0004 at one standard error.
    assert abs(draws.mean() - 0.5) < 0.007
    assert abs(draws.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(draws[0], draws[1])[0, 1]) < 0.06
    assert uniforms(keys[7:8], 5)[0] == draws[5, 7]


def test_each_token_is_drawn_as_often_as_it_is_likely():
    logits_V = torch.tensor([0.5, -1.0, 2.0, -torch.inf])
    draws_B = torch.from_numpy(uniforms(stream_keys(1, 1, "p", range(20000)), 0))
    tokens_B, _ = draw_tokens(logits_V.expand(20000, -1), draws_B)
    shares = np.bincount(tokens_B.numpy(), minlength=4) / 20000
    assert np.abs(shares - torch.softmax(logits_V, -1).numpy()).max() < 0.012  # 3.4 standard errors
    assert shares[3] == 0


def test_extreme_draws_stay_within_the_vocabulary_and_never_take_an_impossible_token():
    logits_BV = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, -1)
    tokens_B, near_B = draw_tokens(logits_BV, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert tokens_B.tolist() == [1, 2]
    assert near_B.tolist() == [True, True]


def test_a_draw_near_an_edge_is_counted_and_others_are_not():
    logits_BV = torch.zeros(2, 2)  # edge at 1/2
    _, near_B = draw_tokens(logits_BV, torch.tensor([0.5 + 1e-8, 0.3], dtype=torch.float64))
    assert near_B.tolist() == [True, False]
