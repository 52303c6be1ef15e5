"""Bad input: one line that names the argument, the value and the bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dynamo_core.algorithms import kl
from dynamo_core.algorithms import modulation as mod
from dynamo_core.algorithms.advantages import (
    gae,
    grpo,
    posterior_std_grpo,
    reinforce_pp,
    rloo,
    whiten,
)
from dynamo_core.algorithms.distillation import cross_entropy, forward_kl, generalised_jsd
from dynamo_core.algorithms.effective_weights import effective_weights, kappa
from dynamo_core.algorithms.entropy_methods import (
    clip_cov,
    entropy_advantage,
    fork_tokens,
    kl_cov,
    kl_cov_penalty,
    w_reinforce,
)
from dynamo_core.algorithms.losses import (
    aggregation_weights,
    cispo_loss,
    clip_metrics,
    entropy_bonus,
    explained_variance,
    gspo_loss,
    overlong_mask,
    policy_loss,
    soft_overlong_punishment,
    truncated_importance_weights,
    value_loss,
)
from dynamo_core.algorithms.preference import dpo_loss, dpo_metrics, implicit_reward
from dynamo_core.algorithms.schedules import cosine, factor, linear
from dynamo_core.evaluation.passk import pass_at_k

from .refusals import named, refused

NAN = math.nan
BT = torch.rand(2, 3, dtype=torch.float64)
SHORT = torch.rand(2, 2, dtype=torch.float64)
ONES, NONE = torch.ones(2, 3), torch.zeros(2, 3)
GROUP = torch.tensor([0, 1])
LOGITS = torch.randn(2, 3, 5)
ACTIONS = torch.zeros(2, 3, dtype=torch.long)
CLIP: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.2}
R = torch.tensor([1.0, 0.0])


def _change(**options: Any) -> Any:
    return mod.entropy_change(
        options.pop("logits", LOGITS), ACTIONS, options.pop("old", BT), BT, ONES,
        **{"expectation": "vocabulary", **CLIP, **options},
    )  # fmt: skip


CASES: list[tuple[str, Callable[[], Any], str]] = [
    # modulation
    ("expectation", lambda: _change(expectation="batch"), r"expectation is 'batch'; .*vocabulary"),
    ("logits shape", lambda: _change(logits=LOGITS[:1]), r"logits is of shape \(1, 3, 5\)"),
    ("actions shape", lambda: mod.logit_statistics(LOGITS, ACTIONS[:1]), r"actions is of shape"),
    ("old shape", lambda: _change(old=SHORT), r"old_log_prob is of shape \(2, 2\); .*\(2, 3\)"),
    ("weight shape", lambda: _change(weight=SHORT), r"weight is of shape"),
    ("eps_low", lambda: _change(eps_low=-0.1), r"eps_low is -0.1; .*\[0, 1\]"),
    ("eps_high", lambda: _change(eps_high=NAN), r"eps_high is nan"),
    ("chunk", lambda: mod.logit_statistics(LOGITS, ACTIONS, chunk=0), r"chunk is 0; .*at least 1"),
    ("no chunk", lambda: mod.LogitSums().statistics(BT), r"LogitSums is empty"),
    ("alpha", lambda: mod.compensation(BT, BT, ONES, alpha=-1), r"alpha is -1"),
    ("comp shape", lambda: mod.compensation(SHORT, BT, ONES, alpha=1), r"entropy is of shape"),
    ("comp empty", lambda: mod.compensation(BT, BT, NONE, alpha=1), r"mask is empty"),
    (
        "lambda",
        lambda: mod.stabilisation(BT, ONES, lambda_min=2, gamma=1, tau=1),
        r"lambda_min is 2",
    ),
    ("gamma", lambda: mod.stabilisation(BT, ONES, lambda_min=0, gamma=-1, tau=1), r"gamma is -1"),
    ("tau", lambda: mod.stabilisation(BT, ONES, lambda_min=0, gamma=1, tau=NAN), r"tau is nan"),
    ("normaliser", lambda: mod.change_scale(BT, ONES, normaliser="mean"), r"normaliser is 'mean'"),
    ("normaliser 0", lambda: mod.change_scale(BT, ONES, normaliser=0.0), r"normaliser is 0.0"),
    ("scale empty", lambda: mod.change_scale(BT, NONE), r"mask is empty"),
    ("quantile", lambda: mod.quantile(BT, ONES, 1.5), r"q is 1.5; .*\[0, 1\]"),
    ("quantile empty", lambda: mod.quantile(BT, NONE, 0.5), r"mask is empty"),
    ("modulate empty", lambda: mod.modulate(BT, BT, BT, NONE, config=mod.DECAY5), r"mask is empty"),
    (
        "modulate constant",
        lambda: mod.modulate(BT, BT, BT, ONES, config=replace(mod.DECAY5, alpha=NAN)),
        r"alpha is nan",
    ),
    ("metrics shape", lambda: mod.modulation_metrics(BT, SHORT, ONES), r"after is of shape"),
    ("bracket rows", lambda: mod.sequence_bracket(BT[0], ONES[0]), r"pi_lambda is of shape \(3,\)"),
    # advantages
    ("rewards shape", lambda: rloo(BT, GROUP), r"rewards is of shape \(2, 3\)"),
    ("rewards empty", lambda: rloo(torch.zeros(0), GROUP[:0]), r"rewards is of shape \(0,\)"),
    ("rewards nan", lambda: grpo(torch.tensor([1, NAN]), GROUP), r"rewards\[1\] is nan; .*finite"),
    ("first nan", lambda: grpo(torch.tensor([1, NAN, NAN]), ACTIONS[0]), r"rewards\[1\] is nan"),
    ("group shape", lambda: rloo(R, torch.tensor([0])), r"group is of shape \(1,\); .*\(2,\)"),
    ("ddof", lambda: grpo(R, GROUP, ddof=2), r"ddof is 2; .*0 or 1"),
    ("floor", lambda: grpo(R, GROUP, floor=-1e-6), r"floor is -1e-06"),
    ("baseline", lambda: reinforce_pp(R, GROUP, baseline="mean"), r"baseline is 'mean'"),
    ("lengths", lambda: reinforce_pp(R, GROUP, lengths=torch.ones(3)), r"lengths is of shape"),
    (
        "posterior",
        lambda: posterior_std_grpo(R, GROUP, posterior_variance=torch.zeros(2)),
        r"posterior_variance is 0.0; .*positive",
    ),
    ("gae gamma", lambda: gae(BT, BT, ONES, gamma=1.1, lam=1), r"gamma is 1.1; .*\[0, 1\]"),
    ("gae lam", lambda: gae(BT, BT, ONES, gamma=1, lam=-0.1), r"lam is -0.1"),
    ("gae shape", lambda: gae(BT, SHORT, ONES, gamma=1, lam=1), r"values is of shape \(2, 2\)"),
    ("gae rank", lambda: gae(BT[0], BT[0], ONES[0], gamma=1, lam=1), r"mask is of shape \(3,\)"),
    ("gae empty", lambda: gae(BT, BT, NONE, gamma=1, lam=1), r"mask is empty"),
    (
        "gae bootstrap",
        lambda: gae(BT, BT, ONES, gamma=1, lam=1, bootstrap=torch.ones(3)),
        r"bootstrap is of shape \(3,\)",
    ),
    ("whiten empty", lambda: whiten(BT, NONE), r"mask is empty"),
    ("whiten shape", lambda: whiten(SHORT, ONES, scope=(0, 1)), r"advantages is of shape \(2, 2\)"),
    ("whiten weight", lambda: whiten(BT, ONES, weight=SHORT), r"weight is of shape"),
    ("kappa p", lambda: kappa(torch.tensor([0.0]), 4, "rloo"), r"p is 0.0; .*\(0, 1\)"),
    ("kappa n", lambda: kappa(torch.tensor([0.5]), 0, "rloo"), r"n is 0"),
    ("kappa name", lambda: kappa(torch.tensor([0.5]), 4, "gae"), r"estimator is 'gae'"),
    (
        "effective weighting",
        lambda: effective_weights(R, GROUP, estimator="rloo", weighting="flat"),
        r"weighting is 'flat'",
    ),
    # losses
    (
        "aggregation",
        lambda: aggregation_weights(ONES, GROUP, aggregation="mean"),
        r"aggregation is 'mean'",
    ),
    (
        "agg empty",
        lambda: aggregation_weights(NONE, GROUP, aggregation="token-mean"),
        r"mask is empty",
    ),
    (
        "agg rank",
        lambda: aggregation_weights(ONES[0], GROUP, aggregation="token-mean"),
        r"mask is of shape",
    ),
    (
        "agg group",
        lambda: aggregation_weights(ONES, GROUP[:1], aggregation="token-mean"),
        r"group is of",
    ),
    (
        "horizon missing",
        lambda: aggregation_weights(ONES, GROUP, aggregation="prompt-mean-token-sum-norm"),
        r"horizon is None; .*positive",
    ),
    (
        "horizon zero",
        lambda: aggregation_weights(ONES, GROUP, aggregation="seq-mean-token-sum-norm", horizon=0),
        r"horizon is 0; .*positive",
    ),
    ("loss shape", lambda: policy_loss(BT, SHORT, BT, ONES, **CLIP), r"old_log_prob is of shape"),
    ("loss weights", lambda: policy_loss(BT, BT, BT, SHORT, **CLIP), r"weights is of shape"),
    (
        "loss clip",
        lambda: policy_loss(BT, BT, BT, ONES, eps_low=1.5, eps_high=1),
        r"eps_low is 1.5",
    ),
    (
        "dual",
        lambda: policy_loss(BT, BT, BT, ONES, **CLIP, dual_clip=1.0),
        r"dual_clip is 1.0; .*above 1",
    ),
    (
        "dual nan",
        lambda: clip_metrics(BT, BT, BT, ONES, **CLIP, dual_clip=NAN),
        r"dual_clip is nan",
    ),
    ("gspo", lambda: gspo_loss(BT, BT, SHORT, ONES, **CLIP), r"advantages is of shape"),
    ("cispo", lambda: cispo_loss(BT, BT, BT, ONES, eps_high=-1), r"eps_high is -1"),
    ("value shape", lambda: value_loss(BT, BT, SHORT, ONES), r"returns is of shape"),
    ("value clip", lambda: value_loss(BT, BT, BT, ONES, clip=0), r"clip is 0; .*positive"),
    ("explained", lambda: explained_variance(BT, BT, NONE), r"mask is empty"),
    ("bonus", lambda: entropy_bonus(BT, ONES, coefficient=-1), r"coefficient is -1"),
    ("tis cap", lambda: truncated_importance_weights(BT, BT, ONES, cap=0), r"cap is 0; .*positive"),
    (
        "tis floor",
        lambda: truncated_importance_weights(BT, BT, ONES, floor=3),
        r"floor is 3; .*\[0, 2\]",
    ),
    ("truncated", lambda: overlong_mask(ONES, R[:1]), r"truncated is of shape"),
    (
        "buffer",
        lambda: soft_overlong_punishment(R, max_length=9, buffer=0),
        r"buffer is 0; .*max_length = 9",
    ),
    ("kind", lambda: kl.estimate(BT, BT, "k4"), r"kind is 'k4'; .*k1, k2, k3"),
    ("kl shape", lambda: kl.estimate(BT, SHORT, "k1"), r"ref_log_prob is of shape"),
    ("kl weights", lambda: kl.loss(BT, BT, SHORT, kind="k2"), r"weights is of shape"),
    ("kl old", lambda: kl.loss(BT, BT, ONES, kind="k2", old_log_prob=SHORT), r"old_log_prob is of"),
    (
        "kl coefficient",
        lambda: kl.reward_penalty(BT, BT, ONES, coefficient=NAN),
        r"coefficient is nan",
    ),
    ("kl fixed", lambda: kl.FixedController(-1), r"coefficient is -1"),
    (
        "kl target",
        lambda: kl.AdaptiveController(1, target=0, horizon=1),
        r"target is 0; .*positive",
    ),
    (
        "kl update",
        lambda: kl.AdaptiveController(1, target=1, horizon=1).update(NAN, 1),
        r"kl is nan",
    ),
    ("kl state", lambda: kl.FixedController(1).load_state_dict({}), r"without 'coefficient'"),
    # distillation
    (
        "vocabulary",
        lambda: forward_kl(LOGITS, LOGITS[..., :4], ONES),
        r"teacher_logits is of shape",
    ),
    ("vocabulary of the student", lambda: forward_kl(LOGITS[..., :4], LOGITS, ONES), r"teacher_logits is of"),
    ("token shape", lambda: forward_kl(LOGITS, LOGITS, SHORT), r"student_logits is of shape"),
    ("temperature", lambda: forward_kl(LOGITS, LOGITS, ONES, temperature=0), r"temperature is 0"),
    ("beta", lambda: generalised_jsd(LOGITS, LOGITS, ONES, beta=1.1), r"beta is 1.1; .*\[0, 1\]"),
    ("targets", lambda: cross_entropy(LOGITS, ACTIONS[:1], ONES), r"targets is of shape"),
    # preference
    ("dpo beta", lambda: implicit_reward(R, R, R, beta=0), r"beta is 0; .*positive and finite"),
    ("dpo beta nan", lambda: implicit_reward(R, R, R, beta=NAN), r"beta is nan"),
    ("dpo policy", lambda: implicit_reward(R[:1], R, R, beta=1), r"policy is of shape \(1,\)"),
    ("dpo tokens", lambda: implicit_reward(BT, BT, BT, beta=1), r"weights is of shape \(2, 3\)"),
    ("dpo shape", lambda: dpo_loss(R, R[:1], R), r"rejected is of shape \(1,\)"),
    ("dpo metrics", lambda: dpo_metrics(R[:1], R, R), r"chosen is of shape \(1,\)"),
    ("dpo smoothing", lambda: dpo_loss(R, R, R, label_smoothing=0.5), r"label_smoothing is 0.5; .*\[0, 0.5\)"),
    # schedules, entropy methods, evaluation
    ("schedule", lambda: factor("step", 0, total=9), r"name is 'step'; .*constant, cosine, linear"),
    ("step", lambda: linear(-1, total=9), r"step is -1"),
    ("warmup", lambda: linear(0, total=9, warmup=9), r"warmup is 9; .*below total = 9"),
    ("final", lambda: cosine(0, total=9, final=2), r"final is 2"),
    ("cov share", lambda: kl_cov(BT, BT, ONES, share=2), r"share is 2"),
    ("cov empty", lambda: kl_cov(BT, BT, NONE), r"mask is empty"),
    (
        "cov band",
        lambda: clip_cov(BT, BT, ONES, generator=torch.Generator(), low=6.0),
        r"low is 6.0; .*at most high = 5",
    ),
    ("cov penalty", lambda: kl_cov_penalty(BT, BT, ONES, ONES[:1] > 0), r"chosen is of shape"),
    ("bonus kappa", lambda: entropy_advantage(BT, BT, ONES, kappa=1), r"kappa is 1; .*above 1"),
    ("reinforce", lambda: w_reinforce(torch.tensor([0.0, 0.5])), r"correct is 0.5; .*0 or 1"),
    ("reinforce shape", lambda: w_reinforce(BT), r"correct is of shape"),
    ("fork share", lambda: fork_tokens(BT, ONES, share=0), r"share is 0; .*\(0, 1\]"),
    ("pass k", lambda: pass_at_k(4, 2, 5), r"k is 5; .*\[1, n\], n = 4"),
    ("pass k 0", lambda: pass_at_k(4, 2, 0), r"k is 0"),
    ("pass c", lambda: pass_at_k([4, 4], [2, 5], 1), r"c is 5; .*\[0, n\], n = 4"),
    ("pass n", lambda: pass_at_k(4.5, 2, 1), r"n is 4.5; .*whole number"),
    ("pass nan", lambda: pass_at_k(4, np.nan, 1), r"c is nan"),
]


@pytest.mark.parametrize(("call", "message"), named(CASES))
def test_refused_with_argument_value_and_bound(call: Callable[[], Any], message: str) -> None:
    refused(call, message)
