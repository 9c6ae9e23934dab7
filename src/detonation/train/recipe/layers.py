"""A recipe and the layers over it: the launcher's world, `--set`, and the flags of the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from detonation.cluster.init import LaunchPosition
from detonation.train.recipe.resolve import parse_sets, read_recipe, replicas_of_levels, resolve
from detonation.train.recipe.schema import Config, Table, require


@dataclass(frozen=True)
class Layers:
    """A recipe's tables, and the tables that lie over them."""

    tables: Table
    overrides: Table

    def config(self) -> Config:
        """The configuration. Raises `ValueError` as `resolve` does."""
        return resolve(self.tables, self.overrides)

    def tunes(self, scheme: str) -> bool:
        """True where the recipe has settings that it has tuned for `scheme`, and another scheme as its own."""
        own = self.tables.get("scheme")
        return scheme in self.tables.get("tuned", {}) and isinstance(own, dict) and own.get("name") != scheme

    def under(self, name: str, arguments: Mapping[str, Any]) -> Config:
        """The configuration under another scheme, with the settings that the recipe has tuned for it."""
        return resolve(self.tables, {**self.overrides, "scheme": {"name": name, **arguments}})


def read_layers(
    recipe: Path,
    sets: Sequence[str],
    place: LaunchPosition | None = None,
    *,
    mesh: Mapping[str, Any],
    train: Mapping[str, Any] | None = None,
) -> Layers:
    """Reads a recipe and lays the command line over it.

    Args:
        recipe: The TOML file.
        sets: Assignments as `--set` takes them.
        place: This process's place in a launcher's world, which decides on the mesh where the command line does not.
        mesh: Flags that set keys of [mesh]; `None` leaves a key as it is.
        train: Flags that set keys of [train].

    Raises:
        ValueError: The file cannot be read, or an assignment or the mesh makes no sense.
    """
    overrides = parse_sets(sets)
    tables = read_recipe(recipe)
    over = {**overrides.get("mesh", {}), **_given(mesh)}
    levels = replicas_of_levels(tables, overrides)
    if levels is None or "replicas" in over:
        over = fill_mesh(over, place)
    else:  # the levels of the recipe say how many replicas there are
        over = fill_mesh({**over, "replicas": levels}, place)
        del over["replicas"]
    return Layers(tables, {**overrides, "train": {**overrides.get("train", {}), **_given(train or {})}, "mesh": over})


def fill_mesh(mesh: Mapping[str, Any], place: LaunchPosition | None) -> Table:
    """`mesh` with the replicas and shards of a launcher's world: a replica per node, unless `mesh` has other numbers.

    Raises `ValueError` where they do not come to the number of processes that the launcher started.
    """
    if place is None:
        return dict(mesh)
    replicas, shards = mesh.get("replicas"), mesh.get("shards")
    for name, value in (("replicas", replicas), ("shards", shards)):
        require(value is None or (type(value) is int and value >= 1), f"mesh.{name}", value, "a number of at least 1")
    if shards is None:
        shards = place.local_world_size if replicas is None else place.world_size // replicas
    if shards is None:
        raise ValueError("the launcher does not say how many ranks a machine has: give --shards, or LOCAL_WORLD_SIZE")
    if replicas is None:
        replicas = place.world_size // shards
    if replicas * shards != place.world_size:
        product = f"{replicas} replicas x {shards} shards are {replicas * shards} processes"
        raise ValueError(f"{product}, but the launcher started {place.world_size}")
    return {**mesh, "replicas": replicas, "shards": shards}


def _given(flags: Mapping[str, Any]) -> Table:
    return {key: value for key, value in flags.items() if value is not None}
