"""Public names and signatures: others refer to them. Change on purpose only."""

from __future__ import annotations

import inspect
import pkgutil
import sys
from importlib import import_module
from typing import Any

import pytest

SIGNATURES = {
    "algorithms.allocation.allocate": (
        "(variance, budget, n_low, n_high, *, rule, objective='neyman', cost=None, weight=None)"
    ),
    "algorithms.allocation.continuous": (
        "(variance, budget, n_low, n_high, *, objective='neyman', cost=None, weight=None)"
    ),
    "algorithms.allocation.largest_remainder": "(shares, total)",
    "algorithms.allocation.stage_weights": "(n_pilot, n_topup, *, pilot_share)",
    "algorithms.allocation.pooled_weights_biased": "(n_pilot, n_topup)",
    "algorithms.prompt_stats.unbiased_variance": "(k, G)",
    "algorithms.prompt_stats.posterior_variance": "(k, G, prior=(0.5, 0.5))",
    "algorithms.prompt_stats.official_rank": "(k, G)",
    "algorithms.prompt_stats.PromptStats": (
        "(prior=(0.5, 0.5), discount=0.5, *, critic_strength=6.0, source='posterior', energy_strength=1.0)"
    ),
    "algorithms.prompt_stats.PromptStats.observe": "(self, prompt_id, correct, energy=None)",
    "algorithms.prompt_stats.PromptStats.end_step": "(self)",
    "algorithms.prompt_stats.PromptStats.variance": "(self, prompt_ids, prior_mean=None)",
    "algorithms.prompt_stats.PromptStats.counts": "(self, prompt_ids)",
    "algorithms.prompt_stats.PromptStats.lifetime_counts": "(self, prompt_ids)",
    "algorithms.prompt_stats.PromptStats.state_dict": "(self)",
    "algorithms.prompt_stats.PromptStats.load_state_dict": "(self, state)",
    "algorithms.prompt_stats.PromptStats.metrics": "(self)",
    "algorithms.modulation.entropy_change": (
        "(logits, actions, old_log_prob, advantages, mask, *, eps_low, eps_high, expectation, weight=None)"
    ),
    "algorithms.modulation.entropy_change_from_bracket": (
        "(bracket, log_prob, old_log_prob, advantages, mask, *, eps_low, eps_high, weight=None)"
    ),
    "algorithms.modulation.logit_statistics": "(logits, actions, *, chunk=16384)",
    "algorithms.modulation.compensation": "(entropy, advantages, mask, *, alpha, scope=None)",
    "algorithms.modulation.stabilisation": (
        "(entropy_change, mask, *, lambda_min, gamma, tau, normaliser='max', scale=None)"
    ),
    "algorithms.modulation.modulate": (
        "(advantages, entropy, entropy_change, mask, *, config, scope=None, scale=None)"
    ),
    "algorithms.modulation.quantile": "(values, mask, q)",
    "algorithms.advantages.gae": "(rewards, values, mask, *, gamma, lam, bootstrap=None)",
    "algorithms.advantages.grpo": "(rewards, group, *, ddof=1, floor=1e-06)",
    "algorithms.advantages.dr_grpo": "(rewards, group)",
    "algorithms.advantages.rloo": "(rewards, group)",
    "algorithms.advantages.reinforce_pp": "(rewards, group, *, baseline='batch', lengths=None)",
    "algorithms.advantages.posterior_std_grpo": "(rewards, group, *, posterior_variance)",
    "algorithms.advantages.whiten": "(advantages, mask, *, weight=None, scope=None)",
    "algorithms.effective_weights.kappa": "(p, n, estimator)",
    "algorithms.effective_weights.effective_weights": "(p, n, *, estimator, weighting)",
    "algorithms.losses.aggregation_weights": "(mask, group, *, aggregation, horizon=None)",
    "algorithms.losses.policy_loss": (
        "(log_prob, old_log_prob, advantages, weights, *, eps_low, eps_high, dual_clip=None)"
    ),
    "algorithms.losses.clip_metrics": (
        "(log_prob, old_log_prob, advantages, weights, *, eps_low, eps_high, dual_clip=None)"
    ),
    "algorithms.losses.value_loss": "(values, old_values, returns, weights, *, clip=None)",
    "algorithms.losses.gspo_loss": ("(log_prob, old_log_prob, advantages, weights, *, eps_low, eps_high)"),
    "algorithms.losses.cispo_loss": ("(log_prob, old_log_prob, advantages, weights, *, eps_high, eps_low=1.0)"),
    "algorithms.losses.entropy_bonus": "(entropy, weights, *, coefficient)",
    "algorithms.losses.truncated_importance_weights": (
        "(old_log_prob, rollout_log_prob, mask, *, cap=2.0, floor=None)"
    ),
    "algorithms.losses.overlong_mask": "(mask, truncated)",
    "algorithms.losses.soft_overlong_punishment": "(lengths, *, max_length, buffer)",
    "algorithms.kl.estimate": "(log_prob, ref_log_prob, kind)",
    "algorithms.kl.reward_penalty": "(log_prob, ref_log_prob, mask, *, coefficient, kind='k1')",
    "algorithms.kl.loss": "(log_prob, ref_log_prob, weights, *, kind, old_log_prob=None)",
    "algorithms.kl.AdaptiveController": "(coefficient, *, target, horizon)",
    "algorithms.distillation.forward_kl": ("(student_logits, teacher_logits, weights, *, temperature=1.0)"),
    "algorithms.distillation.reverse_kl": ("(student_logits, teacher_logits, weights, *, temperature=1.0)"),
    "algorithms.distillation.generalised_jsd": ("(student_logits, teacher_logits, weights, *, beta, temperature=1.0)"),
    "algorithms.distillation.cross_entropy": "(logits, targets, weights)",
    "algorithms.preference.dpo_loss": "(chosen, rejected, weights, *, label_smoothing=0.0)",
    "algorithms.preference.dpo_metrics": "(chosen, rejected, weights)",
    "algorithms.preference.implicit_reward": "(policy, reference, weights, *, beta)",
    "algorithms.schedules.factor": "(name, step, *, total, warmup=0, final=0.0)",
    "evaluation.passk.pass_at_k": "(n, c, k)",
}


def _find(path: str) -> Any:
    package, module, *names = path.split(".")
    found: Any = import_module(f"dynamo_core.{package}.{module}")
    for name in names:
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature(path: str) -> None:
    signature = inspect.signature(_find(path))
    bare = signature.replace(
        parameters=[p.replace(annotation=p.empty) for p in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    assert str(bare) == SIGNATURES[path]


def test_registries() -> None:
    assert _find("algorithms.allocation.RULES") == (
        "uniform", "optimal", "waterfall_variance", "waterfall_std"
    )  # fmt: skip
    assert _find("algorithms.modulation.EXPECTATIONS") == ("vocabulary", "sequence")
    assert _find("algorithms.kl.KINDS") == ("k1", "k2", "k3")
    assert sorted(_find("algorithms.schedules.SCHEDULES")) == ["constant", "cosine", "linear"]
    assert _find("algorithms.losses.AGGREGATIONS") == (
        "token-mean",
        "seq-mean-token-sum",
        "seq-mean-token-mean",
        "seq-mean-token-sum-norm",
        "prompt-mean-seq-mean-token-mean",
        "prompt-mean-token-mean",
        "prompt-mean-token-sum-norm",
        "official-seq-mean-token-sum-norm(no batch mean)",
    )


def test_algorithms_import_only_torch_numpy_and_errors() -> None:
    package = import_module("dynamo_core.algorithms")
    for module in pkgutil.iter_modules(package.__path__):
        source = inspect.getsource(import_module(f"dynamo_core.algorithms.{module.name}"))
        for line in source.splitlines():
            if line.startswith(("import ", "from ")):
                root = line.split()[1]
                allowed = root.startswith(("dynamo_core.algorithms", "dynamo_core.errors"))
                assert allowed or root.split(".")[0] in {*sys.stdlib_module_names, "torch", "numpy"}
