"""What a run is: frozen dataclasses are the single truth, TOML is their spelling. Pure Python; imports no torch."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from detonation.choices import unknown
from detonation.core.link.link_speed import Pace

Table = dict[str, Any]
T = TypeVar("T")


LOGGERS = ("tensorboard", "trackio", "wandb")
"""What `train.loggers` may name; see `train/loggers.py`."""


def require(holds: bool, what: str, value: object, allowed: str) -> None:
    """Raises the `ValueError` that names a setting, its value and what is allowed, unless `holds`."""
    if not holds:
        raise ValueError(f"{what} is {value!r}, but must be {allowed}")


@dataclass(frozen=True)
class Choice:
    """Something chosen by name, with that thing's own arguments."""

    name: str
    arguments: Table = field(default_factory=dict)


@dataclass(frozen=True)
class Optimizer:
    """A class of torch.optim by name, `SignSGD` or `Muon`; `arguments` are that class's own."""

    name: str
    lr: float
    arguments: Table = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(0 < self.lr < math.inf, "optimizer.lr", self.lr, "a finite number above 0")


@dataclass(frozen=True)
class Schedule:
    """How lr changes: rises linearly over `warmup` steps, then falls to `floor` * lr at the last step."""

    name: str = "cosine"
    warmup: int = 0
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.name not in ("constant", "cosine", "linear"):
            raise unknown("schedule", self.name, ("constant", "cosine", "linear"))
        require(self.warmup >= 0, "schedule.warmup", self.warmup, "at least 0")
        require(0 <= self.floor <= 1, "schedule.floor", self.floor, "within [0, 1]")


@dataclass(frozen=True)
class Train:
    """How long and in what portions; `batch_size` is that of one process, `clip` 0 and `validate_every` 0 mean off.

    A checkpoint is written every `checkpoint_every` steps (0: only at the end); the newest `keep` stay. `non_finite` is
    what happens where a replica's gradient is not finite ("stop", or "skip" its part); every `verify_every` steps (0:
    never) what must be equal on all replicas is compared, and `on_drift` ("stop" or "repair") where it is not.
    loggers: which trackers get each step, besides `metrics.jsonl`.
    """

    steps: int
    batch_size: int
    accumulate: int = 1
    clip: float = 0.0
    autocast: str = ""
    log_every: int = 10
    validate_every: int = 0
    validation_batches: int = 16
    checkpoint_every: int = 0
    keep: int = 3
    non_finite: str = "stop"
    verify_every: int = 100
    on_drift: str = "stop"
    loggers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulate", "log_every", "validation_batches", "keep"):
            require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "at least 1")
        require(
            self.validate_every >= 0, "train.validate_every", self.validate_every, "at least 0 (0 = only at the end)"
        )
        at_end = "at least 0 (0 = only at the end)"
        require(self.checkpoint_every >= 0, "train.checkpoint_every", self.checkpoint_every, at_end)
        require(0 <= self.clip < math.inf, "train.clip", self.clip, "at least 0 (0 = off)")
        require(self.non_finite in ("stop", "skip"), "train.non_finite", self.non_finite, "'stop' or 'skip'")
        require(self.on_drift in ("stop", "repair"), "train.on_drift", self.on_drift, "'stop' or 'repair'")
        least, why = (1, " to repair") if self.on_drift == "repair" else (0, " (0 = never)")
        require(self.verify_every >= least, "train.verify_every", self.verify_every, f"at least {least}{why}")
        for name in self.loggers:
            if name not in LOGGERS:
                raise unknown("logger", name, LOGGERS)
        require(self.autocast in ("", "bf16"), "train.autocast", self.autocast, "'' or 'bf16'")


@dataclass(frozen=True)
class Mesh:
    """`replicas` copies of the model (nodes), each cut into `shards` (accelerators in a node).

    link: an emulated pace of what joins the nodes, such as "100mbit,5ms"; "" leaves the network as it is.
    lab: the nodes are network namespaces of this machine, and the kernel slows their links down to `link` instead.
    """

    replicas: int = 2
    shards: int = 2
    link: str = ""
    lab: bool = False

    def __post_init__(self) -> None:
        require(self.replicas >= 1, "mesh.replicas", self.replicas, "at least 1")
        require(self.shards >= 1, "mesh.shards", self.shards, "at least 1")
        if self.link:
            Pace.parse(self.link)
        require(bool(self.link) or not self.lab, "mesh.link", self.link, "a rate such as '100mbit' in a lab (--link)")

    @property
    def emulated(self) -> str:
        """The pace that ranks keep to by themselves."""
        return "" if self.lab else self.link


@dataclass(frozen=True)
class Peers:
    """When a rank counts as lost: after `silence_s` without a sign of life, and what the largest message takes on top.

    lowest_bits_per_s: the rate of the slowest link that is still good enough.
    """

    silence_s: float = 15.0
    lowest_bits_per_s: float = 10e6

    def __post_init__(self) -> None:
        require(1 <= self.silence_s < math.inf, "peers.silence_s", self.silence_s, "at least 1")
        require(self.lowest_bits_per_s > 0, "peers.lowest_bits_per_s", self.lowest_bits_per_s, "above 0")


@dataclass(frozen=True)
class Level:
    """One tier of the network: `replicas` along the mesh axis `axis`, and how they talk to each other."""

    axis: str
    replicas: int
    scheme: Choice


@dataclass(frozen=True)
class Config:
    """One run, fully resolved.

    levels: from the innermost tier of the network to the outermost; `mesh.replicas` is the product of their replicas.
    """

    model: Choice
    data: Choice
    levels: tuple[Level, ...]
    optimizer: Optimizer
    train: Train
    schedule: Schedule = Schedule()
    mesh: Mesh = Mesh()
    peers: Peers = Peers()
    seed: int = 0

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**31, "seed", self.seed, "within [0, 2**31)")
        assert math.prod(level.replicas for level in self.levels) == self.mesh.replicas

    @property
    def scheme(self) -> Choice:
        """What is told over the slowest links: the scheme of the outermost level."""
        return self.levels[-1].scheme

    @property
    def schemes(self) -> str:
        """The names of all levels' schemes, from the innermost outwards: `full+demo+diloco`."""
        return "+".join(level.scheme.name for level in self.levels)


CHOSEN_BY = {"model": "name", "data": "task", "scheme": "name", "optimizer": "name"}
"""The tables whose other keys belong to the thing chosen, and the key that chooses it."""

REPLICATE = "replicate"
"""The axis of the only level, where a recipe has one."""

_PLAIN: dict[str, type] = {"schedule": Schedule, "train": Train, "mesh": Mesh, "peers": Peers}
TABLES = (*CHOSEN_BY, *_PLAIN)


def from_table(table: Mapping[str, Any]) -> Config:
    """The configuration that a recipe's tables spell.

    Raises `ValueError` naming a key that is unknown, missing or mistyped, or a value out of range.
    """
    for key in table:
        if key not in (*TABLES, "seed"):
            raise unknown("recipe key", key, (*TABLES, "seed", "tuned"))
    for key in TABLES:
        require(isinstance(table.get(key, {}), dict) or key == "scheme", key, table.get(key), "a table")
    mesh = _plain("mesh", Mesh, table)
    levels = _levels(table.get("scheme", {}), mesh, "replicas" in table.get("mesh", {}))
    return Config(
        model=_choice("model", table),
        data=_choice("data", table),
        levels=levels,
        optimizer=_optimizer(table),
        train=_plain("train", Train, table),
        schedule=_plain("schedule", Schedule, table),
        mesh=dataclasses.replace(mesh, replicas=math.prod(level.replicas for level in levels)),
        peers=_plain("peers", Peers, table),
        seed=_typed(int, "seed", table.get("seed", 0)),
    )


def to_table(config: Config) -> Table:
    """The tables that spell `config`: `from_table(to_table(config)) == config`."""
    table: Table = {"seed": config.seed}
    for key, chooser in CHOSEN_BY.items():
        table[key] = _spelled(chooser, getattr(config, key))
    for key in _PLAIN:
        table[key] = dataclasses.asdict(getattr(config, key))
    if config.levels[0].axis != REPLICATE:
        table["scheme"] = [
            {"axis": level.axis, "replicas": level.replicas, **_spelled("name", level.scheme)}
            for level in config.levels
        ]
        del table["mesh"]["replicas"]
    return table


def _spelled(chooser: str, chosen: Choice | Optimizer) -> Table:
    table = dataclasses.asdict(chosen)
    arguments = {key: value for key, value in table.pop("arguments").items() if value is not None}
    return {chooser: table.pop("name"), **table, **arguments}


def _levels(spelled: Any, mesh: Mesh, given: bool) -> tuple[Level, ...]:
    """`[scheme]` is one level over all replicas of the mesh; `[[scheme]]` is a list of levels that say their own.

    given: whether [mesh] says how many replicas there are.
    """
    if isinstance(spelled, dict):
        return (Level(REPLICATE, mesh.replicas, _choice("scheme", {"scheme": spelled})),)
    tables = isinstance(spelled, list) and bool(spelled) and all(isinstance(level, dict) for level in spelled)
    require(tables, "scheme", spelled, "a table [scheme], or one [[scheme]] for each level")
    levels = tuple(_level(dict(level)) for level in spelled)
    if given:
        raise ValueError("mesh.replicas is given, but the levels say how many: set scheme.<axis>.replicas of each")
    axes = [level.axis for level in levels]
    require(len({*axes}) == len(axes), "scheme.axis", axes, "another for each level")
    return levels


def _level(table: Table) -> Level:
    for key in ("axis", "replicas", "name"):
        if key not in table:
            raise ValueError(f"{key} is missing in a [[scheme]] of the recipe: {table}")
    axis = _typed(str, "scheme.axis", table.pop("axis"))
    usable = axis.isidentifier() and axis not in (REPLICATE, "shard")
    require(usable, "scheme.axis", axis, f"a name such as 'rack', other than '{REPLICATE}' and 'shard'")
    where = f"scheme.{axis}"
    replicas = _typed(int, f"{where}.replicas", table.pop("replicas"))
    require(replicas >= 1, f"{where}.replicas", replicas, "at least 1")
    return Level(axis, replicas, Choice(_typed(str, f"{where}.name", table.pop("name")), table))


def _choice(key: str, table: Mapping[str, Any]) -> Choice:
    arguments = dict(table.get(key, {}))
    name = _needed(key, CHOSEN_BY[key], arguments)
    return Choice(_typed(str, f"{key}.{CHOSEN_BY[key]}", name), arguments)


def _optimizer(table: Mapping[str, Any]) -> Optimizer:
    arguments = dict(table.get("optimizer", {}))
    name = _typed(str, "optimizer.name", _needed("optimizer", "name", arguments))
    lr = _typed(float, "optimizer.lr", _needed("optimizer", "lr", arguments))
    return Optimizer(name, lr, arguments)


def _plain(key: str, kind: type[T], table: Mapping[str, Any]) -> T:
    types = {f.name: f.type for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = dict(table.get(key, {}))
    for name in values:
        if name not in types:
            raise unknown(f"key of [{key}]", name, types)
    for field_ in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field_.default is dataclasses.MISSING:
            _needed(key, field_.name, dict(values))
    return kind(**{name: _typed(types[name], f"{key}.{name}", value) for name, value in values.items()})


def _needed(key: str, name: str, values: Table) -> Any:
    if name not in values:
        raise ValueError(f"{key}.{name} is missing: give it in [{key}] of the recipe, or with --set {key}.{name}=...")
    return values.pop(name)


def _typed(kind: Any, what: str, value: Any) -> Any:
    if kind == tuple[str, ...]:
        texts = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        require(texts, what, value, "a list of texts")
        return tuple(value)
    names = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    require(isinstance(value, kind) and (kind is bool or not isinstance(value, bool)), what, value, names[kind])
    return value
