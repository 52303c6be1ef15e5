"""Alarms of a reinforce stage: what no longer trains, seen in the metrics of each step.

An alarm stops nothing. It is a metric `alarm/<name>`, 0 or 1, and once a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from dynamo_core.stages.symptoms import ALARMS

_LOG: Final = logging.getLogger(__name__)
ENTROPY_SHARE: Final = 0.1
"""Of its first value; below, entropy has collapsed."""
ENTROPY_FLOOR: Final = 0.005
"""Nats a token; below, entropy has collapsed wherever it began."""
TRUNCATED_SHARE: Final = 0.5
EXPLAINED_VARIANCE: Final = -0.5
UNSCORED_SHARE: Final = 0.2
CLIP_FRACTION: Final = 0.3


def raised(values: Mapping[str, float], *, first_entropy: float, critic_settled: bool = True) -> dict[str, bool]:
    """Every alarm that these metrics can raise, by name.

    Args:
        values: of one step.
        first_entropy: policy/entropy of the first step.
        critic_settled: its warm-up is over.
    """
    entropy = values["policy/entropy"]
    found = {
        "entropy_collapse": entropy < max(ENTROPY_SHARE * first_entropy, ENTROPY_FLOOR),
        "truncated": values["rollout/truncated_share"] > TRUNCATED_SHARE,
        "equal_rewards": values["allocation/zero_variance_groups"] == 1,
        "weights_still": _weights_still(values),
        "unscored": values["reward/unscored"] > UNSCORED_SHARE * values["allocation/budget"],
        "clipped": values.get("policy/clipfrac", 0.0) > CLIP_FRACTION,
    }
    if "critic/explained_variance" in values:
        found["explained_variance"] = critic_settled and values["critic/explained_variance"] < EXPLAINED_VARIANCE
    return found


def _weights_still(values: Mapping[str, float]) -> bool:
    moved, gradient, lr = (values.get(f"policy/{name}", 0.0) for name in ("update_rms", "grad_norm", "lr"))
    return moved == 0 and gradient > 0 and lr > 0


class Alarms:
    """Remembers the first entropy and what was said; belongs in checkpoints."""

    def __init__(self, critic_warmup: int = 0, *, quiet: bool = False) -> None:
        """
        Args:
            critic_warmup: steps in which a critic may be wrong.
            quiet: write no lines (ranks other than 0).
        """
        self._warmup = critic_warmup
        self._quiet = quiet
        self._first_entropy: float | None = None
        self._said: list[str] = []

    def observe(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """The alarm metrics of a step; a line for each alarm that is raised for the first time."""
        if self._first_entropy is None:
            self._first_entropy = values["policy/entropy"]
        found = raised(values, first_entropy=self._first_entropy, critic_settled=step > self._warmup)
        for symptom in ALARMS:
            if found.get(symptom.name) and symptom.name not in self._said:
                self._said.append(symptom.name)
                if not self._quiet:
                    measured = f"{symptom.metric} is {values[symptom.metric]:.3g} at step {step}"
                    _LOG.warning("alarm: %s: %s; see dynamo-rl diagnose", symptom.title, measured)
        return {f"alarm/{name}": float(on) for name, on in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"first_entropy": self._first_entropy, "said": list(self._said)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._first_entropy, self._said = state["first_entropy"], list(state["said"])
