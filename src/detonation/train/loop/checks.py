"""Checks of a recipe before its first process starts. The checks build all parts of the recipe, and
find parts that do not fit together.
"""

import functools
import hashlib
import importlib.util
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from detonation.checkpoint.files.reader import Box
from detonation.choices import find_function, plain_types
from detonation.cluster.mesh import layers_of
from detonation.core.flat.tensors import digest
from detonation.core.optimizer import setup_checks
from detonation.core.schemes import Scheme, check_order, known_schemes, require_below_dense, scheme
from detonation.data import Data, Streamed, dataset_function, load_dataset
from detonation.data.translation import TranslationPairs
from detonation.models import TASK_OF, build_model, image_arguments, model_function
from detonation.train.recipe import optimizers
from detonation.train.recipe.schema import (
    Choice,
    Config,
    LevelConfig,
    TrainConfig,
    described_mesh,
    require,
)
from detonation.train.recipe.tables import REPLICATE


def check_config(config: Config) -> Config:
    """Returns `config` with the defaults of its scheme, and with the model sizes that follow from
    the data.

    Needs no other processes, and writes no files.

    Raises:
        ValueError: A name or an argument is wrong, a value is out of range, data are missing, or
            sizes do not fit.
    """
    check_types("model", model_function(config.model.name), config.model.arguments)
    check_types("data", dataset_function(config.data.name), config.data.arguments)
    if config.data.name == "images":
        form = image_arguments(config.model.name, config.model.arguments)
        config = replace(config, data=Choice("images", {**form, **config.data.arguments}))
    levels = check_levels(config.levels, config.train.balance)
    optimizers.check_optimizer(config.optimizer)
    loaded = _checked_data(config)
    model = Choice(config.model.name, _agreeing(config.model, loaded))
    built = _checked_model(model, loaded)
    _with_layers(built, config.train)
    _require_one_batch(config, loaded)
    if config.train.bleu_sentences:
        check_translates(built, loaded)
    return replace(config, model=model, levels=levels, train=_with_steps(config, loaded))


def _checked_data(config: Config) -> Data:
    """Loads the data. Raises `ValueError` if validation or the model cannot use these data."""
    loaded = load_data(config.data)
    if not isinstance(loaded, Data):
        raise ValueError(
            f"data {config.data.name} returns a {type(loaded).__name__}, but must return"
            " a detonation.data.Data"
        )
    if not len(loaded.validation):
        raise ValueError(
            f"data {config.data.name} has no held-out examples: give at least one for validation"
        )
    task = TASK_OF.get(config.model.name, loaded.kind)
    if task != loaded.kind:
        fitting = " or ".join(name for name, kind in TASK_OF.items() if kind == loaded.kind)
        raise ValueError(
            f"model {config.model.name} is for {task}, but the data {loaded.name} are"
            f" {loaded.kind}: choose {fitting}, or other data"
        )
    return loaded


def _checked_model(model: Choice, loaded: Data) -> nn.Module:
    """Builds the model on the meta device. Raises `ValueError` if the model does not accept the
    data's batches.
    """
    with torch.device("meta"):
        built = build_model(model.name, model.arguments)
    try:
        inspect.signature(built.forward).bind(**loaded.validation[torch.tensor([0])])
    except TypeError as error:
        raise ValueError(
            f"model {model.name} cannot take the batches of the data {loaded.name}: {error}"
        ) from error
    return built


def _require_one_batch(config: Config, loaded: Data) -> None:
    """Raises `ValueError` if the data have fewer examples than one batch of all ranks together."""
    if isinstance(loaded.train, Streamed):
        return
    needed = config.train.batch_size * sum(config.mesh.sizes)
    available = len(loaded.train)
    if needed > available:
        sizes = f"{config.train.batch_size} x {described_mesh(config.mesh)}"
        raise ValueError(
            f"train.batch_size {sizes} = {needed} examples, but the data have {available}:"
            " set a smaller train.batch_size"
        )


def check_translates(model: Any, data: Data) -> None:
    if not isinstance(data.validation, TranslationPairs):
        raise ValueError(
            f"train.bleu_sentences is for translations, but the data {data.name} are {data.kind}:"
            " leave it out"
        )
    if getattr(getattr(model, "config", None), "decoder_start_token_id", None) is None:
        raise ValueError(
            "train.bleu_sentences needs a model with config.decoder_start_token_id, as translation"
            " models have: choose such a model, or leave train.bleu_sentences out"
        )
    if not importlib.util.find_spec("sacrebleu"):
        raise ValueError(
            "train.bleu_sentences needs sacrebleu: pip install '.[metrics]' in a clone"
        )


def _with_steps(config: Config, loaded: Data) -> TrainConfig:
    """Returns the table [train] with its epochs converted to steps. If the table sets steps,
    returns the table unchanged.
    """
    train = config.train
    if train.steps:
        return train
    if isinstance(loaded.train, Streamed):
        raise ValueError("train.epochs needs data of known length, not a stream: set train.steps")
    examples = train.batch_size * train.accumulate * sum(config.mesh.sizes)
    steps = math.ceil(train.epochs * len(loaded.train) / examples)
    return replace(train, steps=max(1, steps))


def check_sizes(config: Config) -> None:
    """Raises `LargerThanDense` if a level of replication would send more bytes than full
    synchronisation.

    Without this check, the first step would raise the same error.
    """
    shards = shard_shapes(config)
    for level in config.levels:
        chosen = scheme_of(level)
        if chosen.signal == "nothing":
            continue
        for shapes in shards:
            require_below_dense(chosen, chosen.codec.layout(shapes), level.replicas)


def shard_shapes(config: Config) -> list[dict[str, tuple[int, ...]]]:
    """Returns the shapes of the trained parameters on each rank of a node. Allocates no memory for
    the model.
    """
    with torch.device("meta"):
        model = build_model(config.model.name, config.model.arguments)
    return [local_shapes(model, shard, config.mesh.shards) for shard in range(config.mesh.shards)]


def local_shapes(model: nn.Module, shard: int, shards: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the trained parameters on one shard, by name."""
    shapes = {}
    for name, parameter in model.named_parameters():
        remedy = "(1,) or larger: FSDP2 shards no scalar"
        require(parameter.dim() > 0, f"the shape of {name}", (), remedy)
        if parameter.requires_grad:
            shapes[name] = Box.of_shard(parameter, shard, shards).shape
    return shapes


def misfits(config: Config) -> list[str]:
    """Returns the settings of `config` that conflict: one line for each conflict, with its
    remedy.
    """
    steps = config.train.steps
    warmup = config.schedule.warmup
    optimizer = config.optimizer
    found = []
    if warmup >= steps:
        found.append(
            f"schedule.warmup is {warmup}, all of the {steps} steps, so the learning rate only"
            " rises: set a smaller warmup"
        )
    signs_alone = optimizer.name == "SignSGD" and not optimizer.arguments.get("momentum")
    if config.train.clip and signs_alone:
        found.append(
            "train.clip changes nothing for SignSGD without momentum, which uses only signs:"
            " leave it out"
        )
    ratio = optimizer.embedding_lr_ratio
    if optimizer.name == "Muon" and ratio > 1:
        found.append(
            f"optimizer.embedding_lr_ratio is {ratio:g}, but Muon was best at 0.3, and 30 is the"
            " ratio of AdamW (docs/findings.md): leave it out, or tune it for Muon"
        )
    for level in config.levels:
        chosen = scheme_of(level)
        every = chosen.round.every
        if every > steps:
            found.append(
                f"{chosen.name} exchanges every {every} steps, but the run has {steps}: replicas"
                " exchange only at the end; choose a smaller every"
            )
    return found


def _with_layers(model: nn.Module, train: TrainConfig) -> nn.Module:
    if train.compile:
        compile_layers(model, train.compile)
    if train.checkpoint_activations:
        checkpoint_activations(model)
    return model


def checkpoint_activations(model: nn.Module) -> None:
    """Makes each layer keep only its inputs for backward. Backward computes all other values of the
    layer again.

    Changes the model in place, and keeps all names. Call this function after `compile_layers` and
    before `shard`, because the hooks of `shard` must gather a layer's weights for both computations
    of the layer. Raises `ValueError` if the model has no layers.
    """
    for layer in _some_layers(model, "train.checkpoint_activations"):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_layers(model: nn.Module, backend: str) -> None:
    """Compiles each layer of the model separately; layers of equal shape are compiled once.

    Changes the model in place, and keeps all names. The hooks of `shard` stay outside the compiled
    code. Raises `ValueError` if the model has no layers, or if torch does not know `backend`.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(
            f"train.compile is {backend!r}, but must be one of {', '.join(sorted(known))}"
        )
    for layer in _some_layers(model, "train.compile"):
        layer.forward = torch.compile(layer.forward, backend=backend)


def _some_layers(model: nn.Module, setting: str) -> list[nn.Module]:
    layers = list(layers_of(model))
    if not layers:
        raise ValueError(
            f"{setting} works on layers (the elements of an nn.ModuleList), but the model has"
            " none: leave this setting out"
        )
    return layers


def check_levels(levels: Sequence[LevelConfig], balance: bool = False) -> tuple[LevelConfig, ...]:
    """Returns `levels` with the default arguments of their schemes.

    Raises `ValueError` for a wrong name, argument or order, and for a scheme that does not support
    `balance`.
    """
    for level in levels:
        key = "scheme"
        if level.axis != REPLICATE:
            key = f"scheme.{level.axis}"
        function = find_function("scheme", level.scheme.name, known_schemes())
        check_types(key, function, level.scheme.arguments)
    chosen = [scheme_of(level) for level in levels]
    axes = [level.axis if level.replicas > 1 else None for level in levels]
    check_order([*zip(axes, chosen, strict=True)])
    if balance:
        setup_checks.check_balance(chosen, None)
    whole = [Choice(each.name, dict(each.arguments)) for each in chosen]
    pairs = zip(levels, whole, strict=True)
    return tuple(replace(level, scheme=choice) for level, choice in pairs)


def scheme_of(level: LevelConfig) -> Scheme:
    return scheme(level.scheme.name, level.scheme.arguments)


def check_types(key: str, function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Raises `ValueError` if an argument has a type that the annotation of `function` does not
    allow. Ignores annotations that are not plain types or unions of plain types.
    """
    if inspect.isclass(function):
        function = function.__init__
    try:
        hints = get_type_hints(function)
    except NameError:  # an annotation uses a name that only type checkers import
        return
    for name, value in arguments.items():
        if allowed := plain_types(value, hints.get(name)):
            require(False, f"{key}.{name}", value, allowed)


def load_data(chosen: Choice) -> Data:
    """Returns the data set. It is loaded once per process, and forked processes share it."""
    return _load_data(chosen.name, json.dumps(chosen.arguments, sort_keys=True))


NO_DATA = Data("", "", "text", (), ())
"""Stands for the data of a run in which no step reads examples, such as a replay."""
_MARKED = 64
"""Number of hashed examples, with which the data of machines and checkpoints are compared."""


@functools.cache
def _load_data(task: str, arguments: str) -> Data:
    return load_dataset(task, json.loads(arguments))


def mark_of_data(data: Data) -> list[object]:
    """Returns the number of training examples, a hash of some of them, and how many are hashed. For
    a stream, all three are those of the held-out examples, and the number of its files and a hash
    of their names and sizes follow if they are known.
    """
    examples = data.train
    if isinstance(examples, Streamed):
        examples = data.validation
    count = len(examples)
    positions = torch.arange(_MARKED) * count // (_MARKED - 1)
    chosen = examples[positions.clamp(max=count - 1)]
    mark = [count, digest(chosen[key] for key in sorted(chosen))[:16], _MARKED]
    if data.files:
        listed = json.dumps(list(data.files.items()))
        mark += [len(data.files), hashlib.sha256(listed.encode()).hexdigest()[:16]]
    return mark


def _agreeing(model: Choice, loaded: Data) -> dict[str, object]:
    """Returns the arguments of the model, together with the sizes that the data need. Only the
    vocabulary of the model may be larger than the data need.
    """
    parameters = inspect.signature(model_function(model.name)).parameters
    needed: dict[str, Any] = {"task": loaded.kind, **loaded.model}
    needed = {key: value for key, value in needed.items() if key in parameters}
    for key, value in needed.items():
        given = model.arguments.get(key, value)
        larger_vocab = key == "vocab" and isinstance(given, int) and given > value
        if given != value and not larger_vocab:
            raise ValueError(
                f"model.{key} is {given!r}, but the data {loaded.name} need {key} {value}: leave"
                " this setting out"
            )
    return {**needed, **model.arguments}
