"""Adapters: only they train, they start as no change, every reader sees them, and merging keeps what they compute."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import Linear
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dynamo_core.config.base import Engine, Optimizer, Resources
from dynamo_core.config.method import Kl
from dynamo_core.config.models import Lora
from dynamo_core.data.batching import TokenRow, pad_rows
from dynamo_core.errors import NumericalFailure, RecipeError
from dynamo_core.rollout.batch import policy_batch
from dynamo_core.rollout.transformers_engine import TransformersEngine
from dynamo_core.training import distributed, lora, quantisation
from dynamo_core.training.critic import Critic
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.lora import adapters_off, add_adapters, has_adapters, merged, parameter_counts, publish
from dynamo_core.training.models import eos_ids, load_model
from dynamo_core.training.policy import TargetStates, TokenScorer
from dynamo_core.training.reference import Reference, WithoutAdapters
from dynamo_core.training.supervised import NextTokenLoss, tokens, train
from tests.builders import requests, smoke_recipe, tiny_model, tiny_tokenizer
from tests.invariants.ranks_worker import scored

SPEC = Lora(rank=4, alpha=8.0)
ROWS = [
    TokenRow((4, 5, 6, 7, 8, 9), (False, False, True, True, False, True)),
    TokenRow((9, 3, 2, 11), (False, True, True, True)),
    TokenRow((12, 1, 30, 7, 7), (False, True, True, True, True)),
]


def adapted(spec: Lora = SPEC, *, spread: float = 0.05, dtype: torch.dtype = torch.float32):
    """The tiny model with adapters; `spread` moves them away from no change."""
    model = tiny_model(tiny_tokenizer(), dtype=dtype)
    add_adapters(model, spec, seed=7)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data += spread * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(48).remainder(40).reshape(4, 12)).logits


def adapters_of(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_" in name}


def test_equal_seeds_give_equal_adapters_and_nobody_elses_random_numbers():
    before = torch.get_rng_state()
    first, second = adapters_of(adapted(spread=0.0)), adapters_of(adapted(spread=0.0))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = tiny_model(tiny_tokenizer())
    add_adapters(other, SPEC, seed=8)
    assert any(not torch.equal(first[name], tensor) for name, tensor in adapters_of(other).items())
    assert len({name.split(".lora_")[0].rpartition(".")[2] for name in first}) == 7


def test_adapters_start_as_no_change_and_can_be_switched_off():
    plain = logits(tiny_model(tiny_tokenizer()))
    assert torch.equal(logits(adapted(spread=0.0)), plain)
    model = adapted()
    assert not torch.allclose(logits(model), plain, rtol=1e-2)
    with adapters_off(model):
        assert torch.equal(logits(model), plain)
    assert not torch.allclose(logits(model), plain, rtol=1e-2)
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())


def test_the_scorer_takes_its_fast_path_and_scores_with_adapters():
    model = adapted(dtype=torch.float64).eval()
    assert TargetStates(model).plain
    batch = pad_rows(ROWS)
    scores = TokenScorer(model)(batch.token_ids_BL, batch.target_mask_BL, 0.7)
    scores.log_prob_BL.sum().backward()
    log_prob_BL = scores.log_prob_BL.detach()
    for b, row in enumerate(ROWS):
        with torch.no_grad():
            log_p_LV = torch.log_softmax(model(input_ids=torch.tensor([row.token_ids])).logits[0] / 0.7, -1)
        for position, wanted in enumerate(row.target_mask):
            if wanted:
                assert float(log_prob_BL[b, position]) == pytest.approx(
                    float(log_p_LV[position - 1, row.token_ids[position]]), rel=1e-9
                )
    assert all((p.grad is not None) == (".lora_" in name) for name, p in model.named_parameters())


def test_generation_uses_the_adapters():
    tokenizer, model = tiny_tokenizer(), adapted()

    def answers(policy):
        engine = TransformersEngine(policy, eos_token_ids=eos_ids(policy, tokenizer), batch_tokens=10_000)
        return [item.response_token_ids for item in engine.generate(requests(tokenizer, {"1+2=?": 4, "9-3=?": 4}))]

    with_them = answers(model)
    assert with_them == answers(merged(model))
    assert with_them != answers(tiny_model(tokenizer))
    with adapters_off(model):
        assert answers(model) == answers(tiny_model(tokenizer))


@pytest.mark.parametrize("spec", [SPEC, Lora(rank=3, alpha=1.0, target_modules=("q_proj", "down_proj"))])
def test_merging_keeps_the_logits_and_leaves_the_model_alone(spec):
    model = adapted(spec)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole, expected = merged(model), logits(model)
    torch.testing.assert_close(logits(whole), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert not has_adapters(whole)
    assert whole.state_dict().keys() == tiny_model(tiny_tokenizer()).state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert merged(whole) is whole
    counts = parameter_counts(model)
    assert counts["parameters"] == sum(p.numel() for p in whole.parameters())
    assert counts["parameters_trained"] == sum(tensor.numel() for tensor in adapters_of(model).values())


def test_half_precision_is_merged_in_float32_and_rounded_once():
    model = adapted(dtype=torch.bfloat16)
    whole = merged(model)
    assert {p.dtype for p in whole.parameters()} == {torch.bfloat16}
    layer = cast(Any, model).model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight.float(), layer.lora_B["default"].weight.float()
    expected = (layer.base_layer.weight.float() + 2.0 * (b @ a)).bfloat16()
    assert torch.equal(cast(Any, whole).model.layers[0].self_attn.q_proj.weight, expected)


@pytest.mark.parametrize("fault", ["alpha", "nan", "dequantised"])
def test_a_merge_that_changes_the_logits_is_refused(fault, monkeypatch):
    model = adapted()
    if fault == "nan":
        next(p for name, p in model.named_parameters() if ".lora_B." in name).data[0, 0] = float("nan")
    elif fault == "dequantised":  # a fault of the copy itself, before it is merged
        monkeypatch.setattr(lora, "_dequantise", lambda whole: whole.lm_head.weight.data.mul_(1.5))
    else:
        right = Linear.get_delta_weight
        monkeypatch.setattr(Linear, "get_delta_weight", lambda self, name: 0.5 * right(self, name))
    with pytest.raises(NumericalFailure, match=r"merged model differ from those with adapters by .* of the largest"):
        merged(model)


def test_the_published_folders_load_with_plain_libraries(tmp_path):
    tokenizer, model = tiny_tokenizer(), adapted()
    model.config.name_or_path = model.name_or_path = str(tmp_path / "start")
    publish(model, tokenizer, tmp_path)
    expected = logits(model)
    close = {"rtol": 1e-4, "atol": 1e-4 * float(expected.abs().max())}
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), expected, **close)
    again = PeftModel.from_pretrained(tiny_model(tokenizer), tmp_path / "adapter")
    assert torch.equal(logits(again.eval()), expected)
    files = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    config = (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert str(tmp_path) not in config + (tmp_path / "model" / "config.json").read_text()
    assert (json.loads(config)["r"], json.loads(config)["lora_alpha"]) == (4, 8)
    assert json.loads(config)["target_modules"] == sorted(json.loads(config)["target_modules"])
    with pytest.raises(RecipeError, match=r"holds an adapter, not a whole model \(give the folder of the merged"):
        load_model(tmp_path / "adapter", dtype=torch.float32, device=torch.device("cpu"))


def trained(**engine) -> dict[str, torch.Tensor]:
    with distributed.start(Resources(), always_group=True) as ranks:
        model = adapted(spread=0.0)
        if engine.pop("gradient_checkpointing", False):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = NextTokenLoss(model)
        wrapped = TrainingEngine(
            loss, ranks, optimizer=Optimizer(lr=1e-2, eps=1e-4), engine=Engine(**engine), total_steps=3
        )
        train(
            wrapped, ROWS, ranks, lambda step, values, timings: None, collation=tokens("padded"), parts=loss.parts,
            steps=3, batch_size=2, micro_batch_size=1, seed=2,
        )  # fmt: skip
        merged(model)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_only_adapters_change():
    start = dict(adapted(spread=0.0).named_parameters())
    for name, parameter in trained().items():
        assert torch.equal(parameter, start[name]) == (".lora_" not in name), name


@pytest.mark.parametrize("engine", [{"zero_stage": 1}, {"zero_stage": 2}, {"gradient_checkpointing": True}], ids=str)
def test_engine_options_change_nothing_but_rounding(engine):
    expected = trained()
    for name, parameter in trained(**engine).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=2e-5, msg=name)


def test_the_reference_is_the_policy_without_its_adapters():
    """At the first step the KL is exactly zero; later it is that to a frozen copy of the start."""
    batch = policy_batch(scored(), [str(index) for index in range(8)])
    with distributed.start(Resources(), always_group=True) as ranks:

        def log_probs(score):
            kl = Kl(place="loss", kind="k3", coefficient=0.1)
            return Reference(score, kl, ranks, temperature=1.0, size=4, packed=False).log_probs(batch)

        fresh = adapted(spread=0.0)
        assert torch.equal(log_probs(WithoutAdapters(TokenScorer(fresh))), log_probs(TokenScorer(fresh)))
        moved = adapted()
        start = log_probs(TokenScorer(tiny_model(tiny_tokenizer())))
        assert torch.equal(log_probs(WithoutAdapters(TokenScorer(moved))), start)
        assert not torch.allclose(log_probs(TokenScorer(moved)), start, rtol=1e-2)


def test_the_critic_shares_the_base_and_has_adapters_of_its_own(tmp_path):
    policy = adapted()
    critic = Critic(policy)
    frozen = {id(p) for p in policy.parameters() if not p.requires_grad}
    assert {id(p) for p in critic.parameters() if not p.requires_grad} == frozen
    trains = [name for name, p in critic.named_parameters() if p.requires_grad]
    assert {"value_head.weight", "value_head.bias"} < set(trains)
    assert sum(".lora_" in name for name in trains) == len(adapters_of(policy)) == len(trains) - 2
    critic.value_head.weight.data.fill_(0.1)
    ids = torch.arange(12).reshape(1, 12)
    with adapters_off(policy), torch.no_grad():
        expected = critic(ids)
    critic.save(tmp_path)
    backbone = AutoModelForCausalLM.from_pretrained(tmp_path).base_model
    head = load_file(tmp_path / "value_head.safetensors")["weight"]
    found = backbone(input_ids=ids).last_hidden_state @ head.T
    torch.testing.assert_close(found[..., 0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lora={rank: 4, alpha: 8, dropout: 0.1}", "lora.dropout: is 0.1, must be 0: dropout makes the ratio"),
        ("lora={rank: 4, alpha: 0}", "lora.alpha"),
        ("lora={rank: 4, alpha: 8, quantisation: 8bit}", "lora.quantisation"),
        ("lora={rank: 4, alpha: 8, target_modules: []}", "lora.target_modules"),
    ],
)
def test_options_that_cannot_work_are_refused_at_load(override, expected):
    with pytest.raises(RecipeError) as caught:
        smoke_recipe([f"stages.reinforced.{override}"])
    assert expected in str(caught.value)


def test_a_model_from_scratch_takes_no_adapters():
    with pytest.raises(RecipeError, match=r"stages\.teacher\.lora: adapters need a trained model"):
        smoke_recipe(["stages.teacher.lora={rank: 4, alpha: 8}"])


def test_unknown_layers_are_named():
    wrong = Lora(rank=2, alpha=4.0, target_modules=("q_proj", "lm_head", "query"))
    with pytest.raises(RecipeError, match=r"no linear layer \['lm_head', 'query'\], only \['down_proj', .*'v_proj'\]"):
        add_adapters(tiny_model(tiny_tokenizer()), wrong, seed=0)


def test_four_bit_weights_need_a_gpu_and_bitsandbytes(monkeypatch):
    with pytest.raises(RecipeError, match=r"^lora\.quantisation: 4bit needs a CUDA GPU"):
        quantisation.require_quantisation("lora.quantisation", gpu=False)
    monkeypatch.setattr(quantisation, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match="4bit needs bitsandbytes, which is not installed"):
        quantisation.require_quantisation("lora.quantisation", gpu=True)
