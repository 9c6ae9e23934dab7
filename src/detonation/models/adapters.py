"""Shared parts of the models: the import of transformers, checks of sizes, and fp32 logits."""

from types import ModuleType
from typing import Any

from torch import Tensor, nn


def transformers_or_error() -> ModuleType:
    """Imports transformers, which takes seconds; raises `ValueError` with the extra where it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError("models need transformers: pip install 'detonation-torch[models]'") from error
    return transformers


def require_positive(**sizes: int) -> None:
    """Raises `ValueError` for the first size that is below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")


def require_dropout(dropout: float) -> None:
    """Raises `ValueError` unless `dropout` is a probability below 1."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1, not {dropout}")


def head_width(hidden_size: int, heads: int) -> int:
    """Returns the width of an attention head; raises `ValueError` unless `heads` divides `hidden_size`."""
    require_positive(hidden_size=hidden_size, heads=heads)
    if hidden_size % heads:
        raise ValueError(f"heads {heads} does not divide hidden_size {hidden_size}: each head takes an equal share")
    return hidden_size // heads


def require_even(head_dim: int, heads: int, hidden_size: int) -> None:
    """Raises `ValueError` where attention heads have an odd width, which rotary positions cannot turn."""
    if head_dim % 2:
        raise ValueError(f"heads {heads} of hidden_size {hidden_size} are {head_dim} wide: rotary positions need even")


def fp32_logits(head: nn.Module) -> None:
    """Makes `head` return fp32, so that the loss of a bf16 model is fp32, too. Changes `head`."""
    head.register_forward_hook(_to_fp32)


def _to_fp32(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
    return logits.float()
