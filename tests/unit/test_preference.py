"""The preference loss on tiny models, and the dpo stage on the smoke recipe's data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from dynamo_core.config.base import Engine, Optimizer, Resources
from dynamo_core.config.recipe import Recipe
from dynamo_core.config.stages import DpoStage
from dynamo_core.data.batching import TokenRow
from dynamo_core.data.rows import read_pairs
from dynamo_core.errors import DataError, RecipeError
from dynamo_core.stages.manifest import read_manifest
from dynamo_core.training import distributed
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.preference import PAIRS, PreferenceLoss, TokenPair, encode_pairs
from dynamo_core.training.supervised import train
from dynamo_core.types import Message, PreferencePair
from tasks.estimate import training_bytes
from tests.builders import read_metrics, run_stage, smoke_recipe, tiny_model, tiny_tokenizer, with_dpo


def pairs(count: int = 12) -> list[TokenPair]:
    """Prompts and answers of unequal lengths."""
    generator = torch.Generator().manual_seed(1)

    def row(prompt: tuple[int, ...], length: int) -> TokenRow:
        answer = tuple(torch.randint(4, 40, (length,), generator=generator).tolist())
        return TokenRow(prompt + answer, (False,) * len(prompt) + (True,) * length)

    found = []
    for index in range(count):
        prompt = tuple(torch.randint(4, 40, (2 + index % 3,), generator=generator).tolist())
        found.append(TokenPair(row(prompt, 1 + index % 5), row(prompt, 2 + index % 4)))
    return found


def log_prob(model, row: TokenRow) -> torch.Tensor:
    """Of a row's answer: one token after the other from plain logits."""
    logits = model(input_ids=torch.tensor([row.token_ids])).logits[0]
    return sum(
        torch.log_softmax(logits[place - 1], -1)[row.token_ids[place]]
        for place, wanted in enumerate(row.target_mask)
        if wanted
    )


def test_the_loss_is_that_of_plain_log_probs_and_leaves_the_reference_alone():
    model, reference = tiny_model(tiny_tokenizer()).double(), tiny_model(tiny_tokenizer()).double()
    module = PreferenceLoss(model, beta=0.3, label_smoothing=0.1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    loss, *parts = module(*PAIRS.inputs(pairs(5), 5))
    margins, chosen_rewards = [], []
    for pair in pairs(5):
        rows = (pair.chosen, pair.rejected)
        better, worse = (0.3 * (log_prob(model, row) - log_prob(reference, row)).detach() for row in rows)
        margins.append(better - worse)
        chosen_rewards.append(better)
    margin = torch.stack(margins)
    expected = -(0.9 * torch.sigmoid(margin).log() + 0.1 * torch.sigmoid(-margin).log()).mean()
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-6)
    values = dict(zip(module.parts, (float(part) for part in parts), strict=True))
    assert values["preference/margin"] == pytest.approx(float(margin.mean()), rel=1e-5)
    assert values["preference/accuracy"] == pytest.approx(float((margin > 0).double().mean()))
    assert values["preference/chosen_reward"] == pytest.approx(float(torch.stack(chosen_rewards).mean()), rel=1e-5)
    loss.backward()
    assert {name for name, _ in module.named_parameters()} == {f"model.{name}" for name, _ in model.named_parameters()}
    assert all(parameter.grad is not None for parameter in model.parameters())


def trained(micro_batch_size: int, **engine: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    lines: list[dict[str, float]] = []
    with distributed.start(Resources(), always_group=True) as ranks:
        model = tiny_model(tiny_tokenizer())
        loss = PreferenceLoss(model, beta=0.5, label_smoothing=0.1)
        optimizer = Optimizer(lr=1e-3, eps=1e-4, grad_clip=0.5)
        wrapped = TrainingEngine(loss, ranks, optimizer=optimizer, engine=Engine(**engine), total_steps=3)
        train(
            wrapped, pairs(), ranks, lambda step, values, timings: lines.append(dict(values)), collation=PAIRS,
            parts=loss.parts, steps=3, batch_size=6, micro_batch_size=micro_batch_size, seed=2,
        )  # fmt: skip
    return lines, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("micro_batch_size", "zero_stage"), [(1, 0), (4, 0), (6, 2)])
def test_micro_batches_and_sharding_change_nothing_but_rounding(micro_batch_size, zero_stage):
    ours, theirs = trained(micro_batch_size, zero_stage=zero_stage), trained(6)
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    for name, parameter in theirs[1].items():
        torch.testing.assert_close(ours[1][name], parameter, rtol=1e-4, atol=2e-5, msg=name)


def test_only_the_answers_are_targets_and_long_pairs_are_named():
    tokenizer = tiny_tokenizer()
    prompt = (Message("user", "1+2=?"), Message("assistant", "3"), Message("user", "4+5=?"))
    rows = [
        PreferencePair("short", prompt, "9", "88"),
        PreferencePair("long", prompt, "9", "8" * 90),
        PreferencePair("also", prompt, "9" * 90, "8"),
    ]
    encoded = encode_pairs(tokenizer, rows, max_length=60)
    assert encoded.too_long == ["long", "also"]
    (pair,) = encoded.rows
    answers = [
        tokenizer.decode([token for token, wanted in zip(row.token_ids, row.target_mask, strict=True) if wanted])
        for row in (pair.chosen, pair.rejected)
    ]
    assert answers == ["9<|im_end|>", "88<|im_end|>"]
    with pytest.raises(DataError, match="all 3 preference pairs are longer than max_length 5"):
        encode_pairs(tokenizer, rows, max_length=5)


def recipe(**fields: Any) -> Recipe:
    return with_dpo(smoke_recipe(), **fields)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("dpo")
    for name in ("data", "teacher", "preferred"):
        run_stage(recipe(), name, root)
    return root


def test_the_stage_starts_at_log_2_and_learns_to_prefer(store):
    lines = [line["values"] for line in read_metrics(store / "preferred")]
    assert len(lines) == 30
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert {lines[0][name] for name in PreferenceLoss.parts} == {0}
    last = {name: sum(line[name] for line in lines[-5:]) / 5 for name in lines[0]}
    assert last["train/loss"] < 0.5
    assert last["preference/accuracy"] > 0.8
    assert last["preference/margin"] > 0.5
    assert (store / "preferred" / "model" / "model.safetensors").exists()


def test_a_pretrained_model_in_bfloat16_leaves_out_long_pairs(store, tmp_path):
    (tmp_path / "data").symlink_to(store / "data")
    changed = recipe(
        model={"type": "pretrained", "path": str(store / "teacher" / "model")}, model_from=None, steps=2, max_length=22,
        engine={"zero_stage": 1, "precision": "bfloat16", "gradient_checkpointing": True},
    )  # fmt: skip
    folder = run_stage(changed, "preferred", tmp_path)
    lines = [line["values"] for line in read_metrics(folder)]
    assert lines[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[0]["preference/margin"] == 0
    left_out = pq.read_table(folder / "tables" / "left_out-000000.parquet").to_pylist()
    manifest = read_manifest(folder)
    assert manifest is not None
    assert len(left_out) == manifest.metrics["rows_too_long"] > 0
    assert len(left_out) + manifest.metrics["rows"] == len(read_pairs(store / "data" / "data"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"beta": 0}, "stages.preferred.beta: is 0, must be > 0"),
        ({"label_smoothing": 0.5}, "stages.preferred.label_smoothing: is 0.5, must be >= 0 and < 0.5"),
        ({"model": {"type": "scratch"}}, "stages.preferred.model"),
        ({"model": {"type": "pretrained", "path": "m"}}, "give exactly one of 'model' (a new start) and 'model_from'"),
        ({"model_from": "nobody"}, "stages.preferred.model_from: 'nobody' is not one of the earlier stages"),
        ({"batch_sise": 4}, "stages.preferred.batch_sise: unknown key; did you mean 'batch_size'?"),
        ({"optimizer": {"lr": 1e-4, "warmup_steps": 30}}, "must be below the stage's 30 optimizer steps"),
    ],
)
def test_refused_settings_are_one_line(fields, expected):
    with pytest.raises(RecipeError) as caught:
        recipe(**fields)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_it_goes_on_from_the_latest_model_and_needs_room_for_the_reference():
    resolved = recipe(model_from=None)
    stage = resolved.stages["preferred"]
    assert isinstance(stage, DpoStage)
    assert (stage.model_from, stage.data_from) == ("reinforced", "data")
    assert resolved.inputs("preferred") == {"data": "data", "model": "reinforced"}
    teacher, preferred = training_bytes(recipe(), "teacher"), training_bytes(recipe(), "preferred")
    assert teacher is not None and preferred is not None
    assert preferred == teacher * 5 // 4  # 16 bytes a parameter to train, 4 to keep
