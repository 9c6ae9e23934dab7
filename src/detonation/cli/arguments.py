"""The verbs of the command line and their flags, as tyro reads them. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg, subcommand

from detonation.cli.flags import (
    Address,
    Common,
    Directory,
    File,
    Flag,
    Integer,
    Overrides,
    Processes,
    Rate,
    Sets,
    Shortcuts,
    listed_schemes,
    shown,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Train(Shortcuts, Processes):
    """Train the model of a recipe.

    Starts replicas x shards processes on this machine, or joins those that torchrun or srun started. Example:
    detonation train quick-lm --steps 100 --out runs/first
    """

    out: Directory = None
    """Run directory; runs/<recipe>-<scheme>-<time> when left out."""
    resume: Flag = False
    """Continue the run in --out from its newest whole checkpoint, exactly; or with other --replicas and --shards."""
    checkpoint_every: Integer = None
    """Steps between checkpoints, which are written while training goes on; only at the end when left out."""
    keep: Integer = None
    """Checkpoints to keep, the newest; 3 when left out."""
    stop_after: Integer = None
    """Stop after so many steps with the state saved, as a preemption would."""
    logger: UseAppendAction[tuple[str, ...]] = ()
    """Send each step to a tracker too: tensorboard, trackio, wandb or package.module:function; several may be given."""
    log: Flag = False
    """Keep the agreed update of each step since the last checkpoints, for detonation replay."""
    publish: Address = None
    """Serve the weights in training there, for detonation follow; needs a token in DETONATION_TOKEN."""
    elastic: Flag = False
    """Go on in the same processes when a replica is lost, as long as mesh.min_replicas are left."""
    meet: Address = None
    """Address of the store of an elastic run (detonation meet); one on this machine when left out."""
    replica: Integer = None
    """Run this replica alone, which meets the others at --meet, where detonation meet serves."""
    join: Address = None
    """Join the elastic run whose store is there as one more replica; needs its token in DETONATION_TOKEN."""
    interface: Annotated[str, shown("NAME")] = ""
    """Network interface that the sockets keep to, such as wg0; on one machine loopback when left out."""


@dataclass(frozen=True, kw_only=True)
class Simulate(Shortcuts):
    """Train many virtual replicas in this one process, to see how a scheme does with 64 of them.

    Each has its own model, memory and data, and runs the code of a real replica of one shard, so the result is that of
    a real run, and so are its bytes; only the seconds are not. Example: detonation simulate quick-lm --replicas 64
    """

    replicas: Integer = None
    """Copies of the model; the recipe's when left out."""
    total_batch: Integer = None
    """Examples per step over all replicas, to compare numbers of them; train.batch_size for each when left out."""
    profile: File = None
    """Result of `detonation probe RECIPE --replicas 2 --shards 1`, to predict the seconds of a step on that cluster."""
    out: Directory = None
    """Run directory; runs/<recipe>-<scheme>-<replicas>-<time> when left out."""


@dataclass(frozen=True, kw_only=True)
class Compare(Processes):
    """Train a recipe under several schemes or settings, one after another, and write one page.

    Finished runs in --out are kept, stopped ones continue. Examples: detonation compare quick-lm --schemes
    full,demo --link 100mbit,5ms, or detonation compare quick-lm --vary optimizer.lr=1e-3,2e-3 seed=0,1
    """

    recipe: Positional[Annotated[Path, arg(metavar="RECIPE")]]
    """The recipe; each scheme has the settings that it is tuned to there."""
    schemes: Annotated[str, shown("NAME,NAME,...", listed_schemes)] = ""
    """Schemes to compare, such as full,demo,random,diloco; package.module:function for your own."""
    vary: Sets = ()
    """Try each of these values; several keys give every combination: --vary optimizer.lr=1e-3,2e-3 seed=0,1"""
    out: Directory = None
    """Directory of the runs and the page; runs/<recipe>-compare-<time> when left out."""


@dataclass(frozen=True, kw_only=True)
class Probe(Processes):
    """Measure the links between nodes and inside them, and a step of a recipe's training without them.

    Starts replicas x shards processes, 2 x 2 by default, or joins those of torchrun or srun. Example:
    detonation probe quick-lm
    """

    recipe: Positional[Annotated[Path | None, shown("[RECIPE]")]] = None
    """Measure its forward and backward pass too, and every scheme's optimizer step."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("profile.json")
    """The profile, for detonation plan."""
    slow_backend: Annotated[str | None, shown("gloo")] = None
    """Measure the axis between replicas over gloo, as mesh.slow_backend of a recipe has it."""


@dataclass(frozen=True, kw_only=True)
class Plan(Overrides):
    """Say what reaches a loss first on a cluster: the scheme and the optimizer, and whether the other machines pay.

    Takes a recipe or --parameters, and --profile or --link. Examples:
    detonation plan quick-lm --profile profile.json, or
    detonation plan --parameters 1.2b --replicas 16 --link 100mbit,20ms --step-time 0.35
    """

    recipe: Positional[Annotated[Path | None, shown("[RECIPE]")]] = None
    """The recipe to plan for; or give --parameters."""
    profile: File = None
    """Links and steps as detonation probe measured them."""
    link: Rate = None
    """Links of this speed, such as 100mbit,20ms, instead of a profile."""
    step_time: Annotated[float | None, shown("SECONDS")] = None
    """Forward and backward of one step; the profile's when left out."""
    replicas: Integer = None
    """Copies of the model (nodes); the recipe's or the profile's, or 2, when left out."""
    shards: Integer = None
    """Accelerators in a node; the recipe's or the profile's, or 1, when left out."""
    parameters: Annotated[str | None, shown("COUNT")] = None
    """Trained parameters, such as 1.2b, instead of a recipe."""
    shard_nodes: Integer = None
    """Nodes that the shards of one copy lie on; shows what crosses the links between them, too."""
    optimizer: Annotated[str | None, shown("NAME")] = None
    """Keep this optimizer, such as AdamW, and compare with its full synchronisation; any may win when left out."""
    steps: Integer = None
    """Steps after which the baseline's loss is to be reached; the recipe's, or 1000, when left out."""
    all: Flag = False
    """Show every scheme with all that is known of it."""


@dataclass(frozen=True, kw_only=True)
class Report(Common):
    """Write a page that shows a run, or one that compares several, and each figure as PNG.

    Examples: detonation report runs/first, or detonation report runs/slow/*/ --out slow.html
    """

    directories: Positional[Annotated[tuple[Path, ...], shown("DIR...")]]
    """Run directories."""
    out: File = None
    """The page; DIR/report.html for one run and report.html for several when left out. PNGs lie beside it."""
    plan: File = None
    """Show this plan too, as detonation plan --json printed it; a run that scheme auto chose shows its own."""


@dataclass(frozen=True, kw_only=True)
class Verify(Common):
    """Check that checkpoints are whole and that replicas agree in them; exit code 1 if not."""

    directory: Positional[Annotated[Path, arg(metavar="DIR")]]
    """A run directory, or one checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Export(Common):
    """Write the model of a run's newest whole checkpoint for transformers' from_pretrained."""

    directory: Positional[Annotated[Path, arg(metavar="DIR")]]
    """A run directory, or one checkpoint."""
    out: Annotated[Path, arg(metavar="DIR")]
    """The directory for the model, new or empty."""
    trust_code: Flag = False
    """Run the code of a model that the checkpoint names as package.module:function."""


@dataclass(frozen=True, kw_only=True)
class Replay(Common):
    """Repeat the steps of a run from its log of updates (train --log), bit for bit and without training.

    Example: detonation replay runs/first --to 120 --out runs/at-120
    """

    directory: Positional[Annotated[Path, arg(metavar="DIR")]]
    """A run directory."""
    to: Integer = None
    """The step; the last of the log when left out. The log has those since the last two checkpoints."""
    out: Directory = None
    """Write a checkpoint of that step there, for detonation export, or for train --out DIR --resume."""
    trust_code: Flag = False
    """Run the code that the run names as package.module:function."""


@dataclass(frozen=True, kw_only=True)
class Follow(Common):
    """Hold the weights of a run that trains elsewhere (train --publish), step by step and bit for bit.

    It is no replica: it sends nothing, and training does not wait for it. Needs the token of the run in
    DETONATION_TOKEN, or in the file that DETONATION_TOKEN_FILE names. Example:
    detonation follow 10.10.0.1:7000 --out runs/standby
    """

    address: Positional[Annotated[str, arg(metavar="HOST:PORT")]]
    """Where the run publishes its weights; or one for each shard, separated by commas."""
    out: Annotated[Path, arg(metavar="DIR")]
    """A run directory for checkpoints of one replica, for detonation export, or for train --out DIR --resume."""
    every: Annotated[int, arg(metavar="INT")] = 100
    """Steps between checkpoints."""
    keep: Annotated[int, arg(metavar="INT")] = 3
    """Checkpoints to keep, the newest."""
    to: Integer = None
    """Stop at this step; the end of the run when left out."""
    trust_code: Flag = False
    """Run the code that the run names as package.module:function."""


@dataclass(frozen=True, kw_only=True)
class Meet(Common):
    """Serve the store of an elastic run (train --elastic --meet --replica), until ended."""

    address: Positional[Annotated[str, arg(metavar="HOST:PORT")]]


@dataclass(frozen=True, kw_only=True)
class Fetch(Common):
    """Download data sets to this machine."""

    names: Positional[Annotated[tuple[str, ...], shown("NAME...")]]
    """Data sets, such as fashion-mnist, cifar10, sotu, shakespeare, bible-en-es."""


@dataclass(frozen=True, kw_only=True)
class Recipes(Common):
    """List the recipes that come with the package, or print one, as the start of your own.

    Example: detonation recipes quick-lm
    """

    name: Positional[Annotated[str | None, shown("[NAME]")]] = None
    """The recipe to print."""


@dataclass(frozen=True, kw_only=True)
class Env(Common):
    """Print versions and platform, to paste into a bug report."""


# The names are given, as tyro would import typeguard to find them: a third of the time of `--help`.
Verb = (
    Annotated[Train, subcommand("train")]
    | Annotated[Compare, subcommand("compare")]
    | Annotated[Simulate, subcommand("simulate")]
    | Annotated[Probe, subcommand("probe")]
    | Annotated[Plan, subcommand("plan")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Verify, subcommand("verify")]
    | Annotated[Export, subcommand("export")]
    | Annotated[Replay, subcommand("replay")]
    | Annotated[Follow, subcommand("follow")]
    | Annotated[Meet, subcommand("meet")]
    | Annotated[Fetch, subcommand("fetch")]
    | Annotated[Recipes, subcommand("recipes")]
    | Annotated[Env, subcommand("env")]
)
