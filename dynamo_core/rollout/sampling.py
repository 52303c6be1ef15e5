"""Counter-based sampling: one uniform per (seed, step, prompt, rollout, position), turned into a token by inverse CDF.

No generator state exists, so a rollout is the same whichever rows share its batch, whatever the number of ranks, and
after a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
EDGE_TOLERANCE = 1e-6
"""A draw this close to an edge of the CDF may fall on the other side when float32 logits round differently."""


def stream_key(seed: int, step: int, prompt_id: str, rollout: int) -> int:
    """The 64-bit key of one rollout's stream of uniforms."""
    text = f"{seed}\x1f{step}\x1f{prompt_id}\x1f{rollout}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(keys: npt.NDArray[np.uint64], position: int) -> npt.NDArray[np.float64]:
    """One uniform in [0, 1) per key at a position: SplitMix64 (Steele et al. 2014) of key + (position + 1) * golden."""
    with np.errstate(over="ignore"):
        z = keys + np.uint64(position + 1) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw_tokens(logits_BV: torch.Tensor, uniforms_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [B], near_edge [B] bool): the first token whose cumulative probability exceeds the uniform.

    `logits_BV` are divided by the temperature already; the cumulative sum is in float64.
    """
    cumulative_BV = torch.softmax(logits_BV.double(), dim=-1).cumsum(-1)
    # The last sum may end a rounding below 1: scale the draw to it instead of falling off the end.
    target_B1 = (uniforms_B * cumulative_BV[:, -1]).unsqueeze(-1)
    tokens_B = torch.searchsorted(cumulative_BV, target_B1, right=True).squeeze(-1)
    tokens_B = tokens_B.clamp(max=logits_BV.shape[-1] - 1)
    near_B = (cumulative_BV - target_B1).abs().amin(-1) < EDGE_TOLERANCE
    return tokens_B, near_B


def stream_keys(seed: int, step: int, prompt_id: str, rollouts: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Keys of several rollouts of one prompt."""
    return np.array([stream_key(seed, step, prompt_id, rollout) for rollout in rollouts], dtype=np.uint64)
