"""A step's groups: who gets how many rollouts, sampled over all ranks, each checked against its own prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from dynamo_core.rewards.protocol import RewardFunction
from dynamo_core.rollout.engine import RolloutEngine
from dynamo_core.training.distributed import Ranks
from dynamo_core.types import PromptRow, Rollout, RolloutRequest, Sampling, Verdict


@dataclass(frozen=True)
class PromptTask:
    """A prompt and its token ids under the policy's chat template."""

    row: PromptRow
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout, its text, and the verdict on it."""

    rollout: Rollout
    completion: str
    verdict: Verdict


class PromptSampler:
    """Endless distinct prompts: a new permutation an epoch; no step ever holds a prompt twice."""

    def __init__(self, prompt_ids: Sequence[str], seed: int) -> None:
        self._prompt_ids = tuple(prompt_ids)
        self._seed = seed
        self._epoch = 0
        self._queue: list[str] = []

    def next(self, count: int) -> list[str]:
        """`count` distinct prompt ids; ids left over from an epoch come before those of the next one."""
        chosen: dict[str, None] = {}
        waiting: list[str] = []
        while len(chosen) < count:
            if not self._queue:
                self._queue = self._permutation()
            prompt_id = self._queue.pop(0)
            if prompt_id in chosen:
                waiting.append(prompt_id)
            else:
                chosen[prompt_id] = None
        self._queue = waiting + self._queue
        return list(chosen)

    def state_dict(self) -> dict[str, Any]:
        """Position in the epoch, as JSON values."""
        return {"epoch": self._epoch, "queue": list(self._queue)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._epoch, self._queue = state["epoch"], list(state["queue"])

    def _permutation(self) -> list[str]:
        generator = np.random.Generator(np.random.Philox(key=[self._seed, self._epoch]))
        self._epoch += 1
        return [self._prompt_ids[index] for index in generator.permutation(len(self._prompt_ids))]


class Collector:
    """Samples and scores the rollouts of a step."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        reward: RewardFunction,
        tasks: Mapping[str, PromptTask],
        ranks: Ranks,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._reward = reward
        self._tasks = tasks
        self._ranks = ranks

    def collect(
        self, prompt_ids: Sequence[str], counts: npt.NDArray[np.int64], *, step: int, sampling: Sampling
    ) -> list[ScoredRollout]:
        """All rollouts of the step, on every rank, in the order of `prompt_ids` and rollout number."""
        requests = [
            RolloutRequest(prompt_id, self._tasks[prompt_id].token_ids, step, int(n), sampling)
            for prompt_id, n in zip(prompt_ids, counts, strict=True)
        ]
        # Largest groups first, dealt in turn: ranks get nearly equal numbers of rollouts.
        order = sorted(range(len(requests)), key=lambda index: -requests[index].n)
        mine = [requests[index] for index in order[self._ranks.rank :: self._ranks.world_size]]
        scored = [self._score(rollout) for rollout in self._engine.generate(mine)]
        place = {prompt_id: index for index, prompt_id in enumerate(prompt_ids)}
        gathered = [item for part in self._ranks.gather(scored) for item in part]
        gathered.sort(key=lambda item: (place[item.rollout.prompt_id], item.rollout.rollout))
        self._check(requests, gathered)
        return gathered

    def _score(self, rollout: Rollout) -> ScoredRollout:
        """Join on the prompt's id: the answer can only be compared with its own prompt's."""
        task = self._tasks[rollout.prompt_id]
        assert rollout.prompt_token_ids == task.token_ids, f"rollout of {rollout.prompt_id} answers another prompt"
        completion = str(self._tokenizer.decode(list(rollout.response_token_ids), skip_special_tokens=True))
        return ScoredRollout(rollout, completion, self._reward(task.row, completion))

    @staticmethod
    def _check(requests: Sequence[RolloutRequest], rollouts: Sequence[ScoredRollout]) -> None:
        expected = [(request.prompt_id, rollout) for request in requests for rollout in range(request.n)]
        found = [(item.rollout.prompt_id, item.rollout.rollout) for item in rollouts]
        assert found == expected, "the rollouts of this step are not the ones that were asked for"
