"""What each rank of the invariance tests runs: one policy update on stored rollouts at each ZeRO stage.

python -m tests.invariants.ranks_worker FOLDER      (or under torchrun); rank 0 writes FOLDER/zero<stage>.pt, and
FOLDER/lora<stage>.pt of a model with adapters
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from dynamo_core.config.base import Engine, Optimizer, Resources
from dynamo_core.config.models import Lora
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.rollout.batch import policy_batch
from dynamo_core.rollout.collector import ScoredRollout
from dynamo_core.rollout.engine import ScriptedEngine
from dynamo_core.training import distributed
from dynamo_core.training.credit import credit, modulated
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.lora import add_adapters
from dynamo_core.training.objective import Objective
from dynamo_core.training.policy import TokenScorer
from dynamo_core.training.policy_update import update
from dynamo_core.types import RolloutRequest, Sampling, Verdict
from tests.builders import smoke_recipe, tiny_model, tiny_tokenizer

COUNTS = (3, 9, 2, 6, 4, 8, 5, 11)  # 48 rollouts, odd sizes: ranks get unequal shares


class GradientKeeper(torch.optim.SGD):
    """Plain SGD that remembers the gradient it was given."""

    kept: ClassVar[list[list[torch.Tensor]]] = []

    def step(self, closure=None):
        self.kept.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        return super().step(closure)


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
        for zero_stage in (0, 1, 2):
            for name, adapters in (("zero", False), ("lora", True)):
                result = one_update(ranks, zero_stage, adapters=adapters)
                if ranks.first:
                    torch.save(result, folder / f"{name}{zero_stage}.pt")


def one_update(ranks: Ranks, zero_stage: int, *, adapters: bool = False) -> dict[str, Any]:
    """Gradients (stage 0 holds them whole), reported values and parameters after one SGD step."""
    stage = smoke_recipe(["stages.reinforced.micro_batch_size=3", "stages.reinforced.updates_per_step=1"]).stages[
        "reinforced"
    ]
    assert isinstance(stage, ReinforceStage)
    model = tiny_model(tiny_tokenizer(), seed=4)
    if adapters:
        add_adapters(model, Lora(rank=4, alpha=8.0), seed=4)
    engine = TrainingEngine(
        TokenScorer(model),
        ranks,
        optimizer=Optimizer(lr=0.05, grad_clip=1e9),
        engine=Engine(zero_stage=zero_stage),
        total_steps=1,
        optimizer_class=lambda parameters: GradientKeeper(parameters, lr=0.05),
    )
    batch = policy_batch(scored(), [str(index) for index in range(len(COUNTS))])
    advantages_BL = modulated(stage, batch, credit(stage, batch, np.full(len(COUNTS), 0.2)).advantages_BL)
    report = update(engine, batch, advantages_BL, stage, ranks, objective=Objective(stage.loss), seed=(0, 1))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {
        "gradients": {} if zero_stage else dict(zip(names, GradientKeeper.kept[-1], strict=True)),
        "values": report.values,
        "parameters": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
