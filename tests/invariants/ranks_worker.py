"""What each rank of the invariance tests runs: three policy (and critic) updates on stored rollouts, in many ways.

python -m tests.invariants.ranks_worker FOLDER      (or under torchrun); rank 0 writes one file a case
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel

from dynamo_core.config.base import Optimizer, Resources
from dynamo_core.config.models import Lora
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.rollout.batch import policy_batch
from dynamo_core.rollout.collector import ScoredRollout
from dynamo_core.rollout.engine import ScriptedEngine
from dynamo_core.stages.__main__ import leave
from dynamo_core.training import distributed
from dynamo_core.training.credit import credit, modulated
from dynamo_core.training.critic import Critic, ValueLearner, Values
from dynamo_core.training.deepspeed import engine as engine_module
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.lora import add_adapters
from dynamo_core.training.models import DTYPES
from dynamo_core.training.objective import Objective
from dynamo_core.training.policy import TokenScorer
from dynamo_core.training.policy_update import PolicyBatch, mini_batches, update
from dynamo_core.types import RolloutRequest, Sampling, Verdict
from tests.builders import smoke_recipe, tiny_model, tiny_tokenizer

COUNTS = (3, 9, 2, 6, 4, 8, 5, 11)  # 48 rollouts, odd sizes: ranks get unequal shares


LR = 0.05
STEPS = 3


Wide = TypeVar("Wide", PolicyBatch, Values)


@dataclass(frozen=True)
class Case:
    """One way to compute the same three updates."""

    preset: str = "exact"
    zero_stage: int = 0
    offload: str = "none"
    micro_batch_size: int = 3
    shuffled: bool = False
    padding: int = 0
    adam: bool = False
    lora: bool = False
    packed: bool = False
    moe: bool = False
    precision: str = "float32"

    @property
    def name(self) -> str:
        """A file name."""
        return "-".join(str(value) for value in vars(self).values())


PRESETS = ("exact", "faithful", "ppo", "exact_ppo", "gspo")
PLAIN = [*(Case(preset) for preset in PRESETS), Case("exact_ppo", lora=True), Case("exact_ppo", moe=True)]
VARIED = [
    *(Case(preset, zero_stage=zero) for preset in ("exact", "exact_ppo") for zero in (1, 2, 3)),
    Case("faithful", zero_stage=3),
    *(Case("exact_ppo", zero_stage=zero, lora=True) for zero in (1, 2)),
    Case("exact_ppo", zero_stage=2, offload="cpu"),
    Case("exact_ppo", zero_stage=3, offload="cpu"),
    *(Case(preset, micro_batch_size=size) for preset in PRESETS for size in (1, 2, 8, 100)),
    *(Case(preset, shuffled=True) for preset in PRESETS),
    *(Case(preset, padding=9) for preset in ("exact", "gspo", "exact_ppo")),
    *(Case(preset, packed=True, micro_batch_size=8) for preset in PRESETS),
    Case("exact_ppo", packed=True, micro_batch_size=8, zero_stage=3),
    Case("exact_ppo", packed=True, micro_batch_size=8, zero_stage=2, lora=True),
    *(Case("exact_ppo", moe=True, zero_stage=zero, micro_batch_size=8) for zero in (0, 2, 3)),
]
HALF = [Case("exact_ppo", precision="bfloat16", zero_stage=zero) for zero in (1, 2, 3)]
ADAM = [Case(preset, adam=True) for preset in ("exact", "exact_ppo")]
ADAM_VARIED = [replace(case, zero_stage=zero) for case in ADAM for zero in (1, 2, 3)] + [
    replace(case, micro_batch_size=8) for case in ADAM
]


def scored() -> list[ScoredRollout]:
    """Stored rollouts: lengths and verdicts differ, log-probs are those of nobody in particular."""

    def answer(request: RolloutRequest, rollout: int) -> list[int]:
        seed = hash((int(request.prompt_id), rollout)) % 1000  # hashes of ints are stable
        generator = torch.Generator().manual_seed(seed)
        length = int(torch.randint(2, 12, (1,), generator=generator))
        return torch.randint(4, 40, (length,), generator=generator).tolist()

    requests = [
        RolloutRequest(str(index), tuple(range(5, 9 + index)), 1, n, Sampling(1.0, 12, 0))
        for index, n in enumerate(COUNTS)
    ]
    rollouts = ScriptedEngine(answer, log_prob=-3.6).generate(requests)
    return [
        ScoredRollout(item, "", Verdict(float(right), right, ""))
        for item in rollouts
        for right in [(item.rollout * 7 + int(item.prompt_id)) % 3 == 0]
    ]


def main(folder: Path) -> None:
    with distributed.start(Resources(), always_group=True) as ranks:
        for case in [*PLAIN, *VARIED, *ADAM, *ADAM_VARIED, *HALF]:
            result = updates(ranks, case)
            if ranks.first:
                torch.save(result, folder / case.name)


def recipe_stage(case: Case) -> ReinforceStage:
    """Both modulation factors on, one mini-batch."""
    overrides = [
        f"preset={case.preset}",
        f"micro_batch_size={case.micro_batch_size}",
        f"engine={{zero_stage: {case.zero_stage}, offload: {case.offload}, precision: {case.precision}}}",
        "updates_per_step=1",
        "modulation.stabilisation=true",
        f"batching={'packed' if case.packed else 'padded'}",
        *(["critic.warmup_steps=0", "critic.value_clip=0.3"] if case.preset.endswith("ppo") else []),
    ]
    stage = smoke_recipe([f"stages.reinforced.{item}" for item in overrides]).stages["reinforced"]
    assert isinstance(stage, ReinforceStage)
    return stage


def engine_for(module: nn.Module, ranks: Ranks, case: Case) -> TrainingEngine:
    """SGD, whose updates are linear in the gradient, or AdamW with an epsilon that hides no division by rounding."""
    return TrainingEngine(
        module,
        ranks,
        optimizer=Optimizer(lr=1e-3 if case.adam else LR, grad_clip=1e9, eps=1e-4),
        engine=recipe_stage(case).engine,
        total_steps=STEPS,
        optimizer_class=None if case.adam else lambda parameters: torch.optim.SGD(parameters, lr=LR),
    )


def updates(ranks: Ranks, case: Case) -> dict[str, Any]:
    """Reported values of each step, and all parameters before the first and after each step."""
    stage = recipe_stage(case)
    rows = scored()
    if case.shuffled:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
        rows = [rows[index] for index in order]
    narrow = policy_batch(rows, [str(index) for index in range(len(COUNTS))])
    batch = widened(narrow, case.padding)
    model = mixture() if case.moe else tiny_model(tiny_tokenizer(), seed=4)
    model = model.to(DTYPES[stage.engine.precision])
    if case.lora:
        add_adapters(model, Lora(rank=4, alpha=8.0), seed=4)
    learner = value_learner(model, ranks, stage, case)
    actor = engine_for(TokenScorer(model), ranks, case)
    modules = {"actor": actor} | ({"critic": learner.engine} if learner else {})
    values, states = [], [parameters_of(modules)]
    for step in range(STEPS):
        known = None if learner is None else widened(learner.values(narrow), case.padding)
        given = credit(stage, batch, np.full(len(COUNTS), 0.2), values=known)
        advantages_BL = modulated(stage, batch, given.advantages_BL)
        report = update(actor, batch, advantages_BL, stage, ranks, objective=Objective(stage.loss), seed=(0, step))
        taught = {}
        if learner is not None and known is not None and given.returns_BL is not None:
            taught = learner.fit(batch, known, given.returns_BL, mini_batches(batch, stage))
        values.append({**report.values, **taught})
        states.append(parameters_of(modules))
    return {"values": values, "states": states}


def mixture() -> PreTrainedModel:
    """Four experts a layer, two of them for each token."""
    torch.manual_seed(4)
    config = MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def value_learner(model: PreTrainedModel, ranks: Ranks, stage: ReinforceStage, case: Case) -> ValueLearner | None:
    """With a head that says something, or the values' path would be all zeros."""
    if stage.critic is None:
        return None
    critic = Critic(model)
    nn.init.normal_(critic.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(2))
    return ValueLearner(
        engine_for(critic, ranks, case), stage.critic, ranks, size=stage.micro_batch_size, packed=case.packed
    )


def parameters_of(modules: dict[str, TrainingEngine]) -> dict[str, torch.Tensor]:
    """Whole parameters by name; where they train in half precision, the float32 weights behind them."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, engine in modules.items():
        with engine.gathered():
            for key, parameter in engine.module.named_parameters():
                master = parameter if parameter.dtype == torch.float32 else safe_get_full_fp32_param(parameter)
                found[f"{name}.{key}"] = master.detach().clone()
    return found


def widened(batch: Wide, extra: int) -> Wide:
    """The same with `extra` columns of padding."""
    arrays = {name: nn.functional.pad(value, (0, extra)) for name, value in vars(batch).items() if name.endswith("_BL")}
    return replace(batch, **arrays)


if __name__ == "__main__":
    engine_module.PERSISTENT_ELEMENTS = 0  # ZeRO 3 shards even what is this small
    main(Path(sys.argv[1]))
    leave(0)
