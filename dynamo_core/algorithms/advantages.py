"""Advantages: how much better a rollout (or a token) was than expected.

Group estimators compare a rollout with the n_i rollouts of its own prompt, mean m_i:
    grpo     (r - m_i) / (s_i + floor)          dr_grpo  r - m_i
    rloo     (r - m_i) n_i / (n_i - 1)          leave-one-out baseline, unbiased for every n_i
A group of equal rewards (compared for equality, not by its std: float noise over a std of 1e-8 is
an advantage of 1000) and a group of one give exactly zero.

Shapes: B rollouts (rows), T response tokens, P prompts, K groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from dynamo_core.algorithms.checks import (
    choice,
    fail,
    matrix,
    number,
    require,
    same_shape,
    selection,
    vector,
    zero_outside,
)

_WHITEN_EPS: Final = 1e-8


class _Groups:
    """Sizes, means and equality of the reward groups, spread back over the rows, all [B]."""

    def __init__(self, rewards: torch.Tensor, group: torch.Tensor) -> None:
        if rewards.ndim != 1 or rewards.numel() == 0:
            fail("rewards", f"of shape {tuple(rewards.shape)}", "of shape [B] with B >= 1")
        vector("group", group, rewards.numel())
        if not bool(torch.isfinite(rewards).all()):
            where = int((~torch.isfinite(rewards)).nonzero()[0])
            fail(f"rewards[{where}]", float(rewards[where]), "finite (leave out unscored rollouts)")
        self.rewards = rewards if rewards.is_floating_point() else rewards.double()
        _, self._row = torch.unique(group, return_inverse=True)
        self._count = int(self._row.max()) + 1
        self.size = self._spread(self._sum(torch.ones_like(self.rewards)))
        mean = self._spread(self._sum(self.rewards)) / self.size
        high = self._reduced("amax")
        self.dead = high == self._reduced("amin")
        self.deviation = torch.where(self.dead, torch.zeros_like(mean), self.rewards - mean)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        empty = torch.zeros(self._count, dtype=values.dtype, device=values.device)
        return empty.index_add(0, self._row, values)

    def _spread(self, values_K: torch.Tensor) -> torch.Tensor:
        return values_K[self._row]

    def _reduced(self, how: str) -> torch.Tensor:
        empty = torch.zeros(self._count, dtype=self.rewards.dtype, device=self.rewards.device)
        return self._spread(
            empty.scatter_reduce(0, self._row, self.rewards, how, include_self=False)
        )

    def std(self, ddof: int) -> torch.Tensor:
        """Standard deviation of each row's group, [B]; 0 where the group is dead."""
        squares = self._spread(self._sum(self.deviation**2))
        return (squares / (self.size - ddof).clamp(min=1)).sqrt()


def grpo(
    rewards: torch.Tensor, group: torch.Tensor, *, ddof: int = 1, floor: float = 1e-6
) -> torch.Tensor:
    """(r - mean) / (std + floor) within each group, [B].

    Args:
        rewards: [B].
        group: integer id of each row's prompt, [B].
        ddof: 1 (release) or 0.
        floor: added to the std.

    Source: GRPO, arXiv 2402.03300. Divided by a noisy std, its weight of a prompt depends on n_i
    (see `kappa`).

    Raises:
        AlgorithmError: shapes that do not match, a reward that is not finite, ddof or floor.
    """
    require(ddof in (0, 1), "ddof", ddof, "0 or 1")
    number("floor", floor, 0)
    groups = _Groups(rewards, group)
    std = torch.where(groups.dead, torch.ones_like(groups.deviation), groups.std(ddof))
    return groups.deviation / (std + floor)


def dr_grpo(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """r - mean within each group, [B]. Source: Dr.GRPO, arXiv 2503.20783.

    Raises:
        AlgorithmError: shapes that do not match, a reward that is not finite.
    """
    return _Groups(rewards, group).deviation


def rloo(rewards: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """r minus the mean of the other rollouts = (r - mean) n / (n - 1), [B].

    Source: RLOO, arXiv 2402.14740.

    Raises:
        AlgorithmError: shapes that do not match, a reward that is not finite.
    """
    groups = _Groups(rewards, group)
    return groups.deviation * (groups.size / (groups.size - 1).clamp(min=1))


def reinforce_pp(
    rewards: torch.Tensor,
    group: torch.Tensor,
    *,
    baseline: str = "batch",
    lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """REINFORCE++, arXiv 2501.03262: whitened over the whole step, [B]; pass all ranks' rows.

    Args:
        rewards, group: [B].
        baseline: "batch": (r - mean) / std; "group": r minus its group's mean, then / std.
        lengths: tokens of each row, [B]: mean and variance over tokens instead of rows.

    Equal rewards (in the step, or in the group) give exactly zero. The variance has ddof 1.

    Raises:
        AlgorithmError: shapes that do not match, a reward that is not finite, unknown baseline.
    """
    choice("baseline", baseline, ("batch", "group"))
    shared = group if baseline == "group" else torch.zeros_like(group)
    deviation = _Groups(rewards, shared).deviation
    count = torch.ones_like(deviation) if lengths is None else lengths.to(deviation.dtype)
    vector("lengths", count, deviation.numel())
    total = count.sum()
    mean = (count * deviation).sum() / total
    variance = (count * (deviation - mean) ** 2).sum() / (total - 1).clamp(min=1)
    if baseline == "batch":
        deviation = deviation - mean
    return deviation / (variance + _WHITEN_EPS).sqrt()


def posterior_std_grpo(
    rewards: torch.Tensor, group: torch.Tensor, *, posterior_variance: torch.Tensor
) -> torch.Tensor:
    """Leave-one-out advantage over the posterior std sqrt(E[p(1-p) | history]), [B].

    GRPO with the std of the prompt's history instead of this group's: kappa no longer depends on
    n_i, and the scale stays defined for groups without variance.

    Args:
        posterior_variance: of each row's prompt, [B], from the statistics before this step.

    Raises:
        AlgorithmError: shapes that do not match, a reward not finite, a variance not positive.
    """
    same_shape(rewards=rewards, posterior_variance=posterior_variance)
    require(bool((posterior_variance > 0).all()), "posterior_variance",
            float(posterior_variance.min()), "positive")  # fmt: skip
    return rloo(rewards, group) / posterior_variance.sqrt()


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages, returns), each [B, T], zero outside the mask. Source: GAE, arXiv 1506.02438.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1},   return_t = A_t + V_t
    where t+1 is the next masked token; after the last one V is `bootstrap` (0 by default: the
    rollout ended) and A is 0.

    Args:
        rewards, values, mask: [B, T]; whatever lies outside the mask, NaN too, has no effect.
        gamma, lam: in [0, 1].
        bootstrap: [B], the value after the last token of rows that were cut off.

    Raises:
        AlgorithmError: shapes that do not match, gamma or lam outside [0, 1], empty mask.
    """
    number("gamma", gamma, 0, 1)
    number("lam", lam, 0, 1)
    matrix("mask", mask)
    same_shape(mask=mask, rewards=rewards, values=values)
    chosen = selection(mask)
    reward, value = zero_outside(chosen, rewards), zero_outside(chosen, values)
    next_value = torch.zeros_like(value[:, 0])
    if bootstrap is not None:
        vector("bootstrap", bootstrap, mask.shape[0])
        next_value = bootstrap.to(value.dtype)
    running = torch.zeros_like(next_value)
    columns = []
    for t in reversed(range(mask.shape[1])):
        here = chosen[:, t]
        delta = reward[:, t] + gamma * next_value - value[:, t]
        running = torch.where(here, delta + gamma * lam * running, running)
        next_value = torch.where(here, value[:, t], next_value)
        columns.append(running)
    advantages = zero_outside(chosen, torch.stack(columns[::-1], dim=1))
    return advantages, advantages + value


def moments(
    values: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, variance) over the masked tokens: ddof 1, or weighted by `weight` and ddof 0.

    Args:
        weight: token weights [B, T] or row weights [B].

    Raises:
        AlgorithmError: shapes that do not match, empty mask.
    """
    same_shape(mask=mask, values=values)
    chosen = selection(mask)
    inside = values[chosen]
    if weight is None:
        return inside.mean(), inside.var(correction=1 if inside.numel() > 1 else 0)
    weight_BT = weight.unsqueeze(-1).expand_as(values) if weight.ndim == 1 else weight
    same_shape(mask=mask, weight=weight_BT)
    share = weight_BT[chosen].to(inside.dtype)
    share = share / share.sum()
    mean = (share * inside).sum()
    return mean, (share * (inside - mean) ** 2).sum()


def whiten(
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    scope: tuple[torch.Tensor | float, torch.Tensor | float] | None = None,
) -> torch.Tensor:
    """(A - mean) / sqrt(variance + 1e-8) over the masked tokens, [B, T], zero outside the mask.

    Once per step over all ranks, never per micro-batch: `scope` is the global (mean, variance).

    Args:
        weight: token weights [B, T] or row weights [B], for example 1/(N n_i) (prompt-weighted).

    Raises:
        AlgorithmError: shapes that do not match, empty mask.
    """
    same_shape(mask=mask, advantages=advantages)
    mean, variance = moments(advantages, mask, weight) if scope is None else scope
    chosen = mask != 0
    centred = zero_outside(chosen, advantages) - mean
    return zero_outside(chosen, centred / (variance + _WHITEN_EPS) ** 0.5)


ESTIMATORS: Final[dict[str, Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "posterior_std_grpo": posterior_std_grpo,
    "gae": gae,
}
# Estimators that compare a rollout with its siblings: they need n_low >= 2.
GROUP_ESTIMATORS: Final = frozenset({"grpo", "dr_grpo", "rloo", "posterior_std_grpo"})
