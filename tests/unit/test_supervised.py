"""Supervised losses against plain formulas, and updates that do not depend on how a batch is split."""

from __future__ import annotations

import pytest
import torch

from dynamo_core.config.base import Engine, Optimizer, Resources
from dynamo_core.data.batching import TokenRow, pad_rows
from dynamo_core.errors import DataError, NumericalFailure
from dynamo_core.training import distributed, supervised
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.supervised import DistillationLoss, NextTokenLoss, encode_rows, tokens, train
from dynamo_core.types import Demonstration, Message
from tests.builders import tiny_model, tiny_tokenizer


def rows(count: int = 24) -> list[TokenRow]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(count):
        length = 4 + index % 7
        tokens = tuple(torch.randint(4, 40, (length,), generator=generator).tolist())
        found.append(TokenRow(tokens, (False, False) + (True,) * (length - 2)))
    return found


def plain_logits(model, row):
    return model(input_ids=torch.tensor([row.token_ids])).logits[0]


def test_next_token_loss_is_the_mean_over_target_tokens():
    model = tiny_model(tiny_tokenizer()).double()
    batch = pad_rows(rows(5))
    tokens = int(batch.target_mask_BL.sum())
    loss, part = NextTokenLoss(model)(batch.token_ids_BL, batch.target_mask_BL, batch.target_mask_BL.double() / tokens)
    expected = [
        -torch.log_softmax(plain_logits(model, row)[i - 1], -1)[row.token_ids[i]]
        for row in rows(5)
        for i, wanted in enumerate(row.target_mask)
        if wanted
    ]
    assert float(loss.detach()) == pytest.approx(float(torch.stack(expected).mean().detach()), rel=1e-10)
    assert float(part) == float(loss.detach())


@pytest.mark.parametrize("chunk_elements", [1 << 24, 100])
def test_distillation_loss_mixes_kl_and_cross_entropy(chunk_elements, monkeypatch):
    monkeypatch.setattr(supervised, "CHUNK_ELEMENTS", chunk_elements)
    tokenizer = tiny_tokenizer()
    student, teacher = tiny_model(tokenizer).double(), tiny_model(tokenizer, seed=9).double()
    temperature, kl_weight = 2.0, 0.3
    batch = pad_rows(rows(4))
    weights_BL = batch.target_mask_BL.double() / int(batch.target_mask_BL.sum())
    module = DistillationLoss(student, teacher, temperature=temperature, kl_weight=kl_weight)
    loss, entropy, divergence = module(batch.token_ids_BL, batch.target_mask_BL, weights_BL)
    loss.backward()
    kl, ce, count = 0.0, 0.0, 0
    for row in rows(4):
        ours, theirs = plain_logits(student, row), plain_logits(teacher, row)
        for i, wanted in enumerate(row.target_mask):
            if wanted:
                log_p = torch.log_softmax(theirs[i - 1] / temperature, -1)
                log_q = torch.log_softmax(ours[i - 1] / temperature, -1)
                kl += float((log_p.exp() * (log_p - log_q)).sum().detach())
                ce -= float(torch.log_softmax(ours[i - 1], -1)[row.token_ids[i]])
                count += 1
    assert float(entropy) == pytest.approx(ce / count, rel=1e-9)
    assert float(divergence) == pytest.approx(temperature**2 * kl / count, rel=1e-9)
    assert float(loss.detach()) == pytest.approx(
        kl_weight * temperature**2 * kl / count + (1 - kl_weight) * ce / count, rel=1e-9
    )
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert {name for name, _ in module.named_parameters()} == {
        f"model.{name}" for name, _ in student.named_parameters()
    }


def trained(micro_batch_size: int, **engine) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    lines: list[dict[str, float]] = []
    with distributed.start(Resources(), always_group=True) as ranks:
        model = tiny_model(tiny_tokenizer())
        if engine.pop("gradient_checkpointing", False):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = NextTokenLoss(model.to(torch.bfloat16) if engine.get("precision") == "bfloat16" else model)
        optimizer = Optimizer(lr=1e-3, eps=1e-4, grad_clip=0.5, schedule="linear", warmup_steps=1)
        wrapped = TrainingEngine(loss, ranks, optimizer=optimizer, engine=Engine(**engine), total_steps=3)
        train(
            wrapped, rows(), ranks, lambda step, values, timings: lines.append(dict(values)),
            collation=tokens("padded"), parts=loss.parts, steps=3, batch_size=8, micro_batch_size=micro_batch_size,
            seed=2,
        )  # fmt: skip
    return lines, {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}


def assert_same(ours, theirs, rtol):
    for mine, other in zip(ours[0], theirs[0], strict=True):
        assert mine == pytest.approx(other, rel=rtol)
    for name, parameter in theirs[1].items():
        torch.testing.assert_close(ours[1][name], parameter, rtol=rtol, atol=2e-5, msg=name)


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_micro_batches_change_nothing_but_rounding(micro_batch_size):
    assert_same(trained(micro_batch_size), trained(8), 1e-4)


@pytest.mark.parametrize("engine", [{"zero_stage": 1}, {"zero_stage": 2}, {"gradient_checkpointing": True}], ids=str)
def test_engine_options_change_nothing_but_rounding(engine):
    assert_same(trained(3, **engine), trained(3), 1e-4)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_bfloat16_trains_with_float32_masters(zero_stage):
    lines, parameters = trained(8, zero_stage=zero_stage, precision="bfloat16")
    start = tiny_model(tiny_tokenizer()).state_dict()
    assert all(
        abs(line["train/loss"] - other["train/loss"]) < 0.2 for line, other in zip(lines, trained(8)[0], strict=True)
    )
    assert any(not torch.equal(parameters[name], start[name].bfloat16().float()) for name in parameters)


def test_the_learning_rate_follows_its_schedule():
    # Warm-up of 1 step, then linear to 0 at step 3 of 3: steps done 0, 1, 2 give factors 1, 1, 1/2.
    assert [line["train/lr"] for line in trained(8)[0]] == pytest.approx([1e-3, 1e-3, 5e-4])


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_number_that_is_not_finite_stops_the_run(zero_stage):
    with distributed.start(Resources(), always_group=True) as ranks:
        model = tiny_model(tiny_tokenizer())
        loss = NextTokenLoss(model)
        engine = TrainingEngine(
            loss, ranks, optimizer=Optimizer(lr=1e-3), engine=Engine(zero_stage=zero_stage), total_steps=2
        )
        before = model.lm_head.weight.detach().clone()
        batch = pad_rows(rows(2))
        value, _ = engine.forward(batch.token_ids_BL, batch.target_mask_BL, batch.target_mask_BL * float("inf"))
        engine.accumulate(value, prompt_ids=[f"row {index}" for index in range(8)])
        said = "the loss is nan at optimizer step 1, in a micro-batch of prompts 'row 0', .*'row 4' and 3 more"
        with pytest.raises(NumericalFailure, match=said):
            engine.step(float(value))
        assert torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize(("zero_stage", "precision"), [(0, "float32"), (1, "float32"), (1, "bfloat16")])
def test_a_sum_over_ranks_that_is_not_finite_moves_nothing(zero_stage, precision):
    """No backward pass brought it: only the norm can tell."""
    with distributed.start(Resources(), always_group=True) as ranks:
        model = tiny_model(tiny_tokenizer()).to(torch.bfloat16 if precision == "bfloat16" else torch.float32)
        settings = Engine(zero_stage=zero_stage, precision=precision)
        engine = TrainingEngine(
            NextTokenLoss(model), ranks, optimizer=Optimizer(lr=1e-3), engine=settings, total_steps=2
        )
        before = [parameter.detach().clone() for parameter in model.parameters()]
        batch = pad_rows(rows(2))
        value, _ = engine.forward(batch.token_ids_BL, batch.target_mask_BL, batch.target_mask_BL.float())
        engine.accumulate(value, prompt_ids=["a", "b"])
        model.lm_head.weight.grad[0, 0] = torch.inf
        with pytest.raises(NumericalFailure, match=r"the gradient norm is inf at optimizer step 1, .* 'a', 'b'"):
            engine.step(float(value))
        assert all(map(torch.equal, before, model.parameters()))


def test_a_model_that_is_not_finite_is_not_saved(tmp_path):
    with distributed.start(Resources(), always_group=True) as ranks:
        model = tiny_model(tiny_tokenizer())
        engine = TrainingEngine(
            NextTokenLoss(model), ranks, optimizer=Optimizer(lr=1e-3), engine=Engine(), total_steps=2
        )
        engine.check_weights()
        with torch.no_grad():
            model.model.norm.weight[3] = torch.nan
        with pytest.raises(
            NumericalFailure, match=r"weight 'model\.model\.norm\.weight' is not finite after optimizer step 0"
        ):
            engine.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_rows_that_are_too_long_are_named_and_all_of_them_is_an_error():
    tokenizer = tiny_tokenizer()
    turns = lambda text: (Message("user", "1+2=?"), Message("assistant", text))  # noqa: E731
    demonstrations = [Demonstration("short", turns("3")), Demonstration("long", turns("3" * 90))]
    encoded = encode_rows(tokenizer, demonstrations, max_length=60)
    assert (len(encoded.rows), encoded.too_long) == (1, ["long"])
    with pytest.raises(DataError, match="max_length 5"):
        encode_rows(tokenizer, demonstrations, max_length=5)


def test_padded_vocabularies_of_different_size_are_compared_over_what_both_have():
    tokenizer = tiny_tokenizer()
    student, teacher = tiny_model(tokenizer), tiny_model(tokenizer, seed=9)
    batch = pad_rows(rows(4))
    weights_BL = batch.target_mask_BL.float()

    def loss_with(teacher_model):
        module = DistillationLoss(student, teacher_model, temperature=1.0, kl_weight=1.0)
        return float(module(batch.token_ids_BL, batch.target_mask_BL, weights_BL)[0].detach())

    expected = loss_with(teacher)
    torch.manual_seed(0)
    teacher.resize_token_embeddings(len(tokenizer) + 7, mean_resizing=False)
    with torch.no_grad():
        teacher.get_input_embeddings().weight[len(tokenizer) :] = 0.0
    assert loss_with(teacher) == pytest.approx(expected, rel=1e-5)
