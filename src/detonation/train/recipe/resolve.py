"""Combines a recipe file, the ranks that a launcher started, `--set` and flags into one
configuration.
"""

import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, TypeVar

from detonation.choices import did_you_mean, unknown
from detonation.cluster.init import LaunchPosition
from detonation.core.schemes import known_schemes
from detonation.models.pretrained import HUB_PREFIX
from detonation.train.recipe.schema import Config, Table, require
from detonation.train.recipe.tables import CHOSEN_BY, TABLES, from_table

_R = TypeVar("_R")


def shipped_recipes() -> dict[str, Traversable]:
    """Returns the recipe files of the package, by name.

    >>> "quick-lm" in shipped_recipes()
    True
    """
    folder = resources.files("detonation").joinpath("recipes")
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    files.sort(key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): file for file in files}


def headline(text: str) -> str:
    """Returns the comment at the top of a recipe, joined to one line.

    >>> headline("# A small model:\\n# two minutes.\\nseed = 0")
    'A small model: two minutes.'
    """
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines)


_TUNABLE = ("scheme", "optimizer", "schedule", "train")


@dataclass(frozen=True)
class Layers:
    """The tables of a recipe, and the tables of the command line that override them."""

    tables: Table
    overrides: Table

    def config(self) -> Config:
        """Returns the configuration. Raises `ValueError` for the same reasons as `resolve`."""
        return resolve(self.tables, self.overrides)

    def under(self, name: str, arguments: Mapping[str, Any]) -> Config:
        """Returns the configuration with another scheme. The settings for this scheme in the table
        [tuned] of the recipe apply.
        """
        return resolve(self.tables, {**self.overrides, "scheme": {"name": name, **arguments}})


def read_layers(
    recipe: Path,
    sets: Sequence[str],
    place: LaunchPosition | None = None,
    *,
    mesh: Mapping[str, Any],
) -> Layers:
    """Reads a recipe and the overrides of the command line.

    Args:
        recipe: TOML file.
        sets: Assignments of `--set`.
        place: Position of this rank in the job of a launcher. The launcher's numbers of ranks set
            the mesh, unless the command line sets the mesh.
        mesh: Flags that set keys of [mesh]; `None` leaves a key unchanged.

    Raises:
        ValueError: The file cannot be read, or an assignment or the mesh is invalid.
    """
    overrides = parse_sets(sets)
    tables = read_recipe(recipe)
    flags = {key: value for key, value in mesh.items() if value is not None}
    over = {**overrides.get("mesh", {}), **flags}
    if nodes := over.get("nodes", _sub(tables, "mesh").get("nodes")):
        given = [f"--{key}" for key in ("replicas", "shards") if over.get(key) is not None]
        require(not given, "mesh.nodes", nodes, f"left out with {', '.join(given)}")
        over["nodes"] = nodes
    levels = replicas_of_levels(tables, overrides)
    if levels is None or "replicas" in over:
        over = fill_mesh(over, place)
    else:  # the levels already set the number of replicas, so fill in only the shards
        over = fill_mesh({**over, "replicas": levels}, place)
        del over["replicas"]
    return Layers(tables, {**overrides, "mesh": over})


@dataclass(frozen=True)
class Request:
    """A user's command; its fields are named after the flags of `detonation train`.

    Args:
        overrides: Assignments of --set, and of flags that abbreviate a setting.
        replicas: Copies of the model; None for the number that recipe or launcher gives.
        shards: Parts of each copy; None for the number that recipe or launcher gives.
        web: Add the logger "web", a web page about the run, to the loggers of the recipe.

    Raises:
        ValueError: `stop_after` is out of range, or `resume` is given without `out`.
    """

    recipe: Path
    overrides: tuple[str, ...] = ()
    replicas: int | None = None
    shards: int | None = None
    out: Path | None = None
    resume: bool = False
    stop_after: int | None = None
    web: bool = False
    interface: str = ""
    replica: int | None = None
    join: str | None = None
    to_stderr: bool = False

    def check(self) -> None:
        """Raises `ValueError` if flags are out of range or conflict."""
        if self.stop_after is not None:
            require(self.stop_after >= 1, "--stop-after", self.stop_after, "at least 1")
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out: the run directory to continue")

    def layers(self, place: LaunchPosition | None) -> Layers:
        """Returns the recipe, together with the overrides of the launcher and of the command
        line.
        """
        mesh = {"replicas": self.replicas, "shards": self.shards}
        # With --replica or --join a launcher starts a single replica, so all its ranks are shards.
        if self.replica is not None or self.join:
            if place is not None and self.shards is None:
                mesh["shards"] = place.world_size
            place = None
        sets = self.overrides
        if self.join:
            sets = (*sets, "mesh.elastic=true")
        layers = read_layers(self.recipe, sets, place, mesh=mesh)
        if not self.web:
            return layers
        loggers = [*dict.fromkeys([*layers.config().train.loggers, "web"])]
        return replace(layers, overrides=merge(layers.overrides, {"train": {"loggers": loggers}}))


def to_plain(request: Any) -> Table:
    """Converts a request to values that JSON can hold, so that a new process can receive it."""
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    for name, value in values.items():
        if isinstance(value, Path):
            values[name] = str(value)
    return values


def from_plain(kind: type[_R], table: Mapping[str, Any]) -> _R:
    """Restores a request of this `kind` from the table that `to_plain` returned."""
    values = dict(table)
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
        elif name in ("recipe", "out") and value is not None:
            values[name] = Path(value)
    return kind(**values)


def fill_mesh(mesh: Mapping[str, Any], place: LaunchPosition | None) -> Table:
    """Returns `mesh` with the replicas and shards that a launcher started: one replica per node,
    unless `mesh` sets other numbers.

    Raises `ValueError` unless the launcher started replicas x shards processes.
    """
    if place is None:
        return dict(mesh)
    nodes = mesh.get("nodes")
    if nodes:
        started = f"{place.world_size} ranks, which were started"
        require(sum(nodes) == place.world_size, "mesh.nodes", nodes, started)
        return dict(mesh)
    replicas = _count_in(mesh, "replicas")
    shards = _count_in(mesh, "shards")
    if shards is None and replicas is None:
        shards = place.local_world_size
        replicas = place.nodes
    elif shards is None and replicas is not None:
        shards = place.world_size // replicas
    if shards is None:
        raise ValueError(
            "the launcher does not say how many ranks a machine has: give --shards, or"
            " set LOCAL_WORLD_SIZE"
        )
    if replicas is None:
        replicas = place.world_size // shards
    for name, count in (("replicas", replicas), ("shards", shards)):
        if count > place.world_size:
            raise ValueError(
                f"{count} {name} need one process each, but the launcher started"
                f" {place.world_size}: start more processes, or ask for fewer {name}"
            )
    if replicas * shards != place.world_size:
        product = f"{replicas} replicas x {shards} shards are {replicas * shards} processes"
        remedy = (
            "leave replicas and shards out, and start equally many processes on each node, or give"
            " the number of ranks of each node: --set mesh.nodes=[4,2]"
        )
        raise ValueError(f"{product}, but the launcher started {place.world_size}: {remedy}")
    return {**mesh, "replicas": replicas, "shards": shards}


def _count_in(mesh: Mapping[str, Any], name: str) -> int | None:
    """Returns the setting `name` of the table `mesh`; None if it is not set. Raises `ValueError`
    unless the setting is a whole number of at least 1.
    """
    value = mesh.get(name)
    if value is None:
        return None
    require(type(value) is int and value >= 1, f"mesh.{name}", value, "a number of at least 1")
    return int(value)


def resolve(recipe: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """Returns the configuration of `recipe` with `overrides`; both are nested tables.

    First determines the name of the scheme. The table `[tuned.<scheme>]` of this scheme overrides
    the rest of the recipe, and `overrides` override the whole recipe. If an overriding table
    selects another name, this function drops the arguments that belong to the old name. Raises
    `ValueError` for an invalid key or value, and for an invalid name in [tuned].
    """
    table = {key: value for key, value in recipe.items() if key != "tuned"}
    if isinstance(table.get("scheme"), list):
        require("tuned" not in recipe, "tuned", "given", "left out: it needs a single [scheme]")
        levels = merge_levels(table["scheme"], _sub(overrides, "scheme"))
        return from_table({**merge(table, overrides), "scheme": levels})
    tuned = _checked_tuned(recipe.get("tuned", {}))
    chooser = _sub(overrides, "scheme").get("name", _sub(table, "scheme").get("name"))
    if chooser is not None:
        table = merge(table, {"scheme": {"name": chooser}})
        table = merge(table, tuned.get(str(chooser), {}))
    return from_table(merge(table, overrides))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Returns the table `base` with the keys of `over`. A table in `over` that selects another name
    replaces the whole table in `base`.

    >>> merge({"optimizer": {"name": "SGD", "lr": 1}}, {"optimizer": {"lr": 2}})
    {'optimizer': {'name': 'SGD', 'lr': 2}}
    >>> merge({"optimizer": {"name": "SGD", "lr": 1}}, {"optimizer": {"name": "Adam"}})
    {'optimizer': {'name': 'Adam'}}
    """
    merged = dict(base)
    for key, value in over.items():
        merged[key] = value
        below = base.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            chooser = CHOSEN_BY.get(key, "")
            if chooser in value and value[chooser] != below.get(chooser):
                below = {}
            merged[key] = {**below, **value}
    return merged


def merge_levels(levels: Sequence[Any], over: Mapping[str, Any]) -> list[Any]:
    """Returns the tables `levels` with the changes in `over`, which has a table for each axis to
    change. A level whose scheme changes keeps only its axis and its replicas.

    >>> levels = [{"axis": "rack", "replicas": 2, "name": "full"}]
    >>> merge_levels(levels, {"rack": {"name": "demo", "topk": 1}})
    [{'axis': 'rack', 'replicas': 2, 'name': 'demo', 'topk': 1}]
    """
    axes = [str(level.get("axis")) if isinstance(level, dict) else "" for level in levels]
    for axis, value in over.items():
        if not isinstance(value, dict):
            raise ValueError(
                f"the recipe has levels: name the level, as in scheme.{axes[-1]}.{axis}={value}"
            )
        if axis not in axes:
            raise unknown("axis of a [[scheme]]", axis, axes)
    pairs = zip(axes, levels, strict=True)
    return [_merge_level(level, over.get(axis, {})) for axis, level in pairs]


def _merge_level(level: Any, over: Table) -> Any:
    if not over:
        return level
    own = {key: level[key] for key in ("axis", "replicas") if key in level}
    return {**own, **merge({"scheme": level}, {"scheme": over})["scheme"]}


def replicas_of_levels(recipe: Mapping[str, Any], overrides: Mapping[str, Any]) -> int | None:
    """Returns the product of the replicas of all levels of `recipe`; None if the recipe has a
    single table [scheme] instead of levels.
    """
    if not isinstance(recipe.get("scheme"), list):
        return None
    rest = {key: value for key, value in overrides.items() if key != "mesh"}
    return resolve(recipe, rest).mesh.replicas


def read_recipe(path: Path) -> Table:
    """Returns the tables of a recipe file, or of a recipe of the package.

    Raises `ValueError` if the file is missing or is not TOML.
    """
    shipped = {}
    if not path.is_file() and len(path.parts) == 1:
        shipped = shipped_recipes()
    source = shipped.get(path.name, path)
    try:
        # the encoding utf-8-sig skips a byte order mark, which Windows may write
        return tomllib.loads(source.read_text(encoding="utf-8-sig"))
    except OSError as error:
        names = ""
        if shipped:
            hint = did_you_mean(path.name, [*shipped])
            names = f"{hint or ';'} the package has {', '.join(shipped)}"
        raise ValueError(
            f"cannot read the recipe {str(path)!r}: {error.strerror}{names}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not TOML: {error}; correct the file there") from error


def parse_sets(assignments: Iterable[str]) -> Table:
    """Returns the nested tables of `a.b=value` assignments. Each value is TOML; a bare word is a
    string.

    >>> parse_sets(["scheme.topk=4", "scheme.name=demo", "seed=1"])
    {'scheme': {'topk': 4, 'name': 'demo'}, 'seed': 1}
    """
    tables: Table = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = path.strip().split(".")
        # scheme.<axis>.<key> sets a key of one level
        of_a_level = len(keys) == 3 and keys[0] == "scheme"
        if not equals or not all(keys) or (len(keys) > 2 and not of_a_level):
            raise ValueError(f"--set takes table.key=value or seed=value, got {assignment!r}")
        if len(keys) >= 2 and keys[0] not in TABLES:
            raise unknown("table of the recipe", keys[0], TABLES)
        if len(keys) == 1 and keys[0] != "seed":
            raise ValueError(f"--set takes table.key=value or seed=value, got {assignment!r}")
        inner = tables
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            require(isinstance(inner, dict), key, inner, f"set once, not again by {assignment!r}")
        inner[keys[-1]] = _value(text.strip())
    return tables


def require_scheme(kind: str, name: str) -> None:
    """Raises `ValueError` if `name` is neither a registered scheme nor
    "package.module:function".
    """
    if ":" not in name and name not in known_schemes():
        raise unknown(kind, name, known_schemes())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _sub(table: Mapping[str, Any], key: str) -> Table:
    value = table.get(key, {})
    require(isinstance(value, dict), key, value, "a table")
    return dict(value)


def _checked_tuned(tuned: object) -> dict[str, Table]:
    require(isinstance(tuned, dict), "tuned", tuned, "a table with one table for each scheme")
    assert isinstance(tuned, dict)
    for scheme, tables in tuned.items():
        require_scheme("scheme in [tuned]", scheme)
        require(isinstance(tables, dict), f"tuned.{scheme}", tables, "a table of tables")
        for key in tables:
            if key not in _TUNABLE:
                raise unknown(f"table of [tuned.{scheme}]", key, _TUNABLE)
    return tuned


Section = Literal["model", "data", "optimizer", "scheme"]


def require_trust(trusted: bool, config: Config, where: str, verb: str, *sections: Section) -> None:
    """Raises `ValueError` if the command `verb` would run code that `config` names, unless this
    code is `trusted`.

    Args:
        where: Source of `config`, for the message.
        sections: Sections of `config` whose code `verb` runs.
    """
    named = {
        "model": [config.model.name],
        "data": [config.data.name],
        "optimizer": [config.optimizer.name],
        "scheme": [level.scheme.name for level in config.levels],
    }
    # a model "hf:NAME" runs no code, but in other tables "hf:NAME" names a Python module `hf`
    if config.model.name.startswith(HUB_PREFIX):
        named["model"] = []
    code = [name for section in sections for name in named[section] if ":" in name]
    if code and not trusted:
        raise ValueError(
            f"{where} names the code {code[0]}, which {verb} would run: say --trust-code if you"
            " trust it"
        )


def names_of_parts() -> dict[str, list[str]]:
    from detonation.data import SOURCES
    from detonation.models import MODELS
    from detonation.train.recipe.optimizers import optimizer_classes

    return {
        "schemes": sorted(known_schemes()),
        "optimizers": sorted(optimizer_classes()),
        "models": sorted(MODELS),
        "data sets": sorted(SOURCES),
    }
