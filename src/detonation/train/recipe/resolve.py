"""From a recipe file, the launcher's world, `--set` and flags to one configuration; trust in code
that it names."""

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
from detonation.core.schemes.registry import known_schemes
from detonation.models.pretrained import HUB_PREFIX
from detonation.train.recipe.schema import Config, Table, require
from detonation.train.recipe.tables import CHOSEN_BY, TABLES, from_table

_R = TypeVar("_R")


def shipped_recipes() -> dict[str, Traversable]:
    """The recipe files of the package, by name.

    >>> "quick-lm" in shipped_recipes()
    True
    """
    folder = resources.files("detonation").joinpath("recipes")
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    return {
        file.name.removesuffix(".toml"): file for file in sorted(files, key=lambda file: file.name)
    }


def headline(text: str) -> str:
    """The comment at the top of a recipe, in one line.

    >>> headline("# A small model:\\n# two minutes.\\nseed = 0")
    'A small model: two minutes.'
    """
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.removeprefix("#").strip() for line in lines)


_TUNABLE = ("scheme", "optimizer", "schedule", "train")


@dataclass(frozen=True)
class Layers:
    """A recipe's tables, and the tables that lie over them."""

    tables: Table
    overrides: Table

    def config(self) -> Config:
        """The configuration. Raises `ValueError` as `resolve` does."""
        return resolve(self.tables, self.overrides)

    def under(self, name: str, arguments: Mapping[str, Any]) -> Config:
        """The configuration under another scheme, with the settings that the recipe has tuned for
        it."""
        return resolve(self.tables, {**self.overrides, "scheme": {"name": name, **arguments}})


def read_layers(
    recipe: Path,
    sets: Sequence[str],
    place: LaunchPosition | None = None,
    *,
    mesh: Mapping[str, Any],
) -> Layers:
    """Reads a recipe and lays the command line over it.

    Args:
        recipe: The TOML file.
        sets: Assignments as `--set` takes them.
        place: This process's place in a launcher's world, which decides on the mesh where the
            command line does not.
        mesh: Flags that set keys of [mesh]; `None` leaves a key as it is.

    Raises:
        ValueError: The file cannot be read, or an assignment or the mesh makes no sense.
    """
    overrides = parse_sets(sets)
    tables = read_recipe(recipe)
    over = {
        **overrides.get("mesh", {}),
        **{key: value for key, value in mesh.items() if value is not None},
    }
    if nodes := over.get("nodes", _sub(tables, "mesh").get("nodes")):
        flags = [f"--{key}" for key in ("replicas", "shards") if over.get(key) is not None]
        require(not flags, "mesh.nodes", nodes, f"left out with {', '.join(flags)}")
        over["nodes"] = nodes
    levels = replicas_of_levels(tables, overrides)
    if levels is None or "replicas" in over:
        over = fill_mesh(over, place)
    else:  # the levels of the recipe say how many replicas there are
        over = fill_mesh({**over, "replicas": levels}, place)
        del over["replicas"]
    return Layers(tables, {**overrides, "mesh": over})


@dataclass(frozen=True)
class Request:
    """A run that a user asks for; the fields are named like the flags of `detonation train`.

    `overrides` are those of --set, and of flags that stand for a setting. `replicas` and `shards`
    are those of the recipe, or of the launcher, when None. `web` adds the page to the loggers of
    the recipe.

    Raises:
        ValueError: `stop_after` is out of range, or `resume` comes without `out`.
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

    def __post_init__(self) -> None:
        require(
            self.stop_after is None or self.stop_after >= 1,
            "--stop-after",
            self.stop_after,
            "at least 1",
        )
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out: the run directory to continue")

    def layers(self, place: LaunchPosition | None) -> Layers:
        """The recipe with the launcher's world and the command line over it."""
        mesh, alone = (
            {"replicas": self.replicas, "shards": self.shards},
            self.replica is not None or bool(self.join),
        )
        if (
            alone and place is not None and self.shards is None
        ):  # the launcher's world is one replica of several
            mesh["shards"] = place.world_size
        sets = (*self.overrides, *(("mesh.elastic=true",) if self.join else ()))
        layers = read_layers(self.recipe, sets, None if alone else place, mesh=mesh)
        if not self.web:
            return layers
        loggers = [*dict.fromkeys([*layers.config().train.loggers, "web"])]
        return replace(layers, overrides=merge(layers.overrides, {"train": {"loggers": loggers}}))


def to_plain(request: Any) -> Table:
    """A request in values that JSON can hold, for a process that starts afresh."""
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in values.items()
    }


def from_plain(kind: type[_R], table: Mapping[str, Any]) -> _R:
    """The request of this `kind` that `to_plain` made a table of."""
    paths = {name: Path(table[name]) for name in ("recipe", "out") if table.get(name) is not None}
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in table.items()} | paths)


def fill_mesh(mesh: Mapping[str, Any], place: LaunchPosition | None) -> Table:
    """`mesh` with the replicas and shards of a launcher's world: a replica per node, unless `mesh`
    has other numbers.

    Raises `ValueError` where they do not come to the number of processes that the launcher started.
    """
    if place is None:
        return dict(mesh)
    replicas, shards, nodes = mesh.get("replicas"), mesh.get("shards"), mesh.get("nodes")
    if nodes:
        require(
            sum(nodes) == place.world_size,
            "mesh.nodes",
            nodes,
            f"{place.world_size} ranks, which were started",
        )
        return dict(mesh)
    for name, value in (("replicas", replicas), ("shards", shards)):
        require(
            value is None or (type(value) is int and value >= 1),
            f"mesh.{name}",
            value,
            "a number of at least 1",
        )
    if shards is None:
        shards = place.local_world_size if replicas is None else place.world_size // replicas
        replicas = place.nodes if replicas is None else replicas
    if shards is None:
        raise ValueError(
            "the launcher does not say how many ranks a machine has: give --shards, or"
            " LOCAL_WORLD_SIZE"
        )
    if replicas is None:
        replicas = place.world_size // shards
    if replicas * shards != place.world_size:
        product = f"{replicas} replicas x {shards} shards are {replicas * shards} processes"
        remedy = (
            "leave both out, and start as many on each node, or name the ranks of each: --set"
            " mesh.nodes=[4,2]"
        )
        raise ValueError(f"{product}, but the launcher started {place.world_size}: {remedy}")
    return {**mesh, "replicas": replicas, "shards": shards}


def resolve(recipe: Mapping[str, Any], overrides: Mapping[str, Any]) -> Config:
    """The configuration of `recipe` with `overrides`, both nested tables.

    The scheme is chosen first; the recipe's `[tuned.<scheme>]` is then laid over the recipe, and
    `overrides` over both. A table that chooses another name keeps nothing of the arguments below
    it. Raises `ValueError` for a key, a name in [tuned], or a value that is not valid.
    """
    table = {key: value for key, value in recipe.items() if key != "tuned"}
    if isinstance(table.get("scheme"), list):
        require(
            "tuned" not in recipe, "tuned", "given", "left out: it is for recipes of one [scheme]"
        )
        levels = merge_levels(table["scheme"], _sub(overrides, "scheme"))
        return from_table({**merge(table, overrides), "scheme": levels})
    tuned = _checked_tuned(recipe.get("tuned", {}))
    chooser = _sub(overrides, "scheme").get("name", _sub(table, "scheme").get("name"))
    if chooser is not None:
        table = merge(table, {"scheme": {"name": chooser}})
        table = merge(table, tuned.get(str(chooser), {}))
    return from_table(merge(table, overrides))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """`base` with `over` laid on top, table by table; a table with another choice replaces the
    whole table.

    >>> merge({"optimizer": {"name": "SGD", "lr": 1}}, {"optimizer": {"lr": 2}})
    {'optimizer': {'name': 'SGD', 'lr': 2}}
    >>> merge({"optimizer": {"name": "SGD", "lr": 1}}, {"optimizer": {"name": "Adam"}})
    {'optimizer': {'name': 'Adam'}}
    """
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            chooser = CHOSEN_BY.get(key, "")
            same = chooser not in value or value[chooser] == below.get(chooser)
            merged[key] = {**below, **value} if same else dict(value)
        else:
            merged[key] = value
    return merged


def merge_levels(levels: Sequence[Any], over: Mapping[str, Any]) -> list[Any]:
    """`levels` with the tables of `over` laid over them, by axis; another scheme keeps axis and
    replicas alone.

    >>> merge_levels([{"axis": "rack", "replicas": 2, "name": "full"}], {"rack": {"name": "demo", "topk": 1}})
    [{'axis': 'rack', 'replicas': 2, 'name': 'demo', 'topk': 1}]
    """
    axes = [str(level.get("axis")) if isinstance(level, dict) else "" for level in levels]
    for axis, value in over.items():
        if not isinstance(value, dict):
            raise ValueError(
                f"the recipe has levels: say of which, as in scheme.{axes[-1]}.{axis}={value}"
            )
        if axis not in axes:
            raise unknown("axis of a [[scheme]]", axis, axes)
    return [
        _merge_level(level, over.get(axis, {})) for axis, level in zip(axes, levels, strict=True)
    ]


def _merge_level(level: Any, over: Table) -> Any:
    if not over:
        return level
    own = {key: level[key] for key in ("axis", "replicas") if key in level}
    return {**own, **merge({"scheme": level}, {"scheme": over})["scheme"]}


def replicas_of_levels(recipe: Mapping[str, Any], overrides: Mapping[str, Any]) -> int | None:
    """The number of replicas that the levels of `recipe` come to; None for a recipe of one scheme."""
    if not isinstance(recipe.get("scheme"), list):
        return None
    rest = {key: value for key, value in overrides.items() if key != "mesh"}
    return resolve(recipe, rest).mesh.replicas


def read_recipe(path: Path) -> Table:
    """The tables of a recipe file, or of the recipe of that name that comes with the package.

    Raises `ValueError` for a file that is missing or not TOML.
    """
    shipped = {} if path.is_file() or len(path.parts) > 1 else shipped_recipes()
    try:
        return tomllib.loads(
            shipped.get(path.name, path).read_text(encoding="utf-8-sig")
        )  # Windows marks it
    except OSError as error:
        hint = did_you_mean(path.name, [*shipped])
        names = f"{hint or ';'} the package has {', '.join(shipped)}" if shipped else ""
        raise ValueError(
            f"cannot read the recipe {str(path)!r}: {error.strerror}{names}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} is not TOML: {error}; correct it there") from error


def parse_sets(assignments: Iterable[str]) -> Table:
    """The nested tables that `a.b=value` assignments spell; a value is TOML, and a bare word is
    text.

    >>> parse_sets(["scheme.topk=4", "scheme.name=demo", "seed=1"])
    {'scheme': {'topk': 4, 'name': 'demo'}, 'seed': 1}
    """
    tables: Table = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        keys = path.strip().split(".")
        of_a_level = len(keys) == 3 and keys[0] == "scheme"  # scheme.<axis>.<key>
        if not equals or not all(keys) or (len(keys) > 2 and not of_a_level):
            raise ValueError(f"--set takes table.key=value or seed=value, got {assignment!r}")
        if len(keys) >= 2 and keys[0] not in TABLES:
            raise unknown("table of the recipe", keys[0], TABLES)
        if len(keys) == 1 and keys[0] != "seed":
            raise ValueError(f"--set takes table.key=value or seed=value, got {assignment!r}")
        inner = tables
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            require(isinstance(inner, dict), key, inner, f"said once, not again by {assignment!r}")
        inner[keys[-1]] = _value(text.strip())
    return tables


def require_scheme(kind: str, name: str) -> None:
    """Raises `ValueError` unless `name` is a registered scheme, or spells a function of some
    module."""
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
    """Raises `ValueError` where `verb` would run code of `sections` of `config`, from `where`,
    unless `trusted`."""
    named = {
        # No code of a model of transformers runs. The prefix means nothing elsewhere: `hf:build` is
        # of a module `hf`.
        "model": [config.model.name] if not config.model.name.startswith(HUB_PREFIX) else [],
        "data": [config.data.name],
        "optimizer": [config.optimizer.name],
        "scheme": [level.scheme.name for level in config.levels],
    }
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
