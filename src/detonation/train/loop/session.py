"""The session of one rank: model, optimizer and data, made from the configuration in the same order
on all ranks."""

import functools
import importlib.util
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from detonation.checkpoint.files.reader import Box
from detonation.choices import find_function, plain_types
from detonation.cluster.mesh import init_mesh, layers_of, shard, slow_axis_backend
from detonation.cluster.network.throttled import ThrottledCommunicator
from detonation.cluster.survive.elastic_axis import elastic, place
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.agreement.safety import Safety
from detonation.core.link.communicator import Axis
from detonation.core.optimizer.replicate import check_order, replicate
from detonation.core.optimizer.replicated import Replicated
from detonation.core.optimizer.setup_checks import check_balance
from detonation.core.schemes.registry import known_schemes, scheme
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import require_below_dense
from detonation.data import Data, Streamed, dataset_function, load_dataset
from detonation.data.translation import TranslationPairs
from detonation.link_speed import LinkSpeed
from detonation.models import TASK_OF, build_model, image_arguments, model_function
from detonation.train.loop.world import ElasticRanks, Ranks, Waits, World, require_same_settings
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


@dataclass(frozen=True)
class Session:
    """One rank of a run: its shard of the model, the replicating optimizer, and the data set that
    all ranks share."""

    config: Config
    world: World
    device: torch.device
    data: Data
    model: nn.Module
    base: torch.optim.Optimizer
    optimizer: Replicated
    waits: Waits = field(default_factory=Waits)

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def world_size(self) -> int:
        return self.world.size


def check_config(config: Config) -> Config:
    """`config` with the defaults of its scheme, and the sizes that the data fixes for the model.

    Needs no processes and writes nothing.

    Raises:
        ValueError: Anything that would fail later: names, arguments, ranges, missing data, sizes
            that do not fit.
    """
    check_types("model", model_function(config.model.name), config.model.arguments)
    check_types("data", dataset_function(config.data.name), config.data.arguments)
    form = (
        {}
        if config.data.name != "images"
        else image_arguments(config.model.name, config.model.arguments)
    )
    config = replace(config, data=Choice(config.data.name, {**form, **config.data.arguments}))
    levels = check_levels(config.levels, config.train.balance)
    optimizers.check_optimizer(config.optimizer)
    loaded = load_data(config.data)
    if not isinstance(loaded, Data):
        raise ValueError(
            f"data {config.data.name} makes a {type(loaded).__name__}, must make a"
            " detonation.data.Data"
        )
    if not len(loaded.validation):  # the run would train, and then have no loss
        raise ValueError(f"data {config.data.name} holds no example out: validation needs one")
    task = TASK_OF.get(config.model.name, loaded.kind)
    if task != loaded.kind:
        fitting = " or ".join(name for name, kind in TASK_OF.items() if kind == loaded.kind)
        raise ValueError(
            f"model {config.model.name} is for {task}, but the data {loaded.name} are"
            f" {loaded.kind}: take {fitting}, or other data"
        )
    model = Choice(config.model.name, _agreeing(config.model, loaded))
    with torch.device("meta"):
        made = build_model(model.name, model.arguments)
    try:
        inspect.signature(made.forward).bind(**loaded.validation[torch.tensor([0])])
    except TypeError as error:
        raise ValueError(
            f"model {model.name} cannot take the batches of the data {loaded.name}: {error}"
        ) from error
    _with_layers(made, config.train)
    needed = config.train.batch_size * sum(config.mesh.sizes)
    if not isinstance(loaded.train, Streamed) and needed > (there := len(loaded.train)):
        sizes = f"{config.train.batch_size} x {described_mesh(config.mesh)}"
        raise ValueError(
            f"train.batch_size {sizes} are {needed} examples, but there are {there}: take fewer"
        )
    if config.train.bleu_sentences:
        check_translates(made, loaded)
    return replace(config, model=model, levels=levels, train=_with_steps(config, loaded))


def check_translates(model: Any, data: Data) -> None:
    if not isinstance(data.validation, TranslationPairs):
        raise ValueError(
            f"train.bleu_sentences is for translations, but the data {data.name} are {data.kind}"
        )
    if getattr(getattr(model, "config", None), "decoder_start_token_id", None) is None:
        raise ValueError(
            "train.bleu_sentences needs a model with config.decoder_start_token_id, as"
            " transformers' have"
        )
    if not importlib.util.find_spec("sacrebleu"):
        raise ValueError(
            "train.bleu_sentences needs sacrebleu: pip install '.[metrics]' in a clone"
        )


def _with_steps(config: Config, loaded: Data) -> TrainConfig:
    """[train] with the steps that its epochs take, unless it says how many steps."""
    train = config.train
    if train.steps:
        return train
    if isinstance(loaded.train, Streamed):
        raise ValueError(
            "train.epochs of a stream are unknown, because its length is: set train.steps"
        )
    examples = train.batch_size * train.accumulate * sum(config.mesh.sizes)
    return replace(train, steps=max(1, math.ceil(train.epochs * len(loaded.train) / examples)))


def check_sizes(config: Config) -> None:
    """Raises `LargerThanDense`, as the first step would, where a level would send more than full
    synchronisation."""
    shards = shard_shapes(config)
    for level in config.levels:
        chosen = scheme(level.scheme.name, level.scheme.arguments)
        for shapes in shards if chosen.signal != "nothing" else []:
            require_below_dense(chosen, chosen.codec.layout(shapes), level.replicas)


def shard_shapes(config: Config) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the trained parameters on each rank of a node, without a model in memory."""
    with torch.device("meta"):
        model = build_model(config.model.name, config.model.arguments)
    return [local_shapes(model, shard, config.mesh.shards) for shard in range(config.mesh.shards)]


def local_shapes(model: nn.Module, shard: int, shards: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the trained parameters on one shard, by name."""
    for name, parameter in model.named_parameters():
        require(
            parameter.dim() > 0,
            f"the shape of {name}",
            (),
            "(1,) or larger: FSDP2 shards no scalar",
        )
    return {
        name: Box.of_shard(p, shard, shards).shape
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def misfits(config: Config) -> list[str]:
    """The settings of `config` that do not fit together, one line each, with what to change."""
    steps, warmup, optimizer = config.train.steps, config.schedule.warmup, config.optimizer
    found = []
    if warmup >= steps:
        found.append(
            f"schedule.warmup is {warmup}, all of the {steps} steps: the learning rate only rises"
        )
    if (
        config.train.clip
        and optimizer.name == "SignSGD"
        and not optimizer.arguments.get("momentum")
    ):
        found.append(
            "train.clip changes nothing for SignSGD without momentum, which moves by signs: leave"
            " it out"
        )
    for level in config.levels:
        chosen = scheme(level.scheme.name, level.scheme.arguments)
        every = chosen.round.every
        if every > steps:
            found.append(
                f"{chosen.name} exchanges every {every} steps, but there are {steps}: replicas meet"
                " at the end alone; choose a smaller every"
            )
    return found


def start_session(config: Config, device: torch.device, axis: Axis | None = None) -> Session:
    """The session of this rank. Collective; raises `ValueError` where replicas or sizes do not
    agree.

    `axis` takes the place of the outermost one, such as that of `surviving_axis` in an elastic run.
    """
    slow = config.mesh.slow_backend or None
    replicas = (
        config.nodes_inside if config.mesh.elastic else config.mesh.replicas
    )  # of the process group
    mesh = init_mesh(
        replicas, config.mesh.nodes or config.mesh.shards, device.type, slow_backend=slow
    )
    model = seeded_model(config).to(device)
    shard(model, mesh, wire=config.mesh.shard_wire)
    base = optimizers.build_optimizer(config.optimizer, model)
    surviving = axis if isinstance(axis, SurvivingCommunicator) else None
    if surviving is not None:
        require_same_settings(surviving.host.membership, config)
    optimizer = replicated_run(config, base, model, axes(config, mesh, axis))
    world: World = (
        Ranks(mesh, device, config.mesh.sizes[:replicas])
        if surviving is None
        else ElasticRanks(mesh, surviving)
    )
    return Session(config, world, device, load_data(config.data), model, base, optimizer)


def replicated_run(
    config: Config, base: torch.optim.Optimizer, model: nn.Module, joined: Sequence[Axis]
) -> Replicated:
    """`base` replicated along the axis of each level. Collective where it takes its first step."""
    levels, train = list(zip(joined, map(scheme_of, config.levels), strict=True)), config.train
    alike: dict[str, Any] = {
        "clip": train.clip or None,
        "balance": train.balance,
        "seed": config.seed,
    }
    return replicate(base, model, levels=levels, safety=safety(config), **alike)


def surviving_axis(config: Config, mesh: DeviceMesh) -> SurvivingCommunicator:
    """The axis between replicas that may be lost, of which `mesh` is one. Collective."""
    here = place()
    if here is None:
        raise ValueError("mesh.elastic needs the address of a store: give --meet and --replica")
    least, silence_s = config.mesh.min_replicas, config.peers.silence_s
    alike: dict[str, Any] = {
        "min_replicas": least,
        "silence_s": silence_s,
        "link": config.mesh.link,
    }
    return elastic(mesh, replica=here.replica, replicas=here.replicas, store=here.store, **alike)


def seeded_model(config: Config) -> nn.Module:
    """The model of `config` with its first weights, whose layers run as [train] says."""
    torch.manual_seed(config.seed)
    return _with_layers(build_model(config.model.name, config.model.arguments), config.train)


def _with_layers(model: nn.Module, train: TrainConfig) -> nn.Module:
    if train.compile:
        compile_layers(model, train.compile)
    if train.checkpoint_activations:
        checkpoint_activations(model)
    return model


def checkpoint_activations(model: nn.Module) -> None:
    """Keeps the inputs of each layer alone for backward, which computes the rest again. In place;
    names stay.

    After `compile_layers` and before `shard`, whose hooks gather a layer's weights around both
    computations. Raises `ValueError` where the model has no layers.
    """
    for layer in _some_layers(model, "train.checkpoint_activations"):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_layers(model: nn.Module, backend: str) -> None:
    """Compiles each layer by itself: layers of one shape are compiled once. In place; names stay.

    The hooks of `shard` stay outside of the compiled code. Raises `ValueError` where the model has
    no layers, or torch no such backend.
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
            f"{setting} works on layers, the elements of an nn.ModuleList, and the model has none"
        )
    return layers


def check_levels(levels: Sequence[LevelConfig], balance: bool = False) -> tuple[LevelConfig, ...]:
    """`levels` with the defaults of their schemes. Raises `ValueError` for a bad name, argument or
    order.

    With `balance` replicas are to take different numbers of steps.
    """
    for level in levels:
        where = "scheme" if level.axis == REPLICATE else f"scheme.{level.axis}"
        function = find_function("scheme", level.scheme.name, known_schemes())
        check_types(where, function, level.scheme.arguments)
    made = [scheme_of(level) for level in levels]
    check_order(made)
    if balance:
        check_balance(made, None)
    pairs = zip(levels, made, strict=True)
    return tuple(
        replace(level, scheme=Choice(chosen.name, dict(chosen.arguments)))
        for level, chosen in pairs
    )


def scheme_of(level: LevelConfig) -> Scheme:
    return scheme(level.scheme.name, level.scheme.arguments)


def axes(config: Config, mesh: DeviceMesh, between: Axis | None = None) -> list[Axis]:
    """The axis of each level, from the innermost outwards; an emulated link slows the outermost
    down. Collective.

    With `between`, that is the outermost, and `mesh` is what is inside it.
    """
    if len(config.levels) == 1:
        return [between or slowed(mesh["replicate"], config.mesh.link)]
    tiers_of = config.levels if between is None else config.levels[:-1]
    sizes = {level.axis: level.replicas for level in reversed(tiers_of)} | {
        "shard": config.mesh.shards
    }
    backend = slow_axis_backend(
        tiers_of[-1].axis, mesh.device_type, config.mesh.slow_backend or None
    )
    tiers = init_device_mesh(
        mesh.device_type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=backend,
    )
    inner: list[Axis] = [tiers[level.axis] for level in config.levels[:-1]]
    return [*inner, between or slowed(tiers[config.levels[-1].axis], config.mesh.link)]


def safety(config: Config) -> Safety:
    return Safety(config.train.non_finite, config.train.verify_every, config.train.on_desync)  # type: ignore[arg-type]


def slowed(axis: DeviceMesh, link: str) -> Axis:
    """`axis`, no faster than `link` unless that is "". Collective."""
    return ThrottledCommunicator(axis, LinkSpeed.parse(link)) if link else axis


def check_types(key: str, function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Raises `ValueError` for an argument of another type than `function` is annotated with, where
    that is plain."""
    try:
        hints = get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except NameError:  # annotations of another package that only a type checker can resolve
        return
    for name, value in arguments.items():
        if allowed := plain_types(value, hints.get(name)):
            require(False, f"{key}.{name}", value, allowed)


def scheduler(session: Session, done: int) -> LambdaLR:
    """The schedule of the learning rate, `done` steps into the run."""
    for group in session.optimizer.param_groups:
        group["initial_lr"] = session.config.optimizer.lr * group.get(optimizers.RATIO, 1.0)
    factor = optimizers.lr_factor(session.config.schedule, session.config.train.steps)
    return LambdaLR(session.optimizer, factor, last_epoch=done - 1)


def load_data(chosen: Choice) -> Data:
    """The data set; loaded once in a process, and shared with the processes forked from it."""
    return _load_data(chosen.name, json.dumps(chosen.arguments, sort_keys=True))


@functools.cache
def _load_data(task: str, arguments: str) -> Data:
    return load_dataset(task, json.loads(arguments))


def _agreeing(model: Choice, loaded: Data) -> dict[str, object]:
    known = inspect.signature(model_function(model.name)).parameters
    needed: dict[str, Any] = {"task": loaded.kind, **loaded.model}
    needed = {key: value for key, value in needed.items() if key in known}
    for key, value in needed.items():
        given = model.arguments.get(key, value)
        if given != value and not (key == "vocab" and isinstance(given, int) and given > value):
            raise ValueError(
                f"model.{key} is {given!r}, but the data {loaded.name} has {key} {value}: leave"
                " it out"
            )
    return {**needed, **model.arguments}
