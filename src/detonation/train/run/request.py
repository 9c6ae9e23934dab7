"""The request for a run: the flags of the command line as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from detonation.cluster.init import LaunchPosition
from detonation.train.recipe.resolve import Layers, read_layers
from detonation.train.recipe.schema import Config, Table, require

_R = TypeVar("_R")


@dataclass(frozen=True)
class Request:
    """A run that a user asks for; the fields are named like the flags of `detonation train`.

    `overrides` are those of --set, and of flags that stand for a setting. `replicas` and `shards` are those of the
    recipe, or of the launcher, when None.

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
    interface: str = ""
    replica: int | None = None
    join: str | None = None
    to_stderr: bool = False

    def __post_init__(self) -> None:
        require(self.stop_after is None or self.stop_after >= 1, "--stop-after", self.stop_after, "at least 1")
        if self.resume and self.out is None:
            raise ValueError("--resume needs --out: the run directory to continue")

    def layers(self, place: LaunchPosition | None) -> Layers:
        """The recipe with the launcher's world and the command line over it."""
        mesh, alone = {"replicas": self.replicas, "shards": self.shards}, self.replica is not None or bool(self.join)
        if alone and place is not None and self.shards is None:  # the launcher's world is one replica of several
            mesh["shards"] = place.world_size
        sets = (*self.overrides, *(("mesh.elastic=true",) if self.join else ()))
        return read_layers(self.recipe, sets, None if alone else place, mesh=mesh)


def configure(request: Request, place: LaunchPosition | None) -> Config:
    """The configuration of `request`, which `check_config` has not checked yet."""
    return request.layers(place).config()


def to_plain(request: Any) -> Table:
    """A request in values that JSON can hold, for a process that starts afresh."""
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def from_plain(kind: type[_R], table: Mapping[str, Any]) -> _R:
    """The request of this `kind` that `to_plain` made a table of."""
    paths = {name: Path(table[name]) for name in ("recipe", "out") if table.get(name) is not None}
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in table.items()} | paths)
