"""What is known of each prompt: its success rate p and the variance c that allocation uses.

With prior Beta(alpha, beta) and k successes in G rollouts, a = alpha + k and b = beta + G - k,
    c = E[p(1-p) | data] = ab / ((a+b)(a+b+1)),
the Bayes act, since the objective of allocation is linear in c. It is never zero, so that no prompt
is given up. Earlier visits are discounted: k = sum_v discount^v k_v, v = 0 the newest visit.

Shapes: N prompts of a query.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamo_core.algorithms.checks import (
    FloatArray,
    IntArray,
    choice,
    fail,
    number,
    require,
    state_entry,
    whole,
)
from dynamo_core.algorithms.variance_estimates import (
    CRITIC_MARGIN,
    beta_prior,
    fit_critic_strength,
    official_rank,
    posterior_variance,
    unbiased_variance,
)

__all__ = [
    "PromptId",
    "PromptStats",
    "fit_critic_strength",
    "official_rank",
    "posterior_variance",
    "unbiased_variance",
]

PromptId = str | int
SOURCES = ("posterior", "energy")
_ENERGY_FLOOR = 1e-6  # smallest energy variance, as a share of the mean over prompts


@dataclass
class _Record:
    """One prompt. `k`, `G`, `energy`, `energies` are discounted; lifetime counts are not."""

    k: float = 0.0
    G: float = 0.0
    energy: float = 0.0
    energies: float = 0.0
    lifetime_k: int = 0
    lifetime_G: int = 0
    # the present step's visit, folded in by end_step()
    step_k: int = 0
    step_G: int = 0
    step_energy: list[float] = field(default_factory=list)

    def row(self) -> list[Any]:
        """The fields in order, JSON-able and independent of the order of observation."""
        return [*list(vars(self).values())[:-1], sorted(self.step_energy)]

    def folded(self, discount: float) -> tuple[float, float, float, float]:
        """(k, G, energy, energies): the present visit at weight 1, earlier ones discounted again.

        The energies of a visit are summed exactly (fsum), so their order does not matter.
        """
        k, G, energy, energies = self.k, self.G, self.energy, self.energies
        if self.step_G:
            k, G = discount * k + self.step_k, discount * G + self.step_G
        if self.step_energy:
            energy = discount * energy + math.fsum(self.step_energy)
            energies = discount * energies + len(self.step_energy)
        return k, G, energy, energies


class PromptStats:
    """Discounted Beta posterior of every prompt's success rate, keyed by prompt id.

    A visit is everything observed of one prompt between two `end_step()` calls; the discount
    applies once per visit, whatever the number and order of its observations. Between them, queries
    count the present visit already (a pilot informs its top-up).

    Example:
        stats = PromptStats()
        stats.observe("a", True)
        stats.observe("a", False)
        stats.end_step()
        stats.variance(["a", "never seen"])  # float64[2]
    """

    def __init__(
        self,
        prior: Sequence[float] = (0.5, 0.5),
        discount: float = 0.5,
        *,
        critic_strength: float = 6.0,
        source: str = "posterior",
        energy_strength: float = 1.0,
    ) -> None:
        """Start with nothing observed.

        Args:
            prior: alpha, beta of the Beta prior.
            discount: weight of a visit after the next one, in [0, 1]; 1 counts for ever.
            critic_strength: pseudo-rollouts kappa of a critic's mean V, Beta(kappa V, kappa (1-V)).
            source: what `variance` returns: "posterior", or "energy" where rewards are not binary.
            energy_strength: pseudo-rollouts by which an energy is drawn to the mean over prompts.

        Raises:
            AlgorithmError: a value out of range.
        """
        self.prior = beta_prior(prior)
        self.discount = number("discount", discount, 0, 1)
        self.critic_strength = number("critic_strength", critic_strength, 1e-6)
        self.source = choice("source", source, SOURCES)
        self.energy_strength = number("energy_strength", energy_strength, 1e-6)
        self._records: dict[PromptId, _Record] = {}
        self._unscored = 0
        self._steps = 0

    def observe(
        self, prompt_id: PromptId, correct: bool | float | None, energy: float | None = None
    ) -> None:
        """One rollout of one prompt.

        Args:
            prompt_id: the prompt's own id; never a position.
            correct: raw correctness, True/False (or 1/0). None when the rollout could not be scored
                (then it is only counted) or when the reward is not binary and `energy` is given.
            energy: sum_t w_t A_t^2 (1 - sum_k p_k^2) of the rollout, an estimate of its share of
                sigma^2 that also holds for dense rewards.

        Raises:
            AlgorithmError: `correct` is not binary, `energy` is negative or not finite.
        """
        if correct is not None and correct not in (0, 1):
            fail("correct", correct, "True, False or None")
        if energy is not None:
            number("energy", energy, 0)
        if correct is None and energy is None:
            self._unscored += 1
            return
        record = self._records.setdefault(prompt_id, _Record())
        if correct is not None:
            record.step_k += int(correct)
            record.step_G += 1
            record.lifetime_k += int(correct)
            record.lifetime_G += 1
        if energy is not None:
            record.step_energy.append(float(energy))

    def end_step(self) -> None:
        """Close the visits of this step: what is observed next belongs to new visits."""
        for record in self._records.values():
            folded = record.folded(self.discount)
            record.k, record.G, record.energy, record.energies = folded
            record.step_k, record.step_G, record.step_energy = 0, 0, []
        self._steps += 1

    def counts(self, prompt_ids: Iterable[PromptId]) -> tuple[FloatArray, FloatArray]:
        """Discounted (k, G), each float64[N]; zeros for unseen prompts."""
        rows = [self._folded(prompt_id)[:2] for prompt_id in prompt_ids]
        table = np.asarray(rows, dtype=np.float64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def lifetime_counts(self, prompt_ids: Iterable[PromptId]) -> tuple[IntArray, IntArray]:
        """Undiscounted (k, G), each int64[N]: what `official_rank` takes."""
        records = [self._records.get(prompt_id, _Record()) for prompt_id in prompt_ids]
        rows = [(record.lifetime_k, record.lifetime_G) for record in records]
        table = np.asarray(rows, dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def success_rate(self, prompt_ids: Iterable[PromptId]) -> FloatArray:
        """Posterior mean of p, float64[N], in (0, 1)."""
        k, G = self.counts(prompt_ids)
        return (self.prior[0] + k) / (sum(self.prior) + G)

    def variance(
        self, prompt_ids: Sequence[PromptId], prior_mean: npt.ArrayLike | None = None
    ) -> FloatArray:
        """c [N] for `allocate`, positive everywhere.

        source "posterior": E[p(1-p) | data]; a prompt without data uses the prior, or, where
        `prior_mean` is not NaN, the critic's Beta(kappa V, kappa (1-V)).
        source "energy": discounted mean energy, drawn to the mean over all prompts.

        Args:
            prompt_ids: N ids.
            prior_mean: the critic's value V at the end of each prompt, [N], NaN where unknown.

        Raises:
            AlgorithmError: `prior_mean` of another shape.
        """
        if self.source == "energy":
            return self._energy_variance(prompt_ids)
        k, G = self.counts(prompt_ids)
        a, b = self.prior[0] + k, self.prior[1] + (G - k)
        if prior_mean is not None:
            mean = np.asarray(prior_mean, dtype=np.float64)
            require(mean.shape == G.shape, "prior_mean", f"of shape {mean.shape}", f"{G.shape}")
            use = (G == 0) & ~np.isnan(mean)
            mean = np.clip(np.where(use, mean, 0.5), CRITIC_MARGIN, 1 - CRITIC_MARGIN)
            a = np.where(use, self.critic_strength * mean, a)
            b = np.where(use, self.critic_strength * (1 - mean), b)
        return np.asarray(a * b / ((a + b) * (a + b + 1)), dtype=np.float64)

    def state_dict(self) -> dict[str, Any]:
        """Everything observed, as JSON values; restored exactly, in the middle of a step too."""
        rows = [[key, *self._records[key].row()] for key in self._ids()]
        return {"prompts": rows, "unscored": self._unscored, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace everything observed by `state`; the settings stay those of the constructor.

        Raises:
            AlgorithmError: a key is missing.
        """
        rows = state_entry(state, "prompts")
        self._unscored = whole("unscored", state_entry(state, "unscored"), 0)
        self._steps = whole("steps", state_entry(state, "steps"), 0)
        self._records = {row[0]: _Record(*deepcopy(row[1:])) for row in rows}

    def metrics(self) -> dict[str, float]:
        """Over all prompts seen: their number, rollouts, unscored ones, mean rate and variance."""
        ids = self._ids()
        values = {
            "prompts_seen": float(len(ids)),
            "rollouts_seen": float(sum(record.lifetime_G for record in self._records.values())),
            "unscored": float(self._unscored),
        }
        if ids:
            variance = self.variance(ids)
            values["success_rate_mean"] = float(self.success_rate(ids).mean())
            values["variance_mean"] = float(variance.mean())
            values["variance_min"] = float(variance.min())
        return values

    def _ids(self) -> list[PromptId]:
        """In an order that does not depend on the order of observation."""
        return sorted(self._records, key=lambda key: (type(key).__name__, str(key)))

    def _folded(self, prompt_id: PromptId) -> tuple[float, float, float, float]:
        record = self._records.get(prompt_id)
        return (0.0, 0.0, 0.0, 0.0) if record is None else record.folded(self.discount)

    def _energy_variance(self, prompt_ids: Sequence[PromptId]) -> FloatArray:
        everything = [record.folded(self.discount) for record in self._records.values()]
        means = [energy / energies for _, _, energy, energies in everything if energies]
        typical = math.fsum(means) / len(means) if means else 0.0
        typical = typical if typical > 0 else 1.0
        rows = np.asarray([self._folded(key)[2:] for key in prompt_ids]).reshape(-1, 2)
        drawn = (self.energy_strength * typical + rows[:, 0]) / (self.energy_strength + rows[:, 1])
        return np.asarray(np.maximum(drawn, _ENERGY_FLOOR * typical), dtype=np.float64)
