"""The flags that verbs share, and their look in the help, which must not wait for an import of torch."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, UseAppendAction, arg

from detonation.choices import entry_points

SCHEME_NAMES = (
    "decoupled_adamw", "demo", "demo_diloco", "demo_published", "diloco", "distro", "eager_diloco", "full", "local_sgd",
    "loco", "muloco", "none", "random", "random_sign", "slicing", "sparseloco", "sparta", "streaming_diloco",
    "striding",
)  # fmt: skip
OPTIMIZER_NAMES = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD", "SignSGD",
)  # fmt: skip
MODEL_NAMES = ("olmo2", "olmoe", "t5", "vit")
"""The names that the help lists, known here without torch; tests compare them with those that there are."""


def shown(metavar: str | None = None, hint: Any = "") -> Any:
    """The look of an argument: its text names its default, and `hint` the values."""
    return arg(metavar=metavar, help_behavior_hint=hint)


def listed_schemes(_: str) -> str:
    """All schemes: of this library, of installed packages, and those registered in this process."""
    registry = sys.modules.get("detonation.core.schemes.registry")
    names = {*SCHEME_NAMES, *entry_points("detonation.schemes"), *getattr(registry, "SCHEMES", ())}
    return f"Schemes: {', '.join(sorted(names))}."


Flag = Annotated[bool, shown()]
Integer = Annotated[int | None, shown("INT")]
Sets = UseAppendAction[tuple[tuple[str, ...], ...]]
Rate = Annotated[str | None, shown("RATE[,LATENCY]")]
Address = Annotated[str | None, shown("HOST:PORT")]
Directory = Annotated[Path | None, shown("DIR")]
File = Annotated[Path | None, shown("FILE")]


@dataclass(frozen=True, kw_only=True)
class Common:
    json: Flag = False
    """Print exactly one JSON object last on stdout; the lines for people go to stderr."""
    debug: Flag = False
    """Show tracebacks and the warnings of the libraries underneath."""


@dataclass(frozen=True, kw_only=True)
class Overrides(Common):
    """What lies over a recipe."""

    set: Annotated[Sets, arg(help_behavior_hint=f"Optimizers: {', '.join(OPTIMIZER_NAMES)}.")] = ()
    """Override any key of the recipe: --set train.steps=100 scheme.topk=1. A wrong key lists the valid ones."""


@dataclass(frozen=True, kw_only=True)
class Processes(Overrides):
    """The processes that a verb starts, and the network between them."""

    replicas: Integer = None
    """Copies of the model (nodes); the recipe's when left out."""
    shards: Integer = None
    """Parts that each copy is cut into (accelerators in a node); the recipe's when left out."""
    link: Rate = None
    """Emulate a slow network between the replicas, such as 100mbit,5ms."""


@dataclass(frozen=True, kw_only=True)
class Shortcuts(Overrides):
    """Flags for the settings that change most; --set has all of them."""

    recipe: Positional[Annotated[Path, arg(metavar="RECIPE")]]
    """The recipe: a TOML file, or a name of detonation recipes."""
    scheme: Annotated[str | None, shown("NAME", listed_schemes)] = None
    """The same as --set scheme.name=NAME, as the recipe tunes it; auto chooses, package.module:function is yours."""
    steps: Integer = None
    """The same as --set train.steps=INT."""
    lr: Annotated[float | None, shown("NUMBER")] = None
    """The same as --set optimizer.lr=NUMBER."""
    model: Annotated[str | None, shown("NAME", f"Models: {', '.join(MODEL_NAMES)}.")] = None
    """The same as --set model.name=NAME; hf:DIRECTORY and hf:ID are of transformers, package.module:function yours."""
    data: Annotated[str | None, shown("SOURCE")] = None
    """The same as --set data.source=SOURCE: a name of detonation fetch, a file, a directory, or hf:ID of the hub."""
    init_from: Annotated[str | None, shown("DIR")] = None
    """The same as --set train.init_from=DIR: begin with the weights of a run, a checkpoint or an exported model."""
