"""The arguments that verbs share, and their look in the help. Imports nothing heavy."""

import dataclasses
from typing import Annotated, Any

from tyro.conf import UseAppendAction, arg

from detonation.cli.names import MODEL_NAMES, registered_schemes


def shown(metavar: str | None = None) -> Any:
    """The look of an argument whose text names its default."""
    return arg(metavar=metavar, help_behavior_hint="")


def with_schemes(metavar: str) -> Any:
    """The look of an argument that names schemes; they are listed when the help is shown."""
    return arg(metavar=metavar, help_behavior_hint=lambda _: f"Schemes: {registered_schemes()}.")


Flag = Annotated[bool, shown()]
Integer = Annotated[int | None, shown("INT")]
Sets = UseAppendAction[tuple[tuple[str, ...], ...]]


@dataclasses.dataclass(frozen=True)
class Common:
    json: Flag = False
    """Print exactly one JSON object last on stdout; the lines for people go to stderr."""
    debug: Flag = False
    """Show tracebacks and the warnings of the libraries underneath."""


@dataclasses.dataclass(frozen=True)
class Shortcuts(Common):
    """Flags for the settings that change most; --set has all of them."""

    scheme: Annotated[str | None, with_schemes("NAME")] = None
    """The same as --set scheme.name=NAME, with the settings that the recipe has tuned for it; auto measures the links
    and chooses, package.module:function is yours."""
    steps: Integer = None
    """The same as --set train.steps=INT."""
    lr: Annotated[float | None, shown("NUMBER")] = None
    """The same as --set optimizer.lr=NUMBER."""
    model: Annotated[str | None, arg(metavar="NAME", help_behavior_hint=f"Models: {', '.join(MODEL_NAMES)}.")] = None
    """The same as --set model.name=NAME; hf:DIRECTORY and hf:ID are of transformers, package.module:function yours."""
    data: Annotated[str | None, shown("SOURCE")] = None
    """The same as --set data.source=SOURCE: a name of detonation fetch, a file, a directory, or hf:ID of the hub."""
    init_from: Annotated[str | None, shown("DIR")] = None
    """The same as --set train.init_from=DIR: begin with the weights of a run, a checkpoint or an exported model."""
