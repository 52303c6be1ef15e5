"""Which checkpoint is the best so far, by one metric of the stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_core.config.stage_base import KeepBest
from dynamo_core.errors import RecipeError


class Best:
    """Means of the metric over the steps between checkpoints; ties go to the earlier one.

    Only steps that are a multiple of `every`, and the last one, are candidates: with checkpoints that a clock asked
    for, the choice would depend on the machine's speed.
    """

    def __init__(self, config: KeepBest, *, every: int, steps: int) -> None:
        self._config = config
        self._every = every
        self._steps = steps
        self._seen: list[float] = []
        self.step: int | None = None
        self.value: float | None = None

    def observe(self, step: int, values: Mapping[str, float]) -> bool:
        """Whether `step` is the best candidate yet.

        Raises:
            RecipeError: the stage has no such metric.
        """
        metric = self._config.metric
        if metric in values:
            self._seen.append(values[metric])
        if step % self._every and step != self._steps:
            return False
        if not self._seen:
            raise RecipeError(
                f"checkpoints.keep_best.metric: '{metric}' is not a metric of this stage",
                f"use one of {', '.join(sorted(values))}",
            )
        mean = sum(self._seen) / len(self._seen)
        self._seen = []
        sign = 1 if self._config.mode == "max" else -1
        if self.value is not None and sign * mean <= sign * self.value:
            return False
        self.step, self.value = step, mean
        return True

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"seen": list(self._seen), "step": self.step, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._seen, self.step, self.value = list(state["seen"]), state["step"], state["value"]
