"""A number that is not finite, planted in a policy update at each ZeRO stage: what is said, and that no weight moved.

python -m tests.invariants.guard_worker FOLDER      (or under torchrun); rank r writes FOLDER/<r>.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from dynamo_core.config.base import Engine, Optimizer, Resources
from dynamo_core.config.reinforce import ReinforceStage
from dynamo_core.errors import NumericalFailure
from dynamo_core.rollout.batch import policy_batch
from dynamo_core.stages.__main__ import leave
from dynamo_core.training import distributed
from dynamo_core.training.credit import credit, modulated
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.distributed import Ranks
from dynamo_core.training.objective import Objective
from dynamo_core.training.policy import TokenScorer
from dynamo_core.training.policy_update import update
from tests.builders import smoke_recipe, tiny_model, tiny_tokenizer
from tests.invariants.ranks_worker import COUNTS, scored

PROMPT = "3"
PARAMETER = "layers.1.mlp.up_proj.weight"


def main(folder: Path) -> None:
    with distributed.start(Resources(), always_group=True) as ranks:
        said = {f"{plant}{zero}": planted(ranks, plant, zero) for plant in ("loss", "gradient") for zero in (0, 1, 2)}
        (folder / f"{ranks.rank}.json").write_text(json.dumps(said))


def planted(ranks: Ranks, plant: str, zero_stage: int, precision: str = "float32") -> tuple[str, bool]:
    """(the message, whether every parameter is bitwise what it was).

    Args:
        plant: "loss": in one prompt's rollouts; "gradient": of one parameter, on the last rank only.
    """
    stage = smoke_recipe(["stages.reinforced.micro_batch_size=3", "stages.reinforced.updates_per_step=1"]).stages[
        "reinforced"
    ]
    assert isinstance(stage, ReinforceStage)
    model = tiny_model(tiny_tokenizer(), seed=4)
    if precision == "bfloat16":
        model = model.to(torch.bfloat16)
    if plant == "gradient" and ranks.rank == ranks.world_size - 1:
        (parameter,) = (value for name, value in model.named_parameters() if name.endswith(PARAMETER))
        parameter.register_hook(lambda gradient: torch.where(gradient == gradient.max(), torch.inf, gradient))
    optimizer, settings = Optimizer(lr=0.05), Engine(zero_stage=zero_stage, precision=precision)
    engine = TrainingEngine(TokenScorer(model), ranks, optimizer=optimizer, engine=settings, total_steps=2)
    batch = policy_batch(scored(), [str(index) for index in range(len(COUNTS))])
    advantages_BL = modulated(stage, batch, credit(stage, batch, np.full(len(COUNTS), 0.2)).advantages_BL)
    if plant == "loss":
        spoiled_BL = batch.old_log_prob_BL.clone()
        spoiled_BL[batch.group_B == int(PROMPT)] *= torch.nan
        batch = replace(batch, old_log_prob_BL=spoiled_BL)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        update(engine, batch, advantages_BL, stage, ranks, objective=Objective(stage.loss), seed=(0, 1))
    except NumericalFailure as error:
        same = all(map(torch.equal, before, model.parameters()))
        return str(error), same
    return "nothing", False


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
