"""Token-level modulation of advantages by entropy and entropy change (DynaMO's token level).

    A_final = A beta_comp beta_stab
    beta_comp = 1 + alpha (Hmax - H) / (Hmax - Hmin)  if A > 0, else 1          (compensation)
    beta_stab = lambda_min + (1 - lambda_min) / (1 + exp(gamma (x - tau))),  x = |dH| / scale
dH is the change of a token's entropy under one step on its logits (entropy_change.py).
Hmax, Hmin and scale belong to the whole mini-batch over all ranks, never to a micro-batch: pass the
global ones as `scope` and `scale`.

Both factors are regularisation, not variance reduction: they bias the gradient at a state.

Shapes: B rows, T response tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from dynamo_core.algorithms.checks import (
    choice,
    number,
    require,
    same_shape,
    selection,
    zero_outside,
)
from dynamo_core.algorithms.entropy_change import (
    EXPECTATIONS,
    entropy_change,
    entropy_change_from_bracket,
    sequence_bracket,
)
from dynamo_core.algorithms.logit_statistics import LogitSums, TokenStatistics, logit_statistics

__all__ = [
    "DECAY5",
    "DECAY6",
    "EXPECTATIONS",
    "LogitSums",
    "Modulation",
    "TokenStatistics",
    "change_scale",
    "compensation",
    "entropy_change",
    "entropy_change_from_bracket",
    "entropy_scope",
    "logit_statistics",
    "modulate",
    "modulation_metrics",
    "quantile",
    "sequence_bracket",
    "stabilisation",
]

_EPS: Final = 1e-8  # keeps a flat entropy or a zero change finite, as in the release
Normaliser = str | float


@dataclass(frozen=True)
class Modulation:
    """The constants of both factors and a switch for each.

    `normaliser`: "max", or a quantile of |dH| in (0, 1] (robust where advantages differ by token).
    """

    alpha: float
    lambda_min: float
    gamma: float
    tau: float
    normaliser: Normaliser = "max"
    compensation: bool = True
    stabilisation: bool = True


# dp_actor.py:465-482 (decay6_linearnorm, the example script's) and :483-503 (decay5_linearnorm).
DECAY6: Final = Modulation(alpha=0.2, lambda_min=0.6, gamma=50.0, tau=0.99)
DECAY5: Final = Modulation(alpha=0.4, lambda_min=0.6, gamma=50.0, tau=0.9)


def quantile(values: torch.Tensor, mask: torch.Tensor, q: float) -> torch.Tensor:
    """The q-quantile of the masked values, scalar, interpolated linearly; of any number of values.

    Raises:
        AlgorithmError: q outside [0, 1], shapes that do not match, empty mask.
    """
    number("q", q, 0, 1)
    same_shape(values=values, mask=mask)
    ordered = values[selection(mask)].sort().values
    position = q * (ordered.numel() - 1)
    below = int(position)
    above = min(below + 1, ordered.numel() - 1)
    return torch.lerp(ordered[below], ordered[above], position - below)


def entropy_scope(entropy: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(Hmin, Hmax) over the masked tokens, scalars: reduce with min and max over ranks.

    Raises:
        AlgorithmError: shapes that do not match, empty mask.
    """
    same_shape(entropy=entropy, mask=mask)
    inside = entropy[selection(mask)]
    return inside.min(), inside.max()


def change_scale(
    entropy_change: torch.Tensor, mask: torch.Tensor, *, normaliser: Normaliser = "max"
) -> torch.Tensor:
    """What |dH| is divided by: its maximum or its quantile over the masked tokens, scalar.

    Raises:
        AlgorithmError: a normaliser that is neither "max" nor in (0, 1], shapes, empty mask.
    """
    if isinstance(normaliser, str):
        choice("normaliser", normaliser, ("max",))
        same_shape(entropy_change=entropy_change, mask=mask)
        return entropy_change[selection(mask)].abs().max()
    require(0 < normaliser <= 1, "normaliser", normaliser, "'max' or a quantile in (0, 1]")
    return quantile(entropy_change.abs(), mask, normaliser)


def compensation(
    entropy: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    alpha: float,
    scope: tuple[torch.Tensor | float, torch.Tensor | float] | None = None,
) -> torch.Tensor:
    """beta_comp [B, T]: up to 1 + alpha for confident tokens of positive advantage.

    Zero outside the mask; alpha = 0 gives exactly 1. `scope` is (Hmin, Hmax) over all ranks, by
    default over these tokens.

    Raises:
        AlgorithmError: negative alpha, shapes that do not match, empty mask.
    """
    number("alpha", alpha, 0)
    same_shape(mask=mask, entropy=entropy, advantages=advantages)
    lowest, highest = entropy_scope(entropy, mask) if scope is None else scope
    chosen = mask != 0
    boost = alpha * (highest - zero_outside(chosen, entropy)) / (highest - lowest + _EPS)
    positive = zero_outside(chosen, advantages) > 0
    return zero_outside(chosen, 1 + zero_outside(positive, boost))


def stabilisation(
    entropy_change: torch.Tensor,
    mask: torch.Tensor,
    *,
    lambda_min: float,
    gamma: float,
    tau: float,
    normaliser: Normaliser = "max",
    scale: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """beta_stab [B, T]: down to lambda_min for tokens whose entropy moves most; 0 outside the mask.

    `scale` is the global one (see `change_scale`); by default that of these tokens by `normaliser`.

    Raises:
        AlgorithmError: a constant out of range, shapes that do not match, empty mask.
    """
    number("lambda_min", lambda_min, 0, 1)
    number("gamma", gamma, 0)
    number("tau", tau, -math.inf)
    same_shape(mask=mask, entropy_change=entropy_change)
    if scale is None:
        scale = change_scale(entropy_change, mask, normaliser=normaliser)
    chosen = mask != 0
    x = zero_outside(chosen, entropy_change).abs() / (scale + _EPS)
    factor = lambda_min + (1 - lambda_min) * torch.sigmoid(-gamma * (x - tau))
    return zero_outside(chosen, factor)


def modulate(
    advantages: torch.Tensor,
    entropy: torch.Tensor,
    entropy_change: torch.Tensor,
    mask: torch.Tensor,
    *,
    config: Modulation,
    scope: tuple[torch.Tensor | float, torch.Tensor | float] | None = None,
    scale: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """A beta_comp beta_stab [B, T], zero outside the mask; a factor switched off is left out.

    alpha = 0 (compensation) and lambda_min = 1 (stabilisation) keep the advantages bit for bit.

    Raises:
        AlgorithmError: constants out of range, shapes that do not match, empty mask.
    """
    same_shape(mask=mask, advantages=advantages)
    result = zero_outside(selection(mask), advantages)
    if config.compensation:
        factor = compensation(entropy, advantages, mask, alpha=config.alpha, scope=scope)
        result = result * factor.to(result.dtype)
    if config.stabilisation:
        factor = stabilisation(
            entropy_change, mask, lambda_min=config.lambda_min, gamma=config.gamma,
            tau=config.tau, normaliser=config.normaliser, scale=scale,
        )  # fmt: skip
        result = result * factor.to(result.dtype)
    return result


def modulation_metrics(
    before: torch.Tensor, after: torch.Tensor, mask: torch.Tensor
) -> dict[str, float]:
    """Mean and std before and after, shares boosted and attenuated, quantiles of the factor.

    Tokens whose advantage is zero have no factor and count in neither share.

    Raises:
        AlgorithmError: shapes that do not match, empty mask.
    """
    same_shape(mask=mask, before=before, after=after)
    chosen = selection(mask)
    values = {}
    for name, tensor in (("before", before[chosen]), ("after", after[chosen])):
        values[f"{name}_mean"] = float(tensor.mean())
        values[f"{name}_std"] = float(tensor.std(correction=0))
    live = chosen & (before != 0)
    factor = torch.where(live, after / torch.where(live, before, torch.ones_like(before)), 1.0)
    values["share_boosted"] = float((factor[chosen] > 1).double().mean())
    values["share_attenuated"] = float((factor[chosen] < 1).double().mean())
    for q in (0.0, 0.01, 0.5, 0.99, 1.0):
        values[f"factor_q{100 * q:g}"] = float(quantile(factor, mask, q))
    return values
