"""Where a value is read: before the token that it judges, never divided by the temperature, zero elsewhere."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from dynamo_core.config.base import Engine, Optimizer, Resources
from dynamo_core.config.method import Critic as CriticConfig
from dynamo_core.data.batching import TokenRow
from dynamo_core.training import distributed
from dynamo_core.training.critic import Critic, ValueLearner
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.policy_update import PolicyBatch
from tests.builders import tiny_model, tiny_tokenizer

near = partial(pytest.approx, rel=1e-5, abs=1e-5)
ROWS = [
    TokenRow((4, 5, 6, 7, 8, 9), (False, False, True, True, True, True)),
    TokenRow((9, 3, 2, 11), (False, False, False, True)),
    TokenRow((12, 1, 7), (False, True, True)),
]
MASK = torch.tensor([[*row.target_mask, *(False,) * (6 - len(row.target_mask))] for row in ROWS])


@pytest.fixture(params=[1, 3], ids=["one row at once", "all rows at once"])
def learner(request):
    critic = Critic(tiny_model(tiny_tokenizer()))
    nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(0))
    nn.init.constant_(critic.value_head.bias, 0.3)
    with distributed.start(Resources(), always_group=True) as ranks:
        engine = TrainingEngine(critic, ranks, optimizer=Optimizer(lr=1e-3), engine=Engine(), total_steps=1)
        yield ValueLearner(engine, CriticConfig(optimizer=Optimizer(lr=1e-3)), ranks, size=request.param, packed=False)


def batch() -> PolicyBatch:
    zeros = torch.zeros(MASK.shape)
    return PolicyBatch(
        rows=ROWS, group_B=torch.arange(3), rewards_B=torch.zeros(3), mask_BL=MASK, old_log_prob_BL=zeros,
        entropy_BL=zeros, bracket_BL=zeros, truncated_B=torch.zeros(3, dtype=torch.bool), prompt_ids=("a", "b", "c"),
    )  # fmt: skip


@torch.no_grad()
def after(learner: ValueLearner, tokens: tuple[int, ...]) -> float:
    """The value of a text so far, by a forward of nothing else."""
    critic = learner.engine.module
    hidden_BLH = critic.backbone(input_ids=torch.tensor([tokens])).last_hidden_state
    return float(critic.value_head(hidden_BLH[0, -1]))


def test_values_stand_before_their_tokens_and_nowhere_else(learner):
    found = learner.values(batch())
    for index, row in enumerate(ROWS):
        for position in range(MASK.shape[1]):
            expected = after(learner, row.token_ids[:position]) if MASK[index, position] else 0.0
            assert float(found.values_BL[index, position]) == near(expected), (index, position)
        assert float(found.after_B[index]) == near(after(learner, row.token_ids))
    assert not found.values_BL[~MASK].any()


def test_a_prompts_value_is_that_before_its_first_answer_token(learner):
    prompts = [row.token_ids[: row.target_mask.index(True)] for row in ROWS]
    found = learner.prompt_values(prompts)
    assert found == near([after(learner, prompt) for prompt in prompts])
    first_B = MASK.int().argmax(-1)
    assert found == near(learner.values(batch()).values_BL[torch.arange(3), first_B].tolist())


def test_a_new_head_says_zero():
    critic = Critic(tiny_model(tiny_tokenizer()))
    assert not critic(torch.tensor([[4, 5, 6]])).any()
