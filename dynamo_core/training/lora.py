"""Low-rank adapters inside a causal language model: put in, switched off, merged, saved.

peft injects them in place, so the model stays what the rest of the project knows: a transformers model with its own
backbone, output layer and generation. Whatever reads it sees base and adapters together.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from dynamo_core.config.models import Lora
from dynamo_core.errors import NumericalFailure, RecipeError
from dynamo_core.training.models import ADAPTER_CONFIG, save_model

MERGE_TOLERANCE = 1e-4
"""Largest difference of outputs after merging, relative to the largest output; in float32."""
ROUNDED_TOLERANCE = 0.1
"""The same, where a bfloat16 model is compared with its float32 copy: rounding itself makes a few hundredths."""
_NAME = "default"
Model = TypeVar("Model", bound=PreTrainedModel)


def add_adapters(model: PreTrainedModel, spec: Lora, seed: int) -> None:
    """Put adapters into `model` and freeze the rest; they start as no change. Equal seeds give equal adapters.

    Raises:
        RecipeError: a name in `target_modules` is not that of a linear layer.
    """
    names = _linear_names(model)
    wanted = names if spec.target_modules == "all-linear" else sorted(set(spec.target_modules))
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise RecipeError(f"lora.target_modules: the model has no linear layer {unknown}, only {names}")
    config = LoraConfig(
        r=spec.rank, lora_alpha=cast(int, spec.alpha), lora_dropout=0.0, target_modules=wanted, bias="none",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, _NAME)


def _linear_names(model: PreTrainedModel) -> list[str]:
    """Last parts of the names of linear layers; not the output layer, which often is the embedding too."""
    head = model.get_output_embeddings()
    return sorted(
        {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module is not head
        }
    )


def _adapted(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def has_adapters(model: nn.Module) -> bool:
    """Whether `model` holds any."""
    return bool(_adapted(model))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within, `model` is what it was before its adapters."""
    layers = _adapted(model)
    for _, layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for _, layer in layers:
            layer.enable_adapters(True)


@torch.no_grad()
def merged(model: Model) -> Model:
    """`model` without adapters that computes the same; `model` itself is untouched, or returned if it has none.

    Merged in float32, four-bit weights as what they stand for, then rounded to the model's precision.

    Raises:
        NumericalFailure: outputs before and after differ.
    """
    if not has_adapters(model):
        return model
    whole: Any = copy.deepcopy(model).eval()  # type: ignore[no-untyped-call]
    _dequantise(whole)
    nn.Module.to(whole, torch.promote_types(model.dtype, torch.float32))
    before, live = _outputs(whole), _outputs(model)
    for name, layer in _adapted(whole):
        base = layer.get_base_layer()
        base.weight += layer.get_delta_weight(_NAME)
        whole.set_submodule(name, base)
    vars(whole).pop("peft_config", None)
    after = _outputs(whole)
    _check(after, before, MERGE_TOLERANCE)
    _check(after, live, MERGE_TOLERANCE if before.dtype == live.dtype else ROUNDED_TOLERANCE)
    nn.Module.to(whole, model.dtype)
    return cast(Model, whole)


def _check(after: torch.Tensor, before: torch.Tensor, tolerance: float) -> None:
    difference = float((after - before).abs().max() / before.abs().max())
    if not difference <= tolerance:
        raise NumericalFailure(
            f"outputs of the merged model differ from those with adapters by {difference:.1e} of the largest,"
            f" more than {tolerance:g}"
        )


def _outputs(model: PreTrainedModel) -> torch.Tensor:
    """Logits, or a backbone's states, of a fixed batch."""
    vocabulary = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    token_ids_BL = torch.arange(2 * 16, device=model.device).mul(7919).remainder(vocabulary).reshape(2, 16)
    return cast(torch.Tensor, model(input_ids=token_ids_BL, use_cache=False)[0])


def _dequantise(model: PreTrainedModel) -> None:
    """Replace four-bit layers by plain ones of the weights that they stand for."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, LoraLayer) or type(getattr(layer, "weight", None)).__name__ != "Params4bit":
            continue
        weight = dequantize_module_weight(layer).float()
        plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        plain.bias = cast(nn.Linear, layer).bias
        model.set_submodule(name, plain)
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit"):
        vars(model).pop(attribute, None)
    vars(model.config).pop("quantization_config", None)


def publish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write `folder/model`, which plain transformers loads; with adapters, also these alone as `folder/adapter`.

    Raises:
        NumericalFailure: see `merged`.
    """
    save_model(merged(model), tokenizer, folder / "model")
    if has_adapters(model):
        save_adapter(model, folder / "adapter")


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write a folder that `PeftModel.from_pretrained(base, folder)` loads; it carries no local path."""
    folder.mkdir()
    config = cast(Any, model).peft_config[_NAME].to_dict()
    config["target_modules"] = sorted(config["target_modules"])  # a set has no order to repeat
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = get_peft_model_state_dict(model, adapter_name=_NAME, save_embedding_layers=False)
    save_file(
        {f"base_model.model.{name}": tensor.contiguous() for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def parameter_counts(model: PreTrainedModel) -> dict[str, float]:
    """Distinct parameters, of the published model and of those that train."""
    adapters = sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"parameters": float(model.num_parameters() - adapters), "parameters_trained": float(trained)}
