"""Models by name: thin adapters over transformers, with random weights and a loss in nats.

Contract: `output = model(**batch)`; `output.loss` is the mean loss in nats, an fp32 scalar; `output.logits` is there
too. The random weights are a function of `torch.manual_seed` alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from detonation import choices
from detonation.models import gpt, t5, vit

__all__ = ["MODELS", "build"]

MODELS: Mapping[str, Callable[..., nn.Module]] = {"olmo2": gpt.olmo2, "t5": t5.t5, "vit": vit.vit}


def build(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The model called `name` in `MODELS`, in training mode, with random weights.

    Raises `ValueError` for an unknown name or argument, and for sizes that do not fit one another.

    >>> build("vit", {"image_size": 28, "patch_size": 5})
    Traceback (most recent call last):
    ValueError: patch_size 5 does not divide image_size 28: the image is cut into whole patches
    """
    return choices.make("model", MODELS, name, arguments)
