"""Models by name: thin adapters over transformers; `model(**batch)` returns `loss`, in nats and fp32, and `logits`.

The initial weights depend on `torch.manual_seed` alone; `adapters` holds the parts that all models share. It imports
nothing else of the package; `train` and the benchmarks may call it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from detonation.choices import find_function, make
from detonation.models import gpt, moe, t5, vit

__all__ = ["MODELS", "build_model"]

MODELS: Mapping[str, Callable[..., nn.Module]] = {"olmo2": gpt.olmo2, "olmoe": moe.olmoe, "t5": t5.t5, "vit": vit.vit}


def model_function(name: str) -> Callable[..., nn.Module]:
    """The function that builds the model called `name`; `ValueError` for a name that does not exist.

    Besides `MODELS`, a name may be an entry point of `detonation.models`, or "package.module:function".
    """
    return find_function("model", name, MODELS, "detonation.models")


def build_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Builds a model by name, in training mode and with random weights.

    Args:
        name: See `model_function`.
        arguments: Of the model's function: `olmo2`, `olmoe`, `t5` or `vit`.

    Raises:
        ValueError: Unknown name or argument, or sizes that do not fit together.

    Example:
        >>> build_model("vit", {"image_size": 28, "patch_size": 5})
        Traceback (most recent call last):
        ValueError: patch_size 5 does not divide image_size 28: the image is cut into whole patches
    """
    return make("model", {name: model_function(name)}, name, arguments)
