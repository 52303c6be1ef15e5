"""What allocation and statistics refuse, and with which words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from dynamo_core.algorithms.allocation import (
    allocate,
    continuous,
    largest_remainder,
    objective_value,
    pooled_weights_biased,
    stage_weights,
    top_up_bounds,
)
from dynamo_core.algorithms.prompt_stats import (
    PromptStats,
    fit_critic_strength,
    official_rank,
    posterior_variance,
    unbiased_variance,
)

from .refusals import named, refused

C = [0.1, 0.2, 0.3]
NAN = math.nan


def _allocate(c: Any = C, budget: Any = 30, low: Any = 4, high: Any = 20, **options: Any) -> Any:
    return allocate(c, budget, low, high, **{"rule": "optimal", **options})


CASES: list[tuple[str, Callable[[], Any], str]] = [
    # allocation
    ("variance nan", lambda: _allocate([0.1, NAN]), r"variance\[1\] is nan; .* finite and >= 0"),
    ("variance inf", lambda: _allocate([math.inf, 1]), r"variance\[0\] is inf"),
    ("variance negative", lambda: _allocate([0.1, 0.2, -3.0]), r"variance\[2\] is -3"),
    ("variance empty", lambda: _allocate([]), r"variance is an array of shape \(0,\)"),
    ("variance matrix", lambda: _allocate([C, C]), r"shape \(2, 3\)"),
    ("budget low", lambda: _allocate(budget=11), r"budget is 11; .*\[12, 60\] for 3 prompts"),
    ("budget high", lambda: _allocate(budget=61), r"budget is 61; .*\[12, 60\]"),
    ("budget real", lambda: _allocate(budget=30.5), r"budget is 30.5; .*whole number"),
    ("budget nan", lambda: _allocate(budget=NAN), r"budget is nan"),
    ("bounds crossed", lambda: _allocate(low=9, high=8), r"n_low is 9; .*at most n_high = 8"),
    ("n_low negative", lambda: _allocate(low=-1), r"n_low is -1; .*at least 0"),
    ("n_low real", lambda: _allocate(low=4.5), r"n_low is 4.5"),
    ("n_low bool", lambda: _allocate(low=True), r"n_low is True"),
    ("n_high real", lambda: _allocate(high=20.5), r"n_high is 20.5"),
    ("rule", lambda: _allocate(rule="greedy"), r"rule is 'greedy'; .*one of optimal, uniform"),
    ("objective", lambda: _allocate(objective="grpo"), r"objective is 'grpo'; .*neyman"),
    ("neyman from 0", lambda: _allocate(low=0), r"n_low is 0; .*at least 1 for objective 'neyman'"),
    ("rloo from 1", lambda: _allocate(low=1, objective="rloo"), r"at least 2 for objective 'rloo'"),
    ("drgrpo from 2", lambda: _allocate(low=2, objective="drgrpo"), r"at least 3 .* 'drgrpo'"),
    ("cost and rule", lambda: _allocate(cost=C, rule="uniform"), r"cost is given .*rule='optimal'"),
    ("cost shape", lambda: _allocate(cost=[1.0]), r"cost is of shape \(1,\)"),
    ("cost zero", lambda: _allocate(cost=[1.0, 0.0, 1.0]), r"cost is 0.0; .*positive"),
    ("cost budget", lambda: _allocate(budget=1.0, cost=[1.0] * 3), r"budget is 1.0"),
    ("weight shape", lambda: _allocate(weight=[1.0]), r"weight is of shape"),
    ("weight nan", lambda: _allocate(weight=[1, NAN, 1]), r"weight\[1\] is nan"),
    ("weight overflow", lambda: _allocate(weight=[1e200, 1, 1]), r"variance\[0\] is inf"),
    ("kkt drgrpo", lambda: continuous(C, 30, 4, 20, objective="drgrpo"), r"objective is 'drgrpo'"),
    ("kkt budget", lambda: continuous(C, 3.0, 4, 20), r"budget is 3.0"),
    ("kkt budget nan", lambda: continuous(C, NAN, 4, 20), r"budget is nan"),
    ("kkt n_low", lambda: continuous(C, 30, 1, 20, objective="rloo"), r"n_low is 1"),
    ("shares", lambda: largest_remainder([1.5, 2.5], 9), r"total is 9; .*\[3, 5\]"),
    ("shares nan", lambda: largest_remainder([NAN], 1), r"shares\[0\] is nan"),
    ("value n", lambda: objective_value(C, [1, 2, 3], "rloo"), r"n is 1.0; .*at least 2"),
    ("value shape", lambda: objective_value(C, [1, 2]), r"n is of shape \(2,\)"),
    (
        "pilot share",
        lambda: stage_weights([4], [4], pilot_share=1.0),
        r"pilot_share is 1.0; .*\(0, 1\)",
    ),
    ("no topup", lambda: stage_weights([4, 4], [4, 0], pilot_share=0.5), r"n_topup is 0.0; .*1"),
    ("stage shape", lambda: stage_weights([4, 4], [4], pilot_share=0.5), r"n_topup is of shape"),
    ("pooled real", lambda: pooled_weights_biased([4.5], [4]), r"n_pilot is 4.5"),
    ("pooled shape", lambda: pooled_weights_biased([4], [4, 4]), r"n_topup is of shape"),
    ("pilot too big", lambda: top_up_bounds(3, 60, 19, 2, 20), r"n_pilot is 19; .*n_high - 2 = 18"),
    ("pilot budget", lambda: top_up_bounds(3, 14, 4, 2, 20), r"budget is 14; .*\[18, 60\]"),
    # statistics
    ("k above G", lambda: posterior_variance([1, 5], [2, 4]), r"k is 5.0; .*\[0, G\], G = 4"),
    ("G nan", lambda: unbiased_variance(1, NAN), r"G is nan"),
    ("G negative", lambda: unbiased_variance(0, -1), r"G is -1.0; .*finite and >= 0"),
    ("k negative", lambda: official_rank(-1, 4), r"k is -1"),
    ("prior zero", lambda: posterior_variance(1, 2, (0, 1)), r"prior is \(0, 1\); .*positive"),
    ("prior one", lambda: PromptStats(prior=(1.0,)), r"prior is \(1.0,\)"),
    ("discount", lambda: PromptStats(discount=1.5), r"discount is 1.5; .*\[0, 1\]"),
    ("source", lambda: PromptStats(source="guess"), r"source is 'guess'"),
    ("correct", lambda: PromptStats().observe("a", 0.5), r"correct is 0.5; .*True, False or None"),
    ("correct nan", lambda: PromptStats().observe("a", NAN), r"correct is nan"),
    ("energy", lambda: PromptStats().observe("a", True, -1.0), r"energy is -1"),
    ("energy nan", lambda: PromptStats().observe("a", True, NAN), r"energy is nan"),
    ("prior_mean", lambda: PromptStats().variance("ab", [0.5]), r"prior_mean is of shape \(1,\)"),
    ("state", lambda: PromptStats().load_state_dict({"prompts": []}), r"without 'unscored'"),
    ("strengths", lambda: fit_critic_strength([1], [2], [0.5], []), r"candidates is \[\]"),
    ("strength shape", lambda: fit_critic_strength([1], [2], [0.5, 0.5]), r"prior_mean"),
]


@pytest.mark.parametrize(("call", "message"), named(CASES))
def test_refused_with_argument_value_and_bound(call: Callable[[], Any], message: str) -> None:
    refused(call, message)
