"""Models: made from a recipe, loaded from a folder or hub id, saved as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

from dynamo_core.config.models import PretrainedModel, ScratchModel
from dynamo_core.data.templates import all_eos_ids
from dynamo_core.errors import RecipeError

ADAPTER_CONFIG = "adapter_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NO_DROPOUT = (
    "activation_dropout",
    "attention_dropout",
    "attn_pdrop",
    "dropout",
    "embd_pdrop",
    "hidden_dropout",
    "resid_pdrop",
)


def build_scratch(spec: ScratchModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A randomly initialised model for `tokenizer`; equal seeds give equal weights, whatever ran before."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=spec.width,
        intermediate_size=spec.ffn_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return cast(PreTrainedModel, model)


def load_model(
    source: str | Path, *, dtype: torch.dtype, device: torch.device, four_bit: bool = False
) -> PreTrainedModel:
    """A causal language model from a folder or hub id, every dropout off.

    Args:
        four_bit: hold the weights of linear layers as NF4; `dtype` is what they are computed in.

    Raises:
        RecipeError: nothing there, an adapter, or not a model that transformers can load without remote code.
    """
    transformers_logging.disable_progress_bar()
    if (Path(source) / ADAPTER_CONFIG).exists():  # else transformers would go and fetch the base that it names
        raise RecipeError(f"'{source}' holds an adapter, not a whole model", "give the folder of the merged model")
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        _switch_off_dropout(config)
        model = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=dtype, trust_remote_code=False, use_safetensors=True,
            **(_nf4(dtype, device) if four_bit else {}),
        )  # fmt: skip
    except (OSError, ValueError) as error:
        cause = f"cannot load a model from '{source}': {_first_line(error)}"
        raise RecipeError(cause, "give a model folder") from error
    placed: Any = model
    return cast(PreTrainedModel, placed if four_bit else placed.to(device))


def _nf4(dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config, "device_map": {"": device}}


def load_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub id.

    Raises:
        RecipeError: nothing there, or the tokenizer has no chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RecipeError(f"cannot load a tokenizer from '{source}': {_first_line(error)}") from error
    if tokenizer.chat_template is None:
        raise RecipeError(f"the tokenizer of '{source}' has no chat template", "use an instruction-tuned model")
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_pretrained(
    spec: PretrainedModel, *, dtype: torch.dtype, device: torch.device, four_bit: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer that a recipe names.

    Raises:
        RecipeError: as `load_model`, `load_tokenizer` and `require_rows`.
    """
    path = str(Path(spec.path).expanduser()) if spec.path.startswith("~") else spec.path
    model, tokenizer = load_model(path, dtype=dtype, device=device, four_bit=four_bit), load_tokenizer(path)
    require_rows(model, tokenizer, path)
    return model, tokenizer


def require_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: str | Path) -> None:
    """A token that tokenizer or data use must have a row in the model.

    Raises:
        RecipeError: the model's vocabulary is smaller than the tokenizer's. No token is ever added to a model.
    """
    rows = cast(nn.Embedding, model.get_input_embeddings()).num_embeddings
    if rows < len(tokenizer):
        raise RecipeError(
            f"the model in '{source}' knows {rows} tokens, but its tokenizer has {len(tokenizer)}",
            "give a model whose embedding was resized to its tokenizer",
        )


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that plain `AutoModelForCausalLM.from_pretrained` loads; it carries no local path."""
    transformers_logging.disable_progress_bar()
    model.config.name_or_path = ""
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.name_or_path = ""
    tokenizer.save_pretrained(folder)


def eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token id that ends a turn (TRL#2387: passing one of several lets the model run on)."""
    return all_eos_ids(tokenizer, model.generation_config)


def parameter_count(model: PreTrainedModel) -> int:
    """Distinct parameters; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _switch_off_dropout(config: PretrainedConfig) -> None:
    """Dropout makes the ratio of the first update differ from 1 (TRL#3234)."""
    for name in _NO_DROPOUT:
        if getattr(config, name, None):
            setattr(config, name, 0.0)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
