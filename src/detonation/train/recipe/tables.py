"""Configurations and the tables that spell them, as TOML and checkpoints hold them."""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from detonation.choices import plain_types, unknown
from detonation.train.recipe.optimizers import require_optimizer
from detonation.train.recipe.schema import (
    Choice,
    Config,
    LevelConfig,
    MeshConfig,
    OptimizerConfig,
    PeersConfig,
    ScheduleConfig,
    Table,
    TrainConfig,
    require,
)

_T = TypeVar("_T")

CHOSEN_BY = {"model": "name", "data": "task", "scheme": "name", "optimizer": "name"}
"""The tables whose other keys belong to the thing chosen, and the key that chooses it."""

REPLICATE = "replicate"
"""The axis of the only level, where a recipe has one."""

_PLAIN: dict[str, type] = {
    "schedule": ScheduleConfig,
    "train": TrainConfig,
    "mesh": MeshConfig,
    "peers": PeersConfig,
}
TABLES = (*CHOSEN_BY, *_PLAIN)


def from_table(table: Mapping[str, Any]) -> Config:
    """The configuration that a recipe's tables spell.

    Raises:
        ValueError: A key is unknown, missing or mistyped, or a value is out of range; the message
            names it.
    """
    for key in table:
        if key not in (*TABLES, "seed"):
            raise unknown("recipe key", key, (*TABLES, "seed", "tuned"))
    for key in TABLES:
        require(
            isinstance(table.get(key, {}), dict) or key == "scheme", key, table.get(key), "a table"
        )
    for setting, value in settings_of(dict(table)):
        _require_kept(setting, value)
    mesh = _plain("mesh", MeshConfig, table)
    levels = _levels(table.get("scheme", {}), mesh, "replicas" in table.get("mesh", {}))
    return Config(
        model=_choice("model", table),
        data=_choice("data", table),
        levels=levels,
        optimizer=_optimizer(table),
        train=_plain("train", TrainConfig, table),
        schedule=_plain("schedule", ScheduleConfig, table),
        mesh=dataclasses.replace(mesh, replicas=math.prod(level.replicas for level in levels)),
        peers=_plain("peers", PeersConfig, table),
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


def settings_of(table: Table, before: str = "") -> Iterator[tuple[str, object]]:
    """Every setting of a table, as `section.key` and its value.

    >>> list(settings_of({"seed": 0, "train": {"steps": 3}}))
    [('seed', 0), ('train.steps', 3)]
    """
    for key, value in table.items():
        if isinstance(value, dict):
            yield from settings_of(value, f"{before}{key}.")
        else:
            yield before + key, value


def _require_kept(setting: str, value: object) -> None:
    """Raises `ValueError` for what checkpoints and files of a run cannot hold: dates, and bytes
    that are no text."""

    def refuse(date: object) -> NoReturn:
        raise ValueError(f"{setting} has {date}, which TOML takes for a date or a time: quote it")

    try:
        json.dumps(value, ensure_ascii=False, default=refuse).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{setting} is {value!r}, which is no text in UTF-8: rename it") from error


def _spelled(chooser: str, chosen: Choice | OptimizerConfig) -> Table:
    table = dataclasses.asdict(chosen)
    arguments = {key: value for key, value in table.pop("arguments").items() if value is not None}
    return {chooser: table.pop("name"), **table, **arguments}


def _levels(spelled: Any, mesh: MeshConfig, given: bool) -> tuple[LevelConfig, ...]:
    """`[scheme]` is one level over all replicas of the mesh; each `[[scheme]]` is a level with its
    own `replicas`.

    given: [mesh] has a number of replicas, too.
    """
    if isinstance(spelled, dict):
        return (LevelConfig(REPLICATE, mesh.replicas, _choice("scheme", {"scheme": spelled})),)
    tables = (
        isinstance(spelled, list)
        and bool(spelled)
        and all(isinstance(level, dict) for level in spelled)
    )
    require(tables, "scheme", spelled, "a table [scheme], or one [[scheme]] for each level")
    levels = tuple(_level(dict(level)) for level in spelled)
    if given:
        raise ValueError(
            "mesh.replicas is given, but the levels say how many: set scheme.<axis>.replicas of"
            " each"
        )
    axes = [level.axis for level in levels]
    require(len({*axes}) == len(axes), "scheme.axis", axes, "another for each level")
    return levels


def _level(table: Table) -> LevelConfig:
    for key in ("axis", "replicas", "name"):
        if key not in table:
            raise ValueError(f"{key} is missing in a [[scheme]] of the recipe: {table}")
    axis = _typed(str, "scheme.axis", table.pop("axis"))
    usable = axis.isidentifier() and axis not in (REPLICATE, "shard")
    require(
        usable, "scheme.axis", axis, f"a name such as 'rack', other than '{REPLICATE}' and 'shard'"
    )
    where = f"scheme.{axis}"
    replicas = _typed(int, f"{where}.replicas", table.pop("replicas"))
    require(replicas >= 1, f"{where}.replicas", replicas, "at least 1")
    return LevelConfig(
        axis, replicas, Choice(_typed(str, f"{where}.name", table.pop("name")), table)
    )


def _choice(key: str, table: Mapping[str, Any]) -> Choice:
    arguments = dict(table.get(key, {}))
    name = _needed(key, CHOSEN_BY[key], arguments)
    return Choice(_typed(str, f"{key}.{CHOSEN_BY[key]}", name), arguments)


def _optimizer(table: Mapping[str, Any]) -> OptimizerConfig:
    arguments = dict(table.get("optimizer", {}))
    name = _typed(str, "optimizer.name", _needed("optimizer", "name", arguments))
    require_optimizer(name)  # before what it lacks
    lr = _typed(float, "optimizer.lr", _needed("optimizer", "lr", arguments))
    return OptimizerConfig(name, lr, arguments)


def _plain(key: str, kind: type[_T], table: Mapping[str, Any]) -> _T:
    types = {f.name: f.type for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = dict(table.get(key, {}))
    for name in values:
        if name not in types:
            raise unknown(f"key of [{key}]", name, types)
    for field_ in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field_.default is dataclasses.MISSING:
            _needed(key, field_.name, dict(values))
    return kind(
        **{name: _typed(types[name], f"{key}.{name}", value) for name, value in values.items()}
    )


def _needed(key: str, name: str, values: Table) -> Any:
    if name not in values:
        raise ValueError(
            f"{key}.{name} is missing: give it in [{key}] of the recipe, or with --set"
            f" {key}.{name}=..."
        )
    return values.pop(name)


def _typed(kind: Any, setting: str, value: Any) -> Any:
    if kind == tuple[str, ...]:
        texts = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        require(texts, setting, value, "a list of texts")
        return tuple(value)
    if kind in (tuple[float, ...], tuple[int, ...]):
        taken: Any = (int, float) if kind == tuple[float, ...] else (int,)
        numbers = isinstance(value, list | tuple) and all(type(item) in taken for item in value)
        require(
            numbers,
            setting,
            value,
            "a list of numbers" if float in taken else "a list of whole numbers",
        )
        return tuple(map(taken[-1], value))
    if allowed := plain_types(value, kind):
        require(False, setting, value, allowed)
    return float(value) if kind is float else value
