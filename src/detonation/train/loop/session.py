"""Session of one rank: model, optimizer and data, built from the configuration.

All ranks build these in the same order.
"""

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
    """One rank of a run: its shard of the model, the replicating optimizer, and the data set."""

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
    """`config` with its scheme's defaults, and with the model sizes that the data set.

    It needs no processes and writes nothing.

    Raises:
        ValueError: Whatever would fail later: names, arguments, ranges, missing data, sizes that do
            not fit.
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
    """Loads the data. Raises `ValueError` if validation or the model cannot use them."""
    loaded = load_data(config.data)
    if not isinstance(loaded, Data):
        raise ValueError(
            f"data {config.data.name} makes a {type(loaded).__name__}, must make a"
            " detonation.data.Data"
        )
    if not len(loaded.validation):
        raise ValueError(f"data {config.data.name} holds no example out: validation needs one")
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
    """Raises `ValueError` if there are fewer examples than one batch of all ranks."""
    if isinstance(loaded.train, Streamed):
        return
    needed = config.train.batch_size * sum(config.mesh.sizes)
    available = len(loaded.train)
    if needed > available:
        sizes = f"{config.train.batch_size} x {described_mesh(config.mesh)}"
        raise ValueError(
            f"train.batch_size {sizes} are {needed} examples, but there are {available}: take fewer"
        )


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
    """[train] with its epochs converted to steps; unchanged if it sets steps."""
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
    """Raises `LargerThanDense` if a level would send more than full synchronisation.

    The first step would raise the same error.
    """
    shards = shard_shapes(config)
    for level in config.levels:
        chosen = scheme_of(level)
        if chosen.signal == "nothing":
            continue
        for shapes in shards:
            require_below_dense(chosen, chosen.codec.layout(shapes), level.replicas)


def shard_shapes(config: Config) -> list[dict[str, tuple[int, ...]]]:
    """Shapes of the trained parameters on each rank of a node; allocates no memory for the
    model.
    """
    with torch.device("meta"):
        model = build_model(config.model.name, config.model.arguments)
    return [local_shapes(model, shard, config.mesh.shards) for shard in range(config.mesh.shards)]


def local_shapes(model: nn.Module, shard: int, shards: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the trained parameters on one shard, by name."""
    shapes = {}
    for name, parameter in model.named_parameters():
        remedy = "(1,) or larger: FSDP2 shards no scalar"
        require(parameter.dim() > 0, f"the shape of {name}", (), remedy)
        if parameter.requires_grad:
            shapes[name] = Box.of_shard(parameter, shard, shards).shape
    return shapes


def misfits(config: Config) -> list[str]:
    """Settings of `config` that conflict: one line each, with the remedy."""
    steps = config.train.steps
    warmup = config.schedule.warmup
    optimizer = config.optimizer
    found = []
    if warmup >= steps:
        found.append(
            f"schedule.warmup is {warmup}, all of the {steps} steps: the learning rate only rises"
        )
    signs_alone = optimizer.name == "SignSGD" and not optimizer.arguments.get("momentum")
    if config.train.clip and signs_alone:
        found.append(
            "train.clip changes nothing for SignSGD without momentum, which moves by signs: leave"
            " it out"
        )
    for level in config.levels:
        chosen = scheme_of(level)
        every = chosen.round.every
        if every > steps:
            found.append(
                f"{chosen.name} exchanges every {every} steps, but there are {steps}: replicas meet"
                " at the end alone; choose a smaller every"
            )
    return found


def start_session(config: Config, device: torch.device, axis: Axis | None = None) -> Session:
    """Session of this rank. Collective.

    Raises `ValueError` if replicas or sizes disagree.

    Args:
        axis: Replaces the outermost axis, such as `surviving_axis` in an elastic run.
    """
    replicas = config.mesh.replicas
    if config.mesh.elastic:  # each replica of the outermost level has its own process group
        replicas = config.nodes_inside
    nodes = config.mesh.nodes or config.mesh.shards
    slow = config.mesh.slow_backend or None
    mesh = init_mesh(replicas, nodes, device.type, slow_backend=slow)
    model = seeded_model(config).to(device)
    shard(model, mesh, wire=config.mesh.shard_wire)
    base = optimizers.build_optimizer(config.optimizer, model)
    if isinstance(axis, SurvivingCommunicator):
        require_same_settings(axis.host.membership, config)
    optimizer = replicated_run(config, base, model, axes(config, mesh, axis))
    world: World
    if isinstance(axis, SurvivingCommunicator):
        world = ElasticRanks(mesh, axis)
    else:
        world = Ranks(mesh, device, config.mesh.sizes[:replicas])
    return Session(config, world, device, load_data(config.data), model, base, optimizer)


def replicated_run(
    config: Config, base: torch.optim.Optimizer, model: nn.Module, joined: Sequence[Axis]
) -> Replicated:
    """`base`, replicated along the axis of each level. Only its first step is collective."""
    return replicate(
        base,
        model,
        levels=list(zip(joined, map(scheme_of, config.levels), strict=True)),
        safety=safety(config),
        clip=config.train.clip or None,
        balance=config.train.balance,
        seed=config.seed,
    )


def surviving_axis(config: Config, mesh: DeviceMesh) -> SurvivingCommunicator:
    """The axis between replicas that may be lost; `mesh` contains the ranks of this replica.
    Collective.
    """
    here = place()
    if here is None:
        raise ValueError("mesh.elastic needs the address of a store: give --meet and --replica")
    return elastic(
        mesh,
        replica=here.replica,
        replicas=here.replicas,
        store=here.store,
        min_replicas=config.mesh.min_replicas,
        silence_s=config.peers.silence_s,
        link=config.mesh.link,
    )


def seeded_model(config: Config) -> nn.Module:
    """The model of `config` with its initial weights; [train] configures how its layers run."""
    torch.manual_seed(config.seed)
    return _with_layers(build_model(config.model.name, config.model.arguments), config.train)


def _with_layers(model: nn.Module, train: TrainConfig) -> nn.Module:
    if train.compile:
        compile_layers(model, train.compile)
    if train.checkpoint_activations:
        checkpoint_activations(model)
    return model


def checkpoint_activations(model: nn.Module) -> None:
    """Stores only the inputs of each layer for backward, which recomputes everything else.

    Changes the model in place, and keeps all names. Call it after `compile_layers` and before
    `shard`, whose hooks gather a layer's weights for both computations. Raises `ValueError` if the
    model has no layers.
    """
    for layer in _some_layers(model, "train.checkpoint_activations"):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_layers(model: nn.Module, backend: str) -> None:
    """Compiles each layer separately; layers of equal shape compile once.

    Changes the model in place, and keeps all names. The hooks of `shard` stay outside the compiled
    code. Raises `ValueError` if the model has no layers, or torch has no such backend.
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
    """`levels` with the defaults of their schemes.

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
    check_order(chosen)
    if balance:
        check_balance(chosen, None)
    return tuple(
        replace(level, scheme=Choice(each.name, dict(each.arguments)))
        for level, each in zip(levels, chosen, strict=True)
    )


def scheme_of(level: LevelConfig) -> Scheme:
    return scheme(level.scheme.name, level.scheme.arguments)


def axes(config: Config, mesh: DeviceMesh, between: Axis | None = None) -> list[Axis]:
    """The axis of each level, innermost first; an emulated link slows down the outermost.
    Collective.

    Args:
        mesh: Mesh of all levels; without the outermost level if `between` is given.
        between: Outermost axis; by default a dimension of the mesh.
    """
    if len(config.levels) == 1:
        return [between or slowed(mesh["replicate"], config.mesh.link)]
    levels = config.levels
    if between is not None:
        levels = levels[:-1]
    sizes = {level.axis: level.replicas for level in reversed(levels)}
    sizes["shard"] = config.mesh.shards
    slow = config.mesh.slow_backend or None
    backend = slow_axis_backend(levels[-1].axis, mesh.device_type, slow)
    tiers = init_device_mesh(
        mesh.device_type,
        tuple(sizes.values()),
        mesh_dim_names=tuple(sizes),
        backend_override=backend,
    )
    inner: list[Axis] = [tiers[level.axis] for level in config.levels[:-1]]
    return [*inner, between or slowed(tiers[config.levels[-1].axis], config.mesh.link)]


def safety(config: Config) -> Safety:
    train = config.train
    return Safety(train.non_finite, train.verify_every, train.on_desync)  # type: ignore[arg-type]


def slowed(axis: DeviceMesh, link: str) -> Axis:
    """`axis`, limited to the speed of `link`; unlimited if `link` is "". Collective."""
    if link:
        return ThrottledCommunicator(axis, LinkSpeed.parse(link))
    return axis


def check_types(key: str, function: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Raises `ValueError` if an argument contradicts a plain annotation of `function`."""
    if inspect.isclass(function):
        function = function.__init__
    try:
        hints = get_type_hints(function)
    except NameError:  # only a type checker can resolve these annotations
        return
    for name, value in arguments.items():
        if allowed := plain_types(value, hints.get(name)):
            require(False, f"{key}.{name}", value, allowed)


def scheduler(session: Session, done: int) -> LambdaLR:
    """Schedule of the learning rate after `done` steps."""
    for group in session.optimizer.param_groups:
        group["initial_lr"] = session.config.optimizer.lr * group.get(optimizers.RATIO, 1.0)
    factor = optimizers.lr_factor(session.config.schedule, session.config.train.steps)
    return LambdaLR(session.optimizer, factor, last_epoch=done - 1)


def load_data(chosen: Choice) -> Data:
    """The data set, loaded once per process and shared with forked processes."""
    return _load_data(chosen.name, json.dumps(chosen.arguments, sort_keys=True))


@functools.cache
def _load_data(task: str, arguments: str) -> Data:
    return load_dataset(task, json.loads(arguments))


def _agreeing(model: Choice, loaded: Data) -> dict[str, object]:
    """Arguments of the model with the sizes of the data; the vocabulary may be larger than the
    data's.
    """
    parameters = inspect.signature(model_function(model.name)).parameters
    needed: dict[str, Any] = {"task": loaded.kind, **loaded.model}
    needed = {key: value for key, value in needed.items() if key in parameters}
    for key, value in needed.items():
        given = model.arguments.get(key, value)
        larger_vocab = key == "vocab" and isinstance(given, int) and given > value
        if given != value and not larger_vocab:
            raise ValueError(
                f"model.{key} is {given!r}, but the data {loaded.name} has {key} {value}: leave"
                " it out"
            )
    return {**needed, **model.arguments}
