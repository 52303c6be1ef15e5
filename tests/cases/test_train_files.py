"""Public faults of checkpoints, weights and settings: what is resumed, merged, refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from dynamo_core.config.base import Engine, Optimizer, Resources
from dynamo_core.config.load import parse_recipe
from dynamo_core.config.models import Lora, PretrainedModel
from dynamo_core.config.stage_base import Checkpoints
from dynamo_core.errors import RecipeError
from dynamo_core.training import distributed
from dynamo_core.training.checkpoint import Checkpointer
from dynamo_core.training.deepspeed.engine import TrainingEngine
from dynamo_core.training.lora import add_adapters, merged
from dynamo_core.training.models import load_pretrained, save_model
from tests.builders import run_stage, smoke_recipe, tiny_model, tiny_tokenizer
from tests.cases.support import close, solves


class Part:
    """Something with a file of its own."""

    def save(self, folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"0123456789")

    def load(self, folder: Path) -> None:
        assert (folder / "weights.bin").read_bytes() == b"0123456789"


def checkpointer(folder: Path, ranks, *, keep: int = 3) -> Checkpointer:
    return Checkpointer(folder, "0" * 64, Checkpoints(every=1, keep_last=keep), ranks, {"model": Part()}, steps=1000)


def step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def path_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:06d}"


@solves("t-checkpoint-02", "t-checkpoint-03")
def test_the_newest_whole_checkpoint_is_taken(given, expected, tmp_path):
    """No pointer file names it: every checkpoint says of itself whether it is whole."""
    with distributed.start(Resources()) as ranks:
        kept = checkpointer(tmp_path, ranks)
        for name, content in sorted(given["tree"].items()):
            if name == "latest":
                (tmp_path / "checkpoints" / "latest").parent.mkdir(exist_ok=True)
                (tmp_path / "checkpoints" / "latest").write_text(content)
                continue
            kept.save(step_of(name), {})
            if not content.get("complete"):
                for file in path_of(tmp_path, step_of(name)).rglob("*.bin"):
                    file.write_bytes(b"")
        found = kept.resume()
    assert found is not None
    assert found.step == step_of(expected["resume_from"])


@solves("t-checkpoint-05")
def test_the_only_good_checkpoint_outlives_a_crash_in_the_next_save(given, expected, tmp_path, monkeypatch):
    with distributed.start(Resources()) as ranks:
        kept = checkpointer(tmp_path, ranks, keep=given["keep"])
        kept.save(10, {})

        def crash(self, folder):
            raise RuntimeError("power")

        monkeypatch.setattr(Part, "save", crash)
        with pytest.raises(RuntimeError, match="power"):
            kept.save(20, {})
    left = {f"step-{step_of(path.name)}" for path in (tmp_path / "checkpoints").glob("step-*")}
    assert left == set(expected["exists"])


@solves("t-checkpoint-14")
def test_master_weights_are_saved_and_not_rebuilt(given, expected, tmp_path):
    """A master weight between two bfloat16 numbers: rebuilt from the stored one, the next step starts elsewhere."""

    def engine(ranks) -> TrainingEngine:
        layer = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        torch.nn.init.constant_(layer.weight, given["stored_bf16"])
        optimizer = Optimizer(lr=rise, betas=(0.0, 0.0), eps=1e-30, grad_clip=1e9)
        return TrainingEngine(layer, ranks, optimizer=optimizer, engine=Engine(precision="bfloat16"), total_steps=99)

    def rises(trained: TrainingEngine) -> int:
        """Steps until the stored weight moves."""
        for count in range(1, 99):
            loss = -trained.forward(torch.ones(1, 1, dtype=torch.bfloat16)).sum()
            trained.accumulate(loss, {"loss": loss}, [])
            trained.step(float(loss.detach()))
            if float(trained.module.weight.detach()) != given["stored_bf16"]:
                return count
        raise AssertionError("the stored weight never moved")

    rise = given["master_fp32"] - given["stored_bf16"]
    assert expected["master_after_resume"] == given["stored_bf16"] + rise
    with distributed.start(Resources(), always_group=True) as ranks:
        whole = rises(engine(ranks))
        first = engine(ranks)
        loss = -first.forward(torch.ones(1, 1, dtype=torch.bfloat16)).sum()
        first.accumulate(loss, {"loss": loss}, [])
        first.step(float(loss.detach()))
        first.save(tmp_path)
        second = engine(ranks)
        second.load(tmp_path)
        assert float(second.module.weight.detach()) == given["stored_bf16"]
        assert rises(second) == whole - 1
    assert whole > 2


@solves("t-weights-07")
def test_an_adapter_adds_its_scaled_product(given, expected):
    model = tiny_model(tiny_tokenizer())
    add_adapters(model, Lora(rank=given["r"], alpha=float(given["alpha"]), target_modules=("q_proj",)), seed=0)
    layer = model.model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    with torch.no_grad():
        for tensor in (a, b, layer.base_layer.weight):
            tensor.zero_()
        layer.base_layer.weight[:2, :2] = torch.tensor(given["W"])
        a[:, :2] = torch.tensor(given["A"])
        b[:2] = torch.tensor(given["B"])
    whole = merged(model)
    close(whole.model.layers[0].self_attn.q_proj.weight[:2, :2].detach(), expected)


@solves("t-config-06")
def test_text_is_no_boolean(given, expected):
    with pytest.raises(RecipeError, match=r'gradient_checkpointing: is "false"'):
        smoke_recipe(['stages.teacher.engine.gradient_checkpointing="false"'])
    assert expected == {"bf16": False}  # or an error that names the key


@solves("t-config-14")
def test_there_is_no_batch_triple_to_get_wrong(given, expected):
    """One batch size and one micro-batch size; accumulation follows, and DeepSpeed's own keys are refused."""
    product = math.prod(given[key] for key in list(given)[1:])
    assert product == expected["product"] != given["train_batch_size"]
    for key in given:
        with pytest.raises(RecipeError, match=key):
            smoke_recipe([f"stages.teacher.{key}={given[key]}"])
    with pytest.raises(RecipeError, match="train_batch_size"):
        parse_recipe({"name": "a", "seed": 0, "train_batch_size": 32, "stages": {}}, "a.yaml")


def test_a_model_smaller_than_its_tokenizer_is_refused(tmp_path):
    """Teachers and policies alike: a token without a row would be cut off or read beyond the end."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer)
    model.resize_token_embeddings(len(tokenizer) - 2)
    save_model(model, tokenizer, tmp_path)
    with pytest.raises(RecipeError, match=f"knows {len(tokenizer) - 2} tokens, but its tokenizer has {len(tokenizer)}"):
        load_pretrained(
            PretrainedModel(type="pretrained", path=str(tmp_path)), dtype=torch.float32, device=torch.device("cpu")
        )


def test_a_teacher_smaller_than_the_vocabulary_is_refused(tmp_path):
    recipe = smoke_recipe([f"stages.{name}.steps=6" for name in ("teacher", "student")])
    for name in ("data", "teacher"):
        run_stage(recipe, name, tmp_path)
    folder = tmp_path / "teacher" / "model"
    model, tokenizer = load_pretrained(
        PretrainedModel(type="pretrained", path=str(folder)), dtype=torch.float32, device=torch.device("cpu")
    )
    model.resize_token_embeddings(len(tokenizer) - 2)
    save_model(model, tokenizer, folder)
    with pytest.raises(RecipeError, match="but its tokenizer has"):
        run_stage(recipe, "student", tmp_path)
