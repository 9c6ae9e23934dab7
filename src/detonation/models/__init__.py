"""Models by name, over transformers; `model(**batch)` returns `loss`, in nats and fp32, and
`logits`.

The initial weights depend on `torch.manual_seed` alone. It imports nothing
else of the package; `train` and the benchmarks may call it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from detonation.choices import find_function, make
from detonation.models.built_in import olmo2, olmoe, t5, vit
from detonation.models.pretrained import HUB_PREFIX, image_size_of, transformers_model

__all__ = ["MODELS", "TASK_OF", "build_model", "image_arguments", "model_function"]

MODELS: Mapping[str, Callable[..., nn.Module]] = {
    "olmo2": olmo2,
    "olmoe": olmoe,
    "t5": t5,
    "vit": vit,
}
TASK_OF = {"olmo2": "text", "olmoe": "text", "t5": "translation", "vit": "images"}
"""The kind of data that each model takes."""


def model_function(name: str) -> Callable[..., nn.Module]:
    """The function that builds the model called `name`; `ValueError` for a name that does not
    exist.

    Besides `MODELS`, a name may be `hf:` and a directory or an id of the hub, or
    "package.module:function".
    """
    if name.startswith(HUB_PREFIX):
        return transformers_model(name.removeprefix(HUB_PREFIX))
    try:
        return find_function("model", name, MODELS)
    except ValueError as error:
        if ":" in name:
            raise
        raise ValueError(
            f"{error}, or hf:{name if '/' in name else 'NAME'} for a model of transformers"
        ) from error


def image_arguments(name: str, arguments: Mapping[str, Any]) -> dict[str, int]:
    """The `size` and `channels` that the model called `name` fixes for the images; empty where it
    takes any."""
    if name.startswith(HUB_PREFIX):
        return image_size_of(name.removeprefix(HUB_PREFIX), dict(arguments))
    given = {"size": arguments.get("image_size"), "channels": arguments.get("channels")}
    return {key: value for key, value in given.items() if isinstance(value, int)}


def build_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Builds a model by name, in training mode and with random weights.

    The arguments are those of the model's function: `olmo2`, `olmoe`, `t5`, `vit`, or as
    `transformers_model` lists.

    Raises:
        ValueError: Unknown name or argument, sizes that do not fit together, or a function that
            makes no module.

    Example:
        >>> build_model("vit", {"image_size": 28, "patch_size": 5})
        Traceback (most recent call last):
        ValueError: patch_size 5 does not divide image_size 28: the image is cut into whole patches
    """
    made = make("model", {name: model_function(name)}, name, arguments)
    if not isinstance(made, nn.Module):
        raise ValueError(f"model {name} makes a {type(made).__name__}, must make a torch.nn.Module")
    return made.train()  # pretrained ones come in evaluation mode
