"""Causal, sequence-to-sequence and classification models of transformers, by a directory or an id
of the hub.
"""

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from detonation.choices import first_line, first_names, needs, unknown
from detonation.models.built_in import fp32_logits

HUB_PREFIX = "hf:"
_LOADERS = {
    "text": ("AutoModelForCausalLM", "causal language model"),
    "translation": ("AutoModelForSeq2SeqLM", "sequence-to-sequence model"),
    "images": ("AutoModelForImageClassification", "image classifier"),
    "labels": ("AutoModelForSequenceClassification", "text classifier"),
}
CLASSIFIES = "images", "labels"
"""Tasks whose models need a number of classes."""
_BYTES = (256, 384)
"""Vocabulary sizes that mean bytes: 256 for plain bytes, and 384 for ByT5."""


def transformers_model(name: str) -> Callable[..., nn.Module]:
    """Returns a function that builds the model `hf:NAME`. NAME is a directory or an id of the
    Hugging Face hub.

    This function never runs code from the directory or the hub. It raises `ValueError` if the model
    cannot be reached, if it is for another task, if its configuration lacks a given key, or if its
    weights do not fit.
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
                "labels" (a classifier); filled in from the data.
            pretrained: Start from the pretrained weights instead of random weights. A classifier
                gets a new head if the number of classes differs.
            dtype: Data type of the weights: "float32" or "bfloat16".
            vocab: Number of ids that the model must support; filled in from the data.
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
        given = {key: size for key, size in sizes.items() if size is not None}
        config = _configured(name, settings, given)
        _require_vocab(name, config, vocab, pretrained)
        model = _built(name, config, task, pretrained, dtype, classes)
        made: Any = model
        if task == "labels":
            made.own_padding = _padding_of(made.config.get_text_config())
            made.register_forward_pre_hook(_fill_padding, with_kwargs=True)
        head = made.get_output_embeddings() or getattr(model, "classifier", None)
        # causal models already compute their logits in fp32
        if task != "text" and isinstance(head, nn.Module):
            fp32_logits(head)
        return model

    return build


def _padding_of(config: Any) -> int:
    """Returns the padding id of a text model. If the model has none, its `config` gets the id of
    the end of text, or else 0. A decoder that classifies needs this id to find the last token of a
    text.
    """
    pad = getattr(config, "pad_token_id", None)
    if pad is None or pad < 0:
        end = getattr(config, "eos_token_id", None)
        if isinstance(end, list):
            end = end[0]
        pad = end or 0
        config.pad_token_id = pad
    return int(pad)


def _fill_padding(
    model: Any, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Fills the padding of texts with the model's own padding id, because the tokenizer may have
    another padding id, or none.
    """
    if not {"input_ids", "attention_mask"} <= named.keys():
        return inputs, named
    padding = named["attention_mask"] == 0
    filled = named["input_ids"].masked_fill(padding, model.own_padding)
    return inputs, {**named, "input_ids": filled}


def restore_generation(name: str | None, pretrained: bool, model: Any) -> None:
    """Restores the settings for the generation of text. For training, a model is built without the
    cache of keys and values, and without the generation settings of its directory.

    Args:
        name: Directory or id on the hub; None for a model of this package.
        pretrained: Use the generation settings of `name`, not only those of the configuration.
    """
    text = model.config.get_text_config()
    if not hasattr(text, "use_cache"):
        return
    text.use_cache = name is None or _config(name).get_text_config().use_cache
    if not model.can_generate():
        return
    settings = needs("transformers", "models").GenerationConfig
    model.generation_config = settings.from_model_config(model.config)
    if name is None or not pretrained:
        return
    try:
        model.generation_config = settings.from_pretrained(name)
    except OSError:  # older models have these settings in their configuration
        older = settings.from_pretrained(name, "config.json", _from_model_config=True)
        model.generation_config = older


def image_size_of(name: str, settings: dict[str, Any]) -> dict[str, int]:
    """Returns the `size` and `channels` of images for `hf:NAME`, if the configuration of the model
    fixes them.
    """
    config = _configured(name, {}, {})
    sizes = {"size": getattr(config, "image_size", None)}
    if settings.get("pretrained"):
        sizes["channels"] = getattr(config, "num_channels", None)
    for key, setting in (("size", "image_size"), ("channels", "channels")):
        if setting in settings:
            sizes[key] = settings[setting]
    return {key: value for key, value in sizes.items() if isinstance(value, int)}


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
        # on the meta device only the sizes of weights matter, so load no weights
        if not pretrained or torch.empty(0).is_meta:
            model: nn.Module = auto.from_config(config, **options)
            return model
        options |= {"ignore_mismatched_sizes": task in CLASSIFIES, "output_loading_info": True}
        model, report = auto.from_pretrained(name, config=config, **options)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        raise ValueError(f"{HUB_PREFIX}{name} cannot be built: {first_line(error)}") from error
    new = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    head = set()
    if task in CLASSIFIES:
        head = {key for key, tensor in model.named_parameters() if tensor.shape[0] == classes}
    if new - head:
        keys = sorted(new - head)
        raise ValueError(
            f"{HUB_PREFIX}{name} has no weights that fit {first_names(keys, 1)}: leave out the"
            " settings that change shapes of weights, or leave out pretrained"
        )
    _freeze_as_built(model)
    return model


def _freeze_as_built(model: nn.Module) -> None:
    """Freezes the parameters that the model's class freezes itself, such as sinusoidal positions.
    `from_pretrained` makes them trainable, but `save_pretrained` does not always write them.
    """
    with torch.device("meta"):
        built = type(model)(copy.deepcopy(model.config))
    frozen = {name for name, each in built.named_parameters() if not each.requires_grad}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)


def _require_vocab(name: str, config: Any, vocab: int | None, pretrained: bool) -> None:
    """Raises `ValueError` if the data use token ids that are outside the vocabulary of the
    model.
    """
    own = getattr(config.get_text_config(), "vocab_size", None)
    if vocab is None or own is None:
        return
    if vocab > own:
        remedy = f"set model.vocab_size to {vocab}"
        if pretrained:
            remedy = "set data.tokenizer to that of the model"
        raise ValueError(
            f"{HUB_PREFIX}{name} knows only {own} tokens, but the data have {vocab}: {remedy}"
        )
    if pretrained and vocab in _BYTES and own != vocab:
        raise ValueError(
            f"{HUB_PREFIX}{name} has learned {own} tokens, but the data are bytes: set"
            " data.tokenizer to that of the model"
        )


def _configured(name: str, settings: dict[str, Any], sizes: dict[str, int]) -> Any:
    """Returns the configuration of the model, changed by `settings` and `sizes`. Ignores sizes for
    which the configuration has no key.
    """
    config = copy.deepcopy(_config(name))
    for key in settings:
        if not hasattr(config, key) or key.startswith("_"):
            keys = [each for each in config.to_dict() if not each.startswith("_")]
            raise unknown(f"key of {HUB_PREFIX}{name}", key, keys)
    fitting = {key: size for key, size in sizes.items() if hasattr(config, key)}
    try:
        config = type(config).from_dict(config.to_dict(), **settings, **fitting)
    except Exception as error:
        # configurations check the types of values, and raise errors of many classes
        *_, last = str(error).strip().splitlines()
        raise ValueError(f"{HUB_PREFIX}{name} does not take {settings}: {last.strip()}") from error
    text = config.get_text_config()
    padding = getattr(text, "pad_token_id", None)
    if isinstance(padding, int) and padding >= text.vocab_size:
        # the padding id is outside the vocabulary, which `settings` may have made smaller
        text.pad_token_id = None
    if hasattr(text, "use_cache"):
        text.use_cache = False  # training does not reuse cached keys and values
    return config


@functools.cache
def _config(name: str) -> Any:
    transformers = needs("transformers", "models")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # do not print a warning for each retry of a download
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not name:
        raise ValueError("'hf:' names no model: write hf:DIRECTORY or hf:ID of the hub")
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        problem = "is no directory with a config.json, and no model that the hub gives us"
        raise ValueError(f"{HUB_PREFIX}{name} {problem}: {first_line(error)}") from error
    except Exception as error:  # configurations raise errors of many classes
        *_, last = str(error).strip().splitlines()
        raise ValueError(
            f"{HUB_PREFIX}{name} has a config.json that does not fit: {last.strip()}"
        ) from error
