"""The verbs (subcommands) of the command line and their flags, for tyro. Imports no module that
takes long to load.

The help of each verb fits on a screen of 40 lines of 100 columns: the text of a flag is one line.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, dataclass_transform

from tyro.conf import Positional, UseAppendAction, arg, subcommand

_T = TypeVar("_T")


def shown(metavar: str | None = None) -> Any:
    """Returns the options of tyro for a flag whose help text already names the flag's default."""
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
    """Decorates the class of a verb's flags. The help lists the flags in `first` first, and the
    flags of `Common` last.
    """

    def ordered(kind: type[_T]) -> type[_T]:
        flags: Any = dataclass(frozen=True, kw_only=True)(kind)
        fields = flags.__dataclass_fields__
        own = [name for name in fields if name not in Common.__dataclass_fields__]
        flags.__dataclass_fields__ = {name: fields[name] for name in (*first, *own, *fields)}
        return kind

    return ordered


@dataclass(frozen=True, kw_only=True)
class Overrides(Common):
    """Settings that override settings of a recipe."""

    set: Sets = ()
    """Override any key of the recipe; a wrong key lists the valid ones."""


@dataclass(frozen=True, kw_only=True)
class Processes(Overrides):
    """The processes that a verb starts, and the network between them."""

    replicas: Integer = None
    """Copies of the model, one per node; default: the recipe's number."""
    shards: Integer = None
    """Parts of each copy, one per accelerator; default: the recipe's number."""
    link: Rate = None
    """Emulate a slow network between the replicas, such as 100mbit,5ms."""


@dataclass(frozen=True, kw_only=True)
class Experiment(Overrides):
    """The model of a run, its data and its length."""

    steps: Integer = None
    """Steps of the optimizer (train.steps)."""
    model: Text = None
    """Model, such as olmo2, vit, hf:DIRECTORY or hf:ID (model.name)."""
    data: Annotated[str | None, shown("SOURCE")] = None
    """A name of detonation fetch, a file, a directory, hf:ID (data.source)."""
    init_from: Annotated[str | None, shown("DIR")] = None
    """Begin with the weights of a run or of an exported model."""


@dataclass(frozen=True, kw_only=True)
class Shortcuts(Experiment):
    """Flags for the settings that change most often; --set changes any setting."""

    recipe: Positional[Annotated[Path | None, shown("[RECIPE]")]] = None
    """A TOML file, or a name that detonation train alone lists."""
    scheme: Text = None
    """What replicas exchange: demo, diloco, full, ...; auto chooses."""
    lr: Annotated[float | None, shown("NUMBER")] = None
    """Learning rate (optimizer.lr)."""


@verb("recipe", "scheme", "steps", "replicas", "shards", "out", "web")
class Train(Shortcuts, Processes):
    """Train the model of a recipe; without one, list recipes, schemes and models.

    Example: detonation train quick-lm --steps 100 --out runs/first
    """

    out: Directory = None
    """Run directory; default: runs/<recipe>-<scheme>-<time>."""
    web: Flag = False
    """Show the run at http://127.0.0.1:8000 while it trains."""
    print: Flag = False
    """Only print the recipe, as a start for your own recipe."""
    resume: Flag = False
    """Continue the run in --out: its newest complete checkpoint, then its log."""
    checkpoint_every: Integer = None
    """Steps between checkpoints; default: only one at the end."""
    keep: Integer = None
    """Number of newest checkpoints to keep; default: 3."""
    stop_after: Integer = None
    """Stop after this number of steps, with the state saved."""
    logger: Annotated[UseAppendAction[tuple[str, ...]], shown("NAME")] = ()
    """Send steps to tensorboard, trackio, wandb, web:PORT or module:function."""
    # In Python 3.11, torchrun takes --log for an abbreviation of one of its own options.
    log: Annotated[bool, arg(aliases=["--log-updates"], help_behavior_hint="")] = False
    """Log all updates since the last checkpoints, for --resume and follow."""
    publish: Address = None
    """Serve the weights for detonation follow; needs DETONATION_TOKEN."""
    elastic: Flag = False
    """Continue without lost replicas, down to mesh.min_replicas replicas."""
    meet: Address = None
    """Address of the store (detonation meet), or A,B,C; default: here."""
    replica: Integer = None
    """Run only this replica here; --meet connects it to other replicas."""
    join: Address = None
    """Join the elastic run at this store; needs DETONATION_TOKEN."""
    interface: Annotated[str, shown("NAME")] = ""
    """Network interface to communicate over, such as wg0."""


@verb("recipe", "scheme", "steps", "replicas", "out")
class Simulate(Shortcuts):
    """Train many virtual replicas in this one process, to try a scheme with 64 of them.

    Loss and bytes equal those of a real run with one shard per replica; the seconds do not.

    Example: detonation simulate quick-lm --replicas 64
    """

    replicas: Integer = None
    """Copies of the model; default: the recipe's number."""
    total_batch: Integer = None
    """Examples per step of all replicas; default: train.batch_size for each."""
    out: Directory = None
    """Run directory; default: runs/<recipe>-<scheme>-<replicas>-<time>."""


@verb("recipe", "schemes", "vary", "steps", "replicas", "shards", "out")
class Compare(Experiment, Processes):
    """Train a recipe under several schemes or settings, and write one page.

    Finished runs in --out are kept, and stopped runs continue.

    Example: detonation compare quick-lm --schemes full,demo --link 100mbit,5ms

    Example: detonation compare quick-lm --vary optimizer.lr=1e-3,2e-3 seed=0,1
    """

    recipe: Positional[Annotated[Path, arg(metavar="RECIPE")]]
    """The recipe; its [tuned] tables give the settings of each scheme."""
    schemes: Annotated[str, shown("NAME,NAME,...")] = ""
    """Schemes to compare, such as full,demo,random,diloco; detonation train lists all."""
    vary: Sets = ()
    """Try each of these values, and with several keys every combination."""
    out: Directory = None
    """Directory of the runs and the page; default: runs/<recipe>-compare-<time>."""


@verb("recipe", "replicas", "shards", "out")
class Probe(Processes):
    """Measure links between and inside nodes, and a step without the network.

    Starts 2 x 2 processes by default, or joins the processes of torchrun or srun.

    Example: detonation probe quick-lm
    """

    recipe: Positional[Annotated[Path | None, shown("[RECIPE]")]] = None
    """Also measure its forward and backward, and each scheme's optimizer step."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("profile.json")
    """File for the profile, which detonation plan reads."""
    slow_backend: Annotated[str | None, shown("gloo")] = None
    """Measure the axis between replicas over gloo, like mesh.slow_backend."""
    interface: Annotated[str, shown("NAME")] = ""
    """Network interface to communicate over, such as wg0."""


@verb("recipe", "link", "profile", "replicas", "parameters", "step_time")
class Plan(Overrides):
    """Say which scheme and optimizer reach a loss first on a cluster.

    Takes a recipe or --parameters, and --profile or --link.

    Example: detonation plan quick-lm --profile profile.json

    Example: detonation plan --parameters 1.2b --replicas 16 --link 100mbit,20ms --step-time 0.35
    """

    recipe: Positional[Annotated[Path | None, shown("[RECIPE]")]] = None
    """The recipe to plan for; or give --parameters."""
    profile: File = None
    """File with the links and steps that detonation probe measured."""
    link: Rate = None
    """Links of this speed, such as 100mbit,20ms, instead of a profile."""
    step_time: Annotated[float | None, shown("SECONDS")] = None
    """Seconds of forward and backward; default: those in the profile."""
    replicas: Integer = None
    """Copies of the model; default: from recipe or profile, else 2."""
    shards: Integer = None
    """Accelerators in a node; default: from recipe or profile, else 1."""
    parameters: Annotated[str | None, shown("COUNT")] = None
    """Trained parameters, such as 1.2b, instead of a recipe."""
    optimizer: Text = None
    """Plan only for this optimizer, such as AdamW."""
    steps: Integer = None
    """Steps of the baseline's run; default: the recipe's, else 1000."""
    all: Flag = False
    """Show every scheme, with all columns."""


@verb()
class Report(Common):
    """Write a page that shows a run or compares several runs.

    The page of an unfinished run shows its steps so far.

    Example: detonation report runs/first

    Example: detonation report runs/slow/*/ --out slow.html
    """

    directories: Positional[Annotated[tuple[Path, ...], shown("DIR...")]]
    """Run directories."""
    out: File = None
    """File of the page; default: DIR/report.html for one run, else report.html."""


@verb()
class Verify(Common):
    """Check that checkpoints are whole and that replicas agree in them."""

    directory: OfRun
    """A run directory, or one checkpoint."""


@verb("directory", "out")
class Export(Common):
    """Write the model of a run's newest whole checkpoint for from_pretrained."""

    directory: OfRun
    """A run directory, or one checkpoint."""
    out: Annotated[Path, arg(metavar="DIR")]
    """The directory for the model, new or empty."""
    trust_code: Flag = False
    """Run the code of a model that the checkpoint names as package.module:function."""


@verb("source", "out", "to")
class Follow(Common):
    """Repeat a run from its updates, bit for bit: live, or from its log.

    A live run needs DETONATION_TOKEN; following sends nothing, and training does not wait.

    Example: detonation follow 10.10.0.1:7000 --out runs/standby

    Example: detonation follow runs/first --to 120 --out runs/at-120
    """

    source: Positional[Annotated[str, arg(metavar="SOURCE")]]
    """HOST:PORT of train --publish, one for each shard; or DIR of train --log."""
    out: Directory = None
    """Run directory for checkpoints of one replica; optional for a log."""
    to: Integer = None
    """Stop at this step; default: the end of the run or of its log."""
    every: Integer = None
    """Steps between checkpoints of a live run; default: 100."""
    keep: Integer = None
    """Number of newest checkpoints of a live run to keep; default: 3."""
    trust_code: Flag = False
    """Run the code that the run names as package.module:function."""


@verb()
class Meet(Common):
    """Serve the store where the replicas of an elastic run meet, until Ctrl-C."""

    address: Positional[Annotated[str, arg(metavar="HOST:PORT")]]
    """Address to listen at; each train --elastic --replica names it in --meet."""


@verb()
class Fetch(Common):
    """Download data sets to this machine; detonation train without flags lists them."""

    names: Positional[Annotated[tuple[str, ...], shown("NAME...")]]
    """Data sets, such as fashion-mnist, sotu, bible-en-es."""


_ALL = (Train, Compare, Simulate, Probe, Plan, Report, Verify, Export, Follow, Meet, Fetch)
KINDS: dict[str, Any] = {kind.__name__.lower(): kind for kind in _ALL}
"""The class with the flags of each verb, by the name of the verb."""


def verbs(brief: bool = False) -> Any:
    """Returns the type of all verbs, for tyro. With `brief` it has only the first line of each help
    text.

    Each verb has an explicit name, because tyro would otherwise import typeguard, which takes a
    third of the time of `--help`.
    """
    kinds = []
    for name, kind in KINDS.items():
        text = None
        if brief:
            text = str(kind.__doc__).partition("\n")[0]
        kinds.append(Annotated[kind, subcommand(name, description=text)])
    return Union[*kinds]
