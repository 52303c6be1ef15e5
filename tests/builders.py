"""Small models, prompts and stage folders that many tests start from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynamo_core import stages
from dynamo_core.config.load import dump_recipe, load_recipe, parse_recipe
from dynamo_core.config.models import ScratchModel
from dynamo_core.config.recipe import Recipe
from dynamo_core.config.spec import StageSpec
from dynamo_core.data.templates import encode_prompt, train_tokenizer
from dynamo_core.training.models import build_scratch
from dynamo_core.types import Message, PromptRow, RolloutRequest, Sampling

CONFIGS = Path(__file__).parent.parent / "configs"
SHAPE = ScratchModel(
    type="scratch", layers=2, width=64, heads=2, kv_heads=1, head_dim=32, ffn_width=96, context=128, vocab_size=64
)


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Digits, operators and the chat template's markers."""
    return train_tokenizer(["12+3=15\n#### 15", "40-7=33\n#### 33", "2*8=?", "0123456789"], 64)


def tiny_model(
    tokenizer: PreTrainedTokenizerBase, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Random weights, spread widely enough that entropies differ between tokens."""
    model = build_scratch(SHAPE, tokenizer, seed).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    return model


def prompt_row(text: str, answer: str = "1") -> PromptRow:
    """A one-turn task whose id is its text."""
    return PromptRow(text, (Message("user", text),), answer, "2", "test")


def requests(
    tokenizer: PreTrainedTokenizerBase, counts: dict[str, int], *, max_new_tokens: int = 16, temperature: float = 1.0
) -> list[RolloutRequest]:
    """One request a question, with its number of rollouts."""
    sampling = Sampling(temperature, max_new_tokens, seed=5)
    return [
        RolloutRequest(text, encode_prompt(tokenizer, prompt_row(text).messages), 1, n, sampling)
        for text, n in counts.items()
    ]


def smoke_recipe(overrides: Sequence[str] = ()) -> Recipe:
    """configs/smoke.yaml with `a.b=value` overrides."""
    return load_recipe(CONFIGS / "smoke.yaml", list(overrides))


def with_dpo(recipe: Recipe, **fields: Any) -> Recipe:
    """`recipe` with a small dpo stage `preferred` after its others, which goes on from `teacher`."""
    stage: dict[str, Any] = {
        "type": "dpo",
        "model_from": "teacher",
        "steps": 30,
        "batch_size": 16,
        "micro_batch_size": 16,
        "max_length": 128,
        "beta": 0.5,
        "optimizer": {"lr": 1e-3},
    }
    content = yaml.safe_load(dump_recipe(recipe))
    content["stages"]["preferred"] = {**stage, **fields}
    return parse_recipe(content, "with_dpo")


def stage_folder(recipe: Recipe, name: str, root: Path) -> Path:
    """`root/<name>` with its spec.json; inputs are the folders of the producing stages beside it."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    stage = recipe.stages[name]
    StageSpec(
        recipe=recipe.name,
        name=name,
        key="0" * 64,
        seed=recipe.seed,
        stage=stage,
        resources=stage.resources or recipe.resources,
        inputs={role: str(root / producer) for role, producer in recipe.inputs(name).items()},
    ).write(folder)
    return folder


def run_stage(recipe: Recipe, name: str, root: Path) -> Path:
    """Run one stage in this process."""
    folder = stage_folder(recipe, name, root)
    stages.run(folder)
    return folder


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
