"""Models of transformers by name. `model(**batch)` returns `logits`, and a fp32 `loss` in nats.

Random initial weights depend only on `torch.manual_seed`.
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
"""The task that each model is for."""


def model_function(name: str) -> Callable[..., nn.Module]:
    """Returns the function that builds a model. Raises `ValueError` for an unknown name.

    The name is one of `MODELS`, `hf:` with a directory or an id of the hub, or
    "package.module:function".
    """
    if name.startswith(HUB_PREFIX):
        return transformers_model(name.removeprefix(HUB_PREFIX))
    try:
        return find_function("model", name, MODELS)
    except ValueError as error:
        if ":" in name:
            raise
        hub_name = "NAME"
        if "/" in name:
            hub_name = name
        raise ValueError(f"{error}, or hf:{hub_name} for a model of transformers") from error


def image_arguments(name: str, arguments: Mapping[str, Any]) -> dict[str, int]:
    """Returns the `size` and `channels` of images that the model requires. A value that the model
    does not fix is left out.
    """
    if name.startswith(HUB_PREFIX):
        return image_size_of(name.removeprefix(HUB_PREFIX), dict(arguments))
    given = {"size": arguments.get("image_size"), "channels": arguments.get("channels")}
    return {key: value for key, value in given.items() if isinstance(value, int)}


def build_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Builds a model by name, in training mode. The weights are random without the argument
    `pretrained`.

    The `arguments` are those of the function of this model: `olmo2`, `olmoe`, `t5`, `vit`, or the
    function that `transformers_model` returns.

    Raises:
        ValueError: Unknown name or argument, sizes that do not fit together, or a function that
            returns no module.

    Example:
        >>> build_model("vit", {"image_size": 28, "patch_size": 5})
        Traceback (most recent call last):
        ValueError: patch_size 5 does not divide image_size 28: the image is cut into whole patches
    """
    made = make("model", {name: model_function(name)}, name, arguments)
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"model {name} returns a {type(made).__name__}, but must return a torch.nn.Module"
        )
    return made.train()  # pretrained models are created in evaluation mode
