"""Values that cross the seams of the core. Frozen, without torch, joined on `prompt_id` and never on position.

Shape letters: B rollouts, T tokens of one rollout's response.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class FinishReason(StrEnum):
    """Why a rollout ended."""

    EOS = "eos"
    LENGTH = "length"  # cut at max_new_tokens: the rollout is `truncated`


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class PromptRow:
    """One task: a conversation that ends with a user turn, and the answer that would be right.

    Example:
        PromptRow("9f2c...", (Message("user", "3+4="),), answer="7", difficulty="2", source="arithmetic")
    """

    prompt_id: str
    messages: tuple[Message, ...]
    answer: str
    difficulty: str
    source: str


@dataclass(frozen=True)
class Demonstration:
    """A conversation that ends with an assistant turn, to imitate."""

    prompt_id: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class PreferencePair:
    """A conversation that ends with a user turn, and two answers to it: `chosen` is the better one."""

    prompt_id: str
    messages: tuple[Message, ...]
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 means greedy. It divides logits on every log-prob path."""

    temperature: float
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class RolloutRequest:
    """`n` rollouts of one prompt. `first_rollout` keeps the counters of a pilot and its top-up apart."""

    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    step: int
    n: int
    sampling: Sampling
    first_rollout: int = 0


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens after the prompt. `loss_mask` is True on the policy's own tokens.

    `log_probs`, `entropies` and `brackets` (p_a Lambda_a - E_vocab, the entropy-change bracket) are those
    of the sampling policy at the training temperature; all have shape [T].
    """

    token_ids: tuple[int, ...]
    loss_mask: BoolArray
    log_probs: FloatArray
    entropies: FloatArray
    brackets: FloatArray


@dataclass(frozen=True)
class Rollout:
    """One sampled answer to one prompt. `rollout` counts within (step, prompt_id)."""

    prompt_id: str
    rollout: int
    prompt_token_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    finish_reason: FinishReason
    weight_version: int
    near_edge_draws: int = 0  # draws within rounding of a CDF edge: they may differ between machines

    @property
    def response_token_ids(self) -> tuple[int, ...]:
        """All tokens after the prompt, in order."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def truncated(self) -> bool:
        """True when the rollout was cut at the token limit."""
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True)
class Verdict:
    """What a reward function says of one completion.

    `score` is what training maximises, `correct` the raw correctness that allocation and statistics use.
    Both are None when the completion cannot be scored: it then leaves loss and statistics, and is counted.
    """

    score: float | None
    correct: bool | None
    reason: str
