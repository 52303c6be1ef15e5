"""What a reward function is, and how a recipe's choice becomes one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from dynamo_core.config.reinforce import MathAnswerReward
from dynamo_core.rewards.math_answer import MathAnswer
from dynamo_core.types import PromptRow, Verdict


class RewardFunction(Protocol):
    """Judges one completion of one prompt. It never raises on what a model wrote, and needs no other row.

    A completion that cannot be judged gets a verdict without score, not a score of 0: it then leaves loss and
    statistics and is counted (TRL rewards/accuracy_rewards.py).
    """

    def __call__(self, prompt: PromptRow, completion: str) -> Verdict:
        """The verdict on `completion` as an answer to `prompt`."""
        ...


REWARDS: Final[dict[str, Callable[[MathAnswerReward], RewardFunction]]] = {"math_answer": MathAnswer}
"""The `type` of a reward in a recipe -> what makes the function from its configuration."""


def make_reward(config: MathAnswerReward) -> RewardFunction:
    """The reward function that a recipe asks for."""
    return REWARDS[config.type](config)
