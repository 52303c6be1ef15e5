"""Every number's range, from both sides of its ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynamo_core.algorithms import distillation, kl, losses, schedules
from dynamo_core.algorithms import entropy_methods as methods
from dynamo_core.algorithms import modulation as mod
from dynamo_core.algorithms.advantages import gae, grpo, posterior_std_grpo
from dynamo_core.algorithms.allocation import (
    allocate,
    continuous,
    largest_remainder,
    objective_value,
    pooled_weights_biased,
    stage_weights,
    top_up_bounds,
)
from dynamo_core.algorithms.effective_weights import kappa
from dynamo_core.algorithms.prompt_stats import PromptStats, fit_critic_strength, posterior_variance
from dynamo_core.errors import AlgorithmError

TINY = 1e-9
C = [0.1, 0.2, 0.3]
BT = torch.rand(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ONES, GROUP, R = torch.ones(2, 3), torch.tensor([0, 0]), torch.tensor([1.0, 0.0])
LOGITS, ACTIONS = torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.long)
CLIP: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.2}


def _change(**options: Any) -> Any:
    return mod.entropy_change_from_bracket(BT, BT, BT, BT, ONES, **{**CLIP, **options})


def _ppo(**options: Any) -> Any:
    return losses.policy_loss(BT, BT, BT, ONES, **{**CLIP, **options})


def _stabilisation(**options: Any) -> Any:
    return mod.stabilisation(BT, ONES, **{"lambda_min": 0.5, "gamma": 1.0, "tau": 0.5, **options})


def _clip_cov(**options: Any) -> Any:
    return methods.clip_cov(BT, BT, ONES, generator=torch.Generator(), **options)


def _adaptive(coefficient: float = 1.0, target: float = 1.0, horizon: Any = 1) -> Any:
    return kl.AdaptiveController(coefficient, target=target, horizon=horizon)


def _tis(**options: Any) -> Any:
    return losses.truncated_importance_weights(BT, BT, ONES, **options)


# name, call, accepted, refused
BOUNDS: list[tuple[str, Callable[[Any], Any], tuple[Any, ...], tuple[Any, ...]]] = [
    ("allocate budget", lambda x: allocate(C, x, 4, 20, rule="uniform"), (12, 60), (11, 61, -1)),
    ("allocate n_low", lambda x: allocate(C, 30, x, 20, rule="uniform"), (0, 10), (-1, 11)),
    ("allocate n_high", lambda x: allocate(C, 30, 10, x, rule="uniform"), (10, 11), (9,)),
    ("neyman n_low", lambda x: allocate(C, 30, x, 20, rule="optimal"), (1, 2), (0,)),
    ("rloo n_low", lambda x: allocate(C, 30, x, 20, rule="optimal", objective="rloo"), (2, 3), (1,)),
    ("drgrpo n_low", lambda x: allocate(C, 30, x, 20, rule="optimal", objective="drgrpo"), (3, 4), (2,)),
    ("cost budget", lambda x: allocate(C, x, 4, 20, rule="optimal", cost=[0.5] * 3), (6, 6.5, 30), (5.9, 30.1, -1)),
    ("cost", lambda x: continuous([0.1], 4 * x, 2, 20, cost=[x]), (TINY, 5), (0.0, -TINY)),
    ("continuous budget", lambda x: continuous(C, x, 4, 20), (12, 12.5, 60), (12 - TINY, 60 + TINY, -1, 1e400)),
    ("continuous neyman n_low", lambda x: continuous(C, 30, x, 20), (1,), (0,)),
    ("continuous rloo n_low", lambda x: continuous(C, 30, x, 20, objective="rloo"), (2,), (1,)),
    ("value n, rloo", lambda x: objective_value([1.0], [x], "rloo"), (2, 3), (1, 2 - TINY)),
    ("value n, neyman", lambda x: objective_value([1.0], [x]), (1, 2), (0, 1 - TINY)),
    ("value n, drgrpo", lambda x: objective_value([1.0], [x], "drgrpo"), (1, 2), (0, 1 - TINY)),
    ("remainder total", lambda x: largest_remainder([1.5, 2.5], x), (3, 4, 5), (2, 6)),
    ("pilot share", lambda x: stage_weights([4], [4], pilot_share=x), (TINY, 1 - TINY), (0, 1)),
    ("pilot", lambda x: stage_weights([x], [4], pilot_share=0.5), (1, 2), (0, 1.5)),
    ("top-up", lambda x: stage_weights([4], [x], pilot_share=0.5), (1, 2), (0, 1.5)),
    ("pooled pilot", lambda x: pooled_weights_biased([x], [4]), (1, 2), (0,)),
    ("pooled top-up", lambda x: pooled_weights_biased([4], [x]), (0, 1), (-1, 0.5)),
    ("top_up pilot", lambda x: top_up_bounds(3, 60, x, 2, 20), (1, 18), (0, 19)),
    ("top_up budget", lambda x: top_up_bounds(3, x, 4, 2, 20), (18, 60), (17, 61)),
    ("top_up least", lambda x: top_up_bounds(3, 30, 4, 2, 20, least=x), (1, 2), (0,)),
    ("k", lambda x: posterior_variance(x, 4), (0, 4), (-TINY, 4 + TINY)),
    ("G", lambda x: posterior_variance(0, x), (0, 1), (-TINY,)),
    ("alpha", lambda x: posterior_variance(1, 4, (x, 1)), (TINY,), (0.0, 1e400)),
    ("beta", lambda x: posterior_variance(1, 4, (1, x)), (TINY,), (0.0, -1.0)),
    ("prior", lambda x: posterior_variance(1, 4, (1.0,) * x), (2,), (1, 3)),
    ("discount", lambda x: PromptStats(discount=x), (0, 1), (-TINY, 1 + TINY)),
    ("critic strength", lambda x: PromptStats(critic_strength=x), (1e-6, 1), (0, 1e-7)),
    ("energy strength", lambda x: PromptStats(energy_strength=x), (1e-6, 1), (0, 1e-7)),
    ("energy", lambda x: PromptStats().observe("a", None, x), (0, 1), (-TINY,)),
    ("correct", lambda x: PromptStats().observe("a", x), (0, 1, True, None), (0.5, 2, -1)),
    ("candidates", lambda x: fit_critic_strength([1], [2], [0.5], [x]), (1e-9, 1), (0, -1)),
    ("unscored", lambda x: PromptStats().load_state_dict({"prompts": [], "unscored": x, "steps": 0}), (0, 1), (-1,)),
    ("steps", lambda x: PromptStats().load_state_dict({"prompts": [], "unscored": 0, "steps": x}), (0, 1), (-1,)),
    ("change eps_low", lambda x: _change(eps_low=x), (0, 1), (-TINY, 1 + TINY)),
    ("change eps_high", lambda x: _change(eps_high=x), (0, 9), (-TINY,)),
    ("ppo eps_low", lambda x: _ppo(eps_low=x), (0, 1), (-TINY, 1 + TINY)),
    ("ppo eps_high", lambda x: _ppo(eps_high=x), (0, 9), (-TINY,)),
    ("ppo dual_clip", lambda x: _ppo(dual_clip=x), (None, 1 + TINY), (1, 0)),
    ("chunk", lambda x: mod.logit_statistics(LOGITS, ACTIONS, chunk=x), (1, 99), (0, 1.5)),
    ("quantile", lambda x: mod.quantile(BT, ONES, x), (0, 1), (-TINY, 1 + TINY)),
    ("normaliser", lambda x: mod.change_scale(BT, ONES, normaliser=x), (TINY, 1, "max"), (0, 1 + TINY, "mean")),
    ("compensation alpha", lambda x: mod.compensation(BT, BT, ONES, alpha=x), (0, 9), (-TINY,)),
    ("lambda_min", lambda x: _stabilisation(lambda_min=x), (0, 1), (-TINY, 1 + TINY)),
    ("gamma", lambda x: _stabilisation(gamma=x), (0, 9), (-TINY,)),
    ("tau", lambda x: _stabilisation(tau=x), (-1, 0, 9), (float("nan"), 1e400)),
    ("ddof", lambda x: grpo(R, GROUP, ddof=x), (0, 1), (-1, 2)),
    ("floor", lambda x: grpo(R, GROUP, floor=x), (0, 1), (-TINY,)),
    ("posterior std", lambda x: posterior_std_grpo(R, GROUP, posterior_variance=x * ONES[0, :2]), (TINY,), (0, -1)),
    ("gae gamma", lambda x: gae(BT, BT, ONES, gamma=x, lam=1), (0, 1), (-TINY, 1 + TINY)),
    ("gae lam", lambda x: gae(BT, BT, ONES, gamma=1, lam=x), (0, 1), (-TINY, 1 + TINY)),
    ("kappa p", lambda x: kappa(torch.tensor([x]), 4, "rloo"), (1e-6, 1 - 1e-6), (0.0, 1.0)),
    ("kappa n", lambda x: kappa(torch.tensor([0.5]), x, "rloo"), (1, 2), (0,)),
    ("value clip", lambda x: losses.value_loss(BT, BT, BT, ONES, clip=x), (None, TINY), (0, -1)),
    ("bonus", lambda x: losses.entropy_bonus(BT, ONES, coefficient=x), (0, 9), (-TINY,)),
    ("importance cap", lambda x: _tis(cap=x), (TINY, 9), (0,)),
    ("importance floor", lambda x: _tis(floor=x), (None, 0, 2), (-TINY, 2 + TINY)),
    ("overlong buffer", lambda x: losses.soft_overlong_punishment(R, max_length=9, buffer=x), (1, 9), (0, 10)),
    ("penalty", lambda x: kl.reward_penalty(BT, BT, ONES, coefficient=x), (0, 9), (-TINY,)),
    ("fixed", kl.FixedController, (0, 9), (-TINY,)),
    ("restored", lambda x: kl.FixedController(1).load_state_dict({"coefficient": x}), (0, 9), (-TINY,)),
    ("adaptive", lambda x: _adaptive(coefficient=x), (TINY,), (0,)),
    ("target", lambda x: _adaptive(target=x), (TINY,), (0,)),
    ("horizon", lambda x: _adaptive(horizon=x), (1,), (0,)),
    ("update n", lambda x: _adaptive().update(1.0, x), (0, 9), (-1,)),
    ("update kl", lambda x: _adaptive().update(x, 1), (-1, 0, 9), (float("nan"), 1e400)),
    ("temperature", lambda x: distillation.forward_kl(LOGITS, LOGITS, ONES, temperature=x), (0.1, 9), (0, -1)),
    ("jsd beta", lambda x: distillation.generalised_jsd(LOGITS, LOGITS, ONES, beta=x), (0, 1), (-TINY, 1 + TINY)),
    ("schedule step", lambda x: schedules.linear(x, total=9), (0, 99), (-1, 0.5)),
    ("schedule total", lambda x: schedules.cosine(0, total=x), (1, 9), (0,)),
    ("schedule warmup", lambda x: schedules.linear(0, total=9, warmup=x), (0, 8), (-1, 9)),
    ("linear final", lambda x: schedules.linear(0, total=9, final=x), (0, 1), (-TINY, 1 + TINY)),
    ("cosine final", lambda x: schedules.cosine(0, total=9, final=x), (0, 1), (-TINY, 1 + TINY)),
    ("clip_cov share", lambda x: _clip_cov(share=x), (0, 1), (-TINY, 1 + TINY)),
    ("clip_cov low", lambda x: _clip_cov(low=x), (-1, 5), (5 + TINY,)),
    ("kl_cov share", lambda x: methods.kl_cov(BT, BT, ONES, share=x), (0, 1), (-TINY, 1 + TINY)),
    ("kl_cov penalty", lambda x: methods.kl_cov_penalty(BT, BT, ONES, ONES > 0, coefficient=x), (0, 9), (-TINY,)),
    ("advantage alpha", lambda x: methods.entropy_advantage(BT, BT, ONES, alpha=x), (0, 9), (-TINY,)),
    ("advantage kappa", lambda x: methods.entropy_advantage(BT, BT, ONES, kappa=x), (1 + TINY,), (1, 0)),
    ("reinforce positive", lambda x: methods.w_reinforce(R, positive=x), (0, 9), (-TINY,)),
    ("reinforce correct", lambda x: methods.w_reinforce(torch.tensor([x])), (0, 1, True), (0.5, 2, -1)),
    ("fork share", lambda x: methods.fork_tokens(BT, ONES, share=x), (TINY, 1), (0, 1 + TINY)),
]


@pytest.mark.parametrize(("call", "accepted", "refused"), [pytest.param(*rest, id=name) for name, *rest in BOUNDS])
def test_a_range_ends_where_it_says(
    call: Callable[[Any], Any], accepted: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    for value in accepted:
        call(value)
    for value in refused:
        with pytest.raises(AlgorithmError, match="must be"):
            call(value)
