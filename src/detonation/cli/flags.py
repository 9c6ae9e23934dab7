"""The flags that verbs share, and their look in the help, which must not wait for an import of torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

from tyro.conf import Positional, UseAppendAction, arg

_T = TypeVar("_T")


def shown(metavar: str | None = None) -> Any:
    """The look of an argument whose text names its default."""
    return arg(metavar=metavar, help_behavior_hint="")


Flag = Annotated[bool, shown()]
Integer = Annotated[int | None, shown("INT")]
Text = Annotated[str | None, shown("NAME")]
Sets = Annotated[UseAppendAction[tuple[tuple[str, ...], ...]], shown("[KEY=VALUE ...]")]
Rate = Annotated[str | None, shown("RATE[,LATENCY]")]
Address = Annotated[str | None, shown("HOST:PORT")]
Directory = Annotated[Path | None, shown("DIR")]
File = Annotated[Path | None, shown("FILE")]
OfRun = Positional[Annotated[Path, arg(metavar="DIR")]]


@dataclass(frozen=True, kw_only=True)
class Common:
    json: Flag = False
    """Print one JSON object last on stdout; lines for people go to stderr."""
    debug: Flag = False
    """Show tracebacks and the warnings of the libraries underneath."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
def verb(*first: str) -> Callable[[type[_T]], type[_T]]:
    """Makes a class the flags of a verb: in the help those named `first` come first, and those of `Common` last."""

    def made(kind: type[_T]) -> type[_T]:
        fields: dict[str, Any] = dataclass(frozen=True, kw_only=True)(kind).__dataclass_fields__  # type: ignore[attr-defined]
        own = [name for name in fields if name not in Common.__dataclass_fields__]
        kind.__dataclass_fields__ = {name: fields[name] for name in (*first, *own, *fields)}  # type: ignore[attr-defined]
        return kind

    return made


@dataclass(frozen=True, kw_only=True)
class Overrides(Common):
    """What lies over a recipe."""

    set: Sets = ()
    """Override any key of the recipe; a wrong key lists the valid ones."""


@dataclass(frozen=True, kw_only=True)
class Processes(Overrides):
    """The processes that a verb starts, and the network between them."""

    replicas: Integer = None
    """Copies of the model, one per node; the recipe's when left out."""
    shards: Integer = None
    """Parts of each copy, one per accelerator; the recipe's when left out."""
    link: Rate = None
    """Emulate a slow network between the replicas, such as 100mbit,5ms."""


@dataclass(frozen=True, kw_only=True)
class Shortcuts(Overrides):
    """Flags for the settings that change most; --set has all of them."""

    recipe: Positional[Annotated[Path | None, shown("[RECIPE]")]] = None
    """A TOML file, or a name that detonation train alone lists."""
    scheme: Text = None
    """What replicas exchange: demo, diloco, full, ...; auto chooses."""
    steps: Integer = None
    """Steps of the optimizer (train.steps)."""
    lr: Annotated[float | None, shown("NUMBER")] = None
    """Learning rate (optimizer.lr)."""
    model: Text = None
    """Such as olmo2, vit, hf:DIRECTORY or hf:ID (model.name)."""
    data: Annotated[str | None, shown("SOURCE")] = None
    """A name of detonation fetch, a file, a directory, hf:ID (data.source)."""
    init_from: Annotated[str | None, shown("DIR")] = None
    """Begin with the weights of a run or of an exported model."""
