"""Converts configurations to tables and back, for TOML files and checkpoints."""

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
"""For each of these tables, the key that selects a model, data set, scheme or optimizer. All other
keys of the table are its arguments.
"""

REPLICATE = "replicate"
"""Name of the axis in a recipe with only one level."""

_PLAIN: dict[str, type] = {
    "schedule": ScheduleConfig,
    "train": TrainConfig,
    "mesh": MeshConfig,
    "peers": PeersConfig,
}
TABLES = (*CHOSEN_BY, *_PLAIN)


def from_table(table: Mapping[str, Any]) -> Config:
    """Returns the configuration that the tables of a recipe describe.

    Raises:
        ValueError: A key is unknown or missing, or a value has a wrong type or is out of range.
    """
    for key in table:
        if key not in (*TABLES, "seed"):
            raise unknown("recipe key", key, (*TABLES, "seed", "tuned"))
    for key in TABLES:
        is_table = isinstance(table.get(key, {}), dict)
        require(is_table or key == "scheme", key, table.get(key), "a table")
    for setting, value in settings_of(dict(table)):
        _require_kept(setting, value)
    mesh = _plain("mesh", MeshConfig, table)
    levels = _levels(table.get("scheme", {}), mesh, "replicas" in table.get("mesh", {}))
    replicas = math.prod(level.replicas for level in levels)
    model = _choice("model", table)
    data = _choice("data", table)
    optimizer = _optimizer(table)
    train = _plain("train", TrainConfig, table)
    schedule = _plain("schedule", ScheduleConfig, table)
    mesh = dataclasses.replace(mesh, replicas=replicas)
    peers = _plain("peers", PeersConfig, table)
    seed = _typed(int, "seed", table.get("seed", 0))
    return Config(model, data, levels, optimizer, train, schedule, mesh, peers, seed)


def to_table(config: Config) -> Table:
    """Returns the tables of `config`: `from_table(to_table(config)) == config`."""
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
    """Yields each setting of a table as `section.key` and its value.

    >>> list(settings_of({"seed": 0, "train": {"steps": 3}}))
    [('seed', 0), ('train.steps', 3)]
    """
    for key, value in table.items():
        if isinstance(value, dict):
            yield from settings_of(value, f"{before}{key}.")
        else:
            yield before + key, value


def _require_kept(setting: str, value: object) -> None:
    """Raises `ValueError` if a value is a date or invalid UTF-8, because the files of a run cannot
    represent such a value.
    """

    def refuse(date: object) -> NoReturn:
        raise ValueError(
            f"{setting} has {date}, which TOML reads as a date or a time: quote the value"
        )

    try:
        json.dumps(value, ensure_ascii=False, default=refuse).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{setting} is {value!r}, which is not valid UTF-8: rename it") from error


def _spelled(chooser: str, chosen: Choice | OptimizerConfig) -> Table:
    table = dataclasses.asdict(chosen)
    arguments = {key: value for key, value in table.pop("arguments").items() if value is not None}
    return {chooser: table.pop("name"), **table, **arguments}


def _levels(spelled: Any, mesh: MeshConfig, given: bool) -> tuple[LevelConfig, ...]:
    """Returns the levels of a recipe. A table `[scheme]` is one level over all replicas of the
    mesh. Each table `[[scheme]]` is one level with its own `replicas`.

    Args:
        spelled: Value of the key `scheme`.
        given: True if [mesh] sets a number of replicas.
    """
    if isinstance(spelled, dict):
        return (LevelConfig(REPLICATE, mesh.replicas, _choice("scheme", {"scheme": spelled})),)
    tables = isinstance(spelled, list) and all(isinstance(level, dict) for level in spelled)
    allowed = "a table [scheme], or one [[scheme]] for each level"
    require(tables and bool(spelled), "scheme", spelled, allowed)
    levels = tuple(_level(dict(level)) for level in spelled)
    if given:
        raise ValueError(
            "mesh.replicas is given, but each [[scheme]] has its own replicas: set"
            " scheme.<axis>.replicas instead"
        )
    axes = [level.axis for level in levels]
    require(len({*axes}) == len(axes), "scheme.axis", axes, "a different name for each level")
    return levels


def _level(table: Table) -> LevelConfig:
    for key in ("axis", "replicas", "name"):
        if key not in table:
            raise ValueError(f"{key} is missing in a [[scheme]] of the recipe: add it to {table}")
    axis = _typed(str, "scheme.axis", table.pop("axis"))
    usable = axis.isidentifier() and axis not in (REPLICATE, "shard")
    allowed = f"a name such as 'rack', other than '{REPLICATE}' and 'shard'"
    require(usable, "scheme.axis", axis, allowed)
    replicas = _typed(int, f"scheme.{axis}.replicas", table.pop("replicas"))
    require(replicas >= 1, f"scheme.{axis}.replicas", replicas, "at least 1")
    name = _typed(str, f"scheme.{axis}.name", table.pop("name"))
    return LevelConfig(axis, replicas, Choice(name, table))


def _choice(key: str, table: Mapping[str, Any]) -> Choice:
    arguments = dict(table.get(key, {}))
    name = _needed(key, CHOSEN_BY[key], arguments)
    return Choice(_typed(str, f"{key}.{CHOSEN_BY[key]}", name), arguments)


def _optimizer(table: Mapping[str, Any]) -> OptimizerConfig:
    arguments = dict(table.get("optimizer", {}))
    name = _typed(str, "optimizer.name", _needed("optimizer", "name", arguments))
    require_optimizer(name)  # report a wrong optimizer name before a missing learning rate
    why = "; a new optimizer.name drops all settings of the previous optimizer"
    lr = _typed(float, "optimizer.lr", _needed("optimizer", "lr", arguments, why))
    ratio = _typed(float, "optimizer.embedding_lr_ratio", arguments.pop("embedding_lr_ratio", 1.0))
    return OptimizerConfig(name, lr, arguments, ratio)


def _plain(key: str, kind: type[_T], table: Mapping[str, Any]) -> _T:
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = dict(table.get(key, {}))
    for name in values:
        if name not in fields:
            raise unknown(f"key of [{key}]", name, fields)
    for name, field in fields.items():
        if field.default is dataclasses.MISSING:
            _needed(key, name, dict(values))
    for name, value in values.items():
        values[name] = _typed(fields[name].type, f"{key}.{name}", value)
    return kind(**values)


def _needed(key: str, name: str, values: Table, why: str = "") -> Any:
    if name not in values:
        raise ValueError(
            f"{key}.{name} is missing: give it in [{key}] of the recipe, or with --set"
            f" {key}.{name}=...{why}"
        )
    return values.pop(name)


_LISTS: dict[Any, tuple[tuple[type, ...], str]] = {
    tuple[str, ...]: ((str,), "a list of texts"),
    tuple[int, ...]: ((int,), "a list of whole numbers"),
    tuple[float, ...]: ((int, float), "a list of numbers"),
}
"""For each type of a list: the allowed types of its items, and the words that name these types in
an error.
"""


def _typed(kind: Any, setting: str, value: Any) -> Any:
    if kind in _LISTS:
        types, words = _LISTS[kind]
        valid = isinstance(value, list | tuple) and all(type(item) in types for item in value)
        require(valid, setting, value, words)
        return tuple(map(types[-1], value))
    if allowed := plain_types(value, kind):
        require(False, setting, value, allowed)
    if kind is float:
        return float(value)
    return value
