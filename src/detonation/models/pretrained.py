"""Any causal, sequence-to-sequence or classifying model of transformers, by its directory or its id
on the hub."""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from detonation.choices import first_line, needs, unknown
from detonation.models.built_in import fp32_logits

HUB_PREFIX = "hf:"
_LOADERS = {
    "text": ("AutoModelForCausalLM", "causal language model"),
    "translation": ("AutoModelForSeq2SeqLM", "sequence-to-sequence model"),
    "images": ("AutoModelForImageClassification", "image classifier"),
    "labels": ("AutoModelForSequenceClassification", "text classifier"),
}
CLASSIFIES = "images", "labels"
"""Tasks with a number of classes."""
_BYTES = (256, 384)
"""Numbers of ids of text as bytes, and of ByT5."""


def transformers_model(name: str) -> Callable[..., nn.Module]:
    """The function that builds the model `hf:NAME`, where NAME is a directory or an id on the
    Hugging Face hub.

    Code from the directory or the hub never runs. The function raises `ValueError` in one line for
    a name that is neither there nor reachable, a model of another task, a key that the
    configuration has not, and weights that do not fit.
    """

    def build(
        task: str = "text",
        pretrained: bool = False,
        dtype: str = "float32",
        vocab: int | None = None,
        image_size: int | None = None,
        channels: int | None = None,
        classes: int | None = None,
        **settings: Any,
    ) -> nn.Module:
        """Builds the model, in training mode.

        Args:
            task: "text" (a causal model), "translation" (sequence to sequence), "images" or
                "labels" (a classifier); filled in.
            pretrained: Start from the weights there, instead of random ones. A classifier gets a
                new head where the number of classes differs.
            dtype: Of the weights: "float32" or "bfloat16".
            vocab: Number of ids in the data, of which the model must know as many; filled in.
            image_size: Filled in from the data.
            channels: Filled in from the data.
            classes: Filled in from the data.
            settings: Any key of the model's own configuration, such as `num_hidden_layers`.
        """
        if task not in _LOADERS:
            raise unknown("model.task", task, _LOADERS)
        if dtype not in ("float32", "bfloat16"):
            raise unknown("model.dtype", dtype, ("float32", "bfloat16"))
        sizes = {"image_size": image_size, "num_channels": channels, "num_labels": classes}
        config = _configured(
            name, settings, {key: size for key, size in sizes.items() if size is not None}
        )
        _require_vocab(name, config, vocab, pretrained)
        model = _built(name, config, task, pretrained, dtype, classes)
        made: Any = model
        head = made.get_output_embeddings() or getattr(model, "classifier", None)
        if task != "text" and isinstance(head, nn.Module):  # causal models do so by themselves
            fp32_logits(head)
        return model

    return build


def image_size_of(name: str, settings: dict[str, Any]) -> dict[str, int]:
    """The `size` and `channels` of the images that the model `hf:NAME` takes, as far as its
    configuration says."""
    config = _configured(name, {}, {})
    size = settings.get("image_size", getattr(config, "image_size", None))
    channels = settings.get(
        "channels", getattr(config, "num_channels", None) if settings.get("pretrained") else None
    )
    return {
        key: value
        for key, value in {"size": size, "channels": channels}.items()
        if isinstance(value, int)
    }


def _built(
    name: str, config: Any, task: str, pretrained: bool, dtype: str, classes: int | None
) -> nn.Module:
    loader, noun = _LOADERS[task]
    auto = getattr(needs("transformers", "models"), loader)
    if type(config) not in auto._model_mapping:
        raise ValueError(
            f"{HUB_PREFIX}{name} is a {config.model_type}, which is no {noun}: the data are {task}"
        )
    options = {"dtype": getattr(torch, dtype), "trust_remote_code": False}
    try:
        if not pretrained or torch.empty(0).is_meta:  # the sizes alone are wanted
            model: nn.Module = auto.from_config(config, **options)
            return model
        options |= {"ignore_mismatched_sizes": task in CLASSIFIES, "output_loading_info": True}
        model, report = auto.from_pretrained(name, config=config, **options)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{HUB_PREFIX}{name} cannot be built: {first_line(error)}") from error
    new = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    head = {
        key
        for key, tensor in model.named_parameters()
        if task in CLASSIFIES and tensor.shape[0] == classes
    }
    if new - head:
        keys = sorted(new - head)
        raise ValueError(
            f"{HUB_PREFIX}{name} has no weights that fit {keys[0]} (and {len(keys) - 1} more): "
            "leave out the settings that change its shape, or pretrained"
        )
    return model


def _require_vocab(name: str, config: Any, vocab: int | None, pretrained: bool) -> None:
    """Raises `ValueError` where the ids of the data are not those of the model."""
    own = getattr(config.get_text_config(), "vocab_size", None)
    if vocab is None or own is None:
        return
    if vocab > own:
        remedy = (
            "set data.tokenizer to that of the model"
            if pretrained
            else f"set model.vocab_size to {vocab}"
        )
        raise ValueError(f"{HUB_PREFIX}{name} knows {own} tokens, the data have {vocab}: {remedy}")
    if pretrained and vocab in _BYTES and own != vocab:
        raise ValueError(
            f"{HUB_PREFIX}{name} has learned {own} tokens, the data are bytes: set data.tokenizer"
        )


def _configured(name: str, settings: dict[str, Any], sizes: dict[str, int]) -> Any:
    """The configuration of the model with `settings`, and with those `sizes` that it has a key for."""
    config = copy.deepcopy(_config(name))
    for key in settings:
        if not hasattr(config, key) or key.startswith("_"):
            raise unknown(
                f"key of {HUB_PREFIX}{name}",
                key,
                (k for k in config.to_dict() if not k.startswith("_")),
            )
    try:
        config = type(config).from_dict(
            config.to_dict(),
            **settings,
            **{key: size for key, size in sizes.items() if hasattr(config, key)},
        )
    except Exception as error:  # the configurations check types with errors of their own
        *_, last = str(error).strip().splitlines()
        raise ValueError(f"{HUB_PREFIX}{name} does not take {settings}: {last.strip()}") from error
    text = config.get_text_config()
    if (
        isinstance(getattr(text, "pad_token_id", None), int)
        and text.pad_token_id >= text.vocab_size
    ):
        text.pad_token_id = None  # of a larger vocabulary
    if hasattr(text, "use_cache"):
        text.use_cache = False  # it keeps keys and values, for generation
    return config


@functools.cache
def _config(name: str) -> Any:
    transformers = needs("transformers", "models")
    transformers.utils.logging.set_verbosity_error()  # the lines of the run say what is needed
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each try
    if not name:
        raise ValueError("'hf:' names no model: write hf:DIRECTORY or hf:ID of the hub")
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        problem = "is no directory with a config.json, and no model that the hub gives us"
        raise ValueError(f"{HUB_PREFIX}{name} {problem}: {first_line(error)}") from error
    except Exception as error:  # of a type, as above
        *_, last = str(error).strip().splitlines()
        raise ValueError(
            f"{HUB_PREFIX}{name} has a config.json that does not fit: {last.strip()}"
        ) from error
