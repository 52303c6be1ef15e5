"""Whether a machine can hold weights in four bits. Without torch: asked before anything starts, too."""

from __future__ import annotations

from importlib.util import find_spec

from dynamo_core.errors import RecipeError


def require_quantisation(where: str, *, gpu: bool) -> None:
    """Refuse what would fail after minutes of loading.

    Args:
        where: the recipe's key.
        gpu: whether the stage runs on a CUDA GPU.

    Raises:
        RecipeError: no GPU, or no bitsandbytes.
    """
    if not gpu:
        raise RecipeError(f"{where}: 4bit needs a CUDA GPU, and this stage has none", "leave quantisation out")
    if find_spec("bitsandbytes") is None:
        raise RecipeError(f"{where}: 4bit needs bitsandbytes, which is not installed", "pip install bitsandbytes")
