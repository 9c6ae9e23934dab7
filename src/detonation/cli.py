"""The command `detonation`: parse, call, print. Heavy imports wait until a verb needs them."""

import dataclasses
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg, subcommand

_Sets = UseAppendAction[tuple[tuple[str, ...], ...]]
_Integer = Annotated[int | None, arg(metavar="INT")]


@dataclasses.dataclass(frozen=True)
class _Common:
    json: bool = False
    """Print exactly one JSON object last on stdout; what people read goes to stderr."""
    debug: bool = False
    """Show tracebacks and the warnings of the libraries underneath."""


@dataclasses.dataclass(frozen=True)
class Train(_Common):
    """Train a model as a recipe says.

    Starts replicas x shards processes on this machine, or joins those that torchrun or srun started.
    """

    recipe: Positional[Annotated[Path, arg(metavar="RECIPE.toml")]] = dataclasses.field(kw_only=True)
    """What to train, such as recipes/quick-lm.toml."""
    set: _Sets = ()
    """Override the recipe: --set train.steps=100 scheme.name=diloco"""
    replicas: _Integer = None
    """Copies of the model (nodes); the recipe's when left out."""
    shards: _Integer = None
    """Parts that each copy is cut into (accelerators in a node); the recipe's when left out."""
    link: Annotated[str | None, arg(metavar="RATE[,LATENCY]")] = None
    """Emulate a slow network between the replicas, such as 100mbit,5ms."""
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Run directory; runs/<recipe>-<scheme>-<time> when left out."""
    resume: bool = False
    """Continue the run in --out from its newest whole checkpoint, exactly; or with other --replicas and --shards."""
    checkpoint_every: _Integer = None
    """Write a checkpoint every so many steps, beside training; only at the end when left out."""
    keep: _Integer = None
    """How many checkpoints stay, the newest; 3 when left out."""
    stop_after: _Integer = None
    """Stop after so many steps with the state saved, as a preemption would."""
    interface: Annotated[str, arg(metavar="NAME")] = ""
    """Network interface that the sockets keep to, such as wg0; on one machine loopback when left out."""


@dataclasses.dataclass(frozen=True)
class Simulate(_Common):
    """Train many virtual replicas in this one process, to see how a scheme does with 64 of them.

    Each has its own model, memory and data, and runs the code of a real replica of one shard: the result is that of a
    real run, also its bytes. Only the seconds are this machine's.
    """

    recipe: Positional[Annotated[Path, arg(metavar="RECIPE.toml")]] = dataclasses.field(kw_only=True)
    """What to train, such as recipes/quick-lm.toml."""
    set: _Sets = ()
    """Override the recipe: --set train.steps=100 scheme.name=random_sign"""
    replicas: _Integer = None
    """Copies of the model; the recipe's when left out."""
    total_batch: _Integer = None
    """Examples a step over all replicas, to compare numbers of them; train.batch_size for each when left out."""
    profile: Annotated[Path | None, arg(metavar="FILE")] = None
    """Of `detonation probe RECIPE --replicas 2 --shards 1`: the seconds of a step are predicted for that cluster."""
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Run directory; runs/<recipe>-<scheme>-<replicas>-<time> when left out."""


@dataclasses.dataclass(frozen=True)
class Compare(_Common):
    """Train a recipe under several schemes, one after another on the same data and seed, and write one page.

    Runs that are finished in --out are not run again.
    """

    recipe: Positional[Annotated[Path, arg(metavar="RECIPE.toml")]] = dataclasses.field(kw_only=True)
    """What to train, each scheme at the settings that the recipe has for it."""
    schemes: Annotated[str, arg(metavar="NAME,NAME,...")] = dataclasses.field(kw_only=True)
    """Schemes, such as full,demo,random,diloco."""
    set: _Sets = ()
    """Override the recipe, as in train."""
    replicas: _Integer = None
    """Copies of the model (nodes); the recipe's when left out."""
    shards: _Integer = None
    """Parts that each copy is cut into (accelerators in a node); the recipe's when left out."""
    link: Annotated[str | None, arg(metavar="RATE[,LATENCY]")] = None
    """Emulate a slow network between the replicas, such as 100mbit,5ms."""
    out: Annotated[Path | None, arg(metavar="DIR")] = None
    """Directory of the runs and the page; runs/<recipe>-compare-<time> when left out."""


@dataclasses.dataclass(frozen=True)
class Probe(_Common):
    """Measure the links between nodes and inside them, and a step of a recipe's training without them.

    Starts replicas x shards processes on this machine, or joins those that torchrun or srun started.
    """

    recipe: Positional[Annotated[Path | None, arg(metavar="[RECIPE.toml]")]] = None
    """Measure its forward and backward pass too, and every scheme's optimizer step."""
    set: _Sets = ()
    """Override the recipe, as in train."""
    replicas: _Integer = None
    """Copies of the model (nodes); 2 when left out everywhere."""
    shards: _Integer = None
    """Parts that each copy is cut into (accelerators in a node); 2 when left out everywhere."""
    link: Annotated[str | None, arg(metavar="RATE[,LATENCY]")] = None
    """Emulate a slow network between the replicas, such as 100mbit,5ms."""
    out: Annotated[Path, arg(metavar="FILE")] = Path("profile.json")
    """The profile, for detonation plan."""


@dataclasses.dataclass(frozen=True)
class Plan(_Common):
    """Rank the schemes for a cluster: seconds a step, bytes, memory, and what their loss was measured to cost."""

    recipe: Positional[Annotated[Path | None, arg(metavar="[RECIPE.toml]")]] = None
    """What to train; or say --parameters."""
    set: _Sets = ()
    """Override the recipe, as in train."""
    profile: Annotated[Path | None, arg(metavar="FILE")] = None
    """Links and steps as detonation probe measured them."""
    link: Annotated[str | None, arg(metavar="RATE[,LATENCY]")] = None
    """Links as you say, such as 100mbit,20ms, instead of a profile."""
    step_time: Annotated[float | None, arg(metavar="SECONDS")] = None
    """Forward and backward of one step; the profile's when left out."""
    replicas: _Integer = None
    """Copies of the model (nodes); the recipe's or the profile's, or 2, when left out."""
    shards: _Integer = None
    """Accelerators in a node; the recipe's or the profile's, or 1, when left out."""
    parameters: Annotated[str | None, arg(metavar="COUNT")] = None
    """Trained parameters, such as 1.2b, instead of a recipe."""


@dataclasses.dataclass(frozen=True)
class Report(_Common):
    """Write a page that shows a run, or one that compares several."""

    directories: Positional[Annotated[tuple[Path, ...], arg(metavar="DIR...")]] = dataclasses.field(kw_only=True)
    """Run directories."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """The page; DIR/report.html for one run and report.html for several when left out."""


@dataclasses.dataclass(frozen=True)
class Verify(_Common):
    """Say whether checkpoints are whole and replicas agree in them; exit code 1 where not."""

    directory: Positional[Annotated[Path, arg(metavar="DIR")]] = dataclasses.field(kw_only=True)
    """A run directory, or one checkpoint."""


@dataclasses.dataclass(frozen=True)
class Export(_Common):
    """Write the model of a run's newest whole checkpoint for transformers' from_pretrained."""

    directory: Positional[Annotated[Path, arg(metavar="DIR")]] = dataclasses.field(kw_only=True)
    """A run directory, or one checkpoint."""
    out: Annotated[Path, arg(metavar="DIR")] = dataclasses.field(kw_only=True)
    """Where the model goes: a new or empty directory."""


@dataclasses.dataclass(frozen=True)
class Fetch(_Common):
    """Bring data sets to this machine."""

    names: Positional[Annotated[tuple[str, ...], arg(metavar="NAME...")]] = dataclasses.field(kw_only=True)
    """Data sets, such as fashion-mnist, cifar10, sotu, shakespeare, bible-en-es."""


@dataclasses.dataclass(frozen=True)
class Env(_Common):
    """Print versions and platform, to paste into a bug report."""


_Verb = (
    Annotated[Train, subcommand("train")]
    | Annotated[Compare, subcommand("compare")]
    | Annotated[Simulate, subcommand("simulate")]
    | Annotated[Probe, subcommand("probe")]
    | Annotated[Plan, subcommand("plan")]
    | Annotated[Report, subcommand("report")]
    | Annotated[Verify, subcommand("verify")]
    | Annotated[Export, subcommand("export")]
    | Annotated[Fetch, subcommand("fetch")]
    | Annotated[Env, subcommand("env")]
)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command line; returns 0 (also if stopped on request), 1 for a failure, 2 for bad input, 130 for Ctrl-C.

    A rank of a launcher's world ends here, without a return: see `end_now`.
    """
    verb: Any = tyro.cli(
        _Verb,
        prog="detonation",
        description="Train PyTorch models over slow links: sharded inside the node, in touch between nodes.",
        args=arguments,
        config=(FlagCreatePairsOff,),
    )
    # Both are read when torch is imported, and only then.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "WARNING" if verb.debug else "ERROR")
    code = _run(verb)
    if isinstance(verb, Train | Probe) and _in_launched_world():
        from detonation.cluster.end import end_now

        end_now(code)
    return code


def _run(verb: Any) -> int:
    try:
        result = _VERBS[type(verb)](verb)
    except KeyboardInterrupt:
        return _fail(verb, "interrupted", 130)
    except Exception as error:
        return _explain(verb, error)
    if verb.json and result is not None:
        print(json.dumps(result))
    return 1 if result is not None and result.get("good") is False else 0


def _in_launched_world() -> bool:
    from detonation.cluster.join import launched

    return launched(os.environ) is not None


def _train(verb: Train) -> dict[str, Any] | None:
    from detonation.report.page import try_write
    from detonation.report.table import show
    from detonation.train.run import Request, is_first, run

    sets = tuple(assignment for group in verb.set for assignment in group)
    request = Request(
        verb.recipe,
        sets,
        verb.replicas,
        verb.shards,
        verb.link,
        verb.out,
        verb.resume,
        verb.stop_after,
        verb.checkpoint_every,
        verb.keep,
        verb.interface,
        to_stderr=verb.json,
    )
    summary = run(request, lambda error: _explain(verb, error))
    if not is_first():
        return None
    page = [] if "stopped_after" in summary else [try_write([Path(summary["directory"])])]
    show(summary, page, sys.stderr if verb.json else sys.stdout)
    return summary


def _compare(verb: Compare) -> dict[str, Any]:
    from detonation.report.page import try_write
    from detonation.report.table import show_all
    from detonation.train.compare import compare
    from detonation.train.run import Request

    sets = tuple(assignment for group in verb.set for assignment in group)
    request = Request(verb.recipe, sets, verb.replicas, verb.shards, verb.link, verb.out, to_stderr=verb.json)
    schemes = [name.strip() for name in verb.schemes.split(",") if name.strip()]
    summaries = compare(request, schemes, lambda error: _explain(verb, error))
    directories = [Path(summary["directory"]) for summary in summaries]
    page = directories[0].parent / "report.html"
    show_all(summaries, [try_write(directories, page)], sys.stderr if verb.json else sys.stdout)
    return {"runs": summaries, "report": str(page)}


def _simulate(verb: Simulate) -> dict[str, Any]:
    from detonation.report.page import try_write
    from detonation.report.table import show
    from detonation.train.simulate import Simulation, simulate

    sets = tuple(assignment for group in verb.set for assignment in group)
    summary = simulate(
        Simulation(verb.recipe, sets, verb.replicas, verb.total_batch, verb.profile, verb.out, to_stderr=verb.json)
    )
    show(summary, [try_write([Path(summary["directory"])])], sys.stderr if verb.json else sys.stdout)
    return summary


def _probe(verb: Probe) -> dict[str, Any] | None:
    from detonation.report.links import show_profile
    from detonation.train.probe import probe

    sets = tuple(assignment for group in verb.set for assignment in group)
    profile = probe(verb.recipe, sets, verb.replicas, verb.shards, verb.link, lambda error: _explain(verb, error))
    if profile is None:
        return None
    table = profile.write(verb.out)
    show_profile(table, sys.stderr if verb.json else sys.stdout)
    _say(verb, f"profile: {verb.out}")
    return table


def _plan(verb: Plan) -> dict[str, Any]:
    from detonation.report.plan import show_plan
    from detonation.train.plan import Question, plan

    sets = tuple(assignment for group in verb.set for assignment in group)
    found = plan(
        Question(
            verb.recipe,
            sets,
            verb.profile,
            verb.link,
            verb.step_time,
            verb.replicas,
            verb.shards,
            verb.parameters,
        )
    )
    show_plan(found, sys.stderr if verb.json else sys.stdout)
    return found


def _report(verb: Report) -> dict[str, Any]:
    from detonation.report.page import write

    path = write(list(verb.directories), verb.out)
    _say(verb, str(path))
    return {"report": str(path)}


def _verify(verb: Verify) -> dict[str, Any]:
    from detonation.checkpoint.verify import checkpoints, verify

    verdicts = [verify(path) for path in checkpoints(verb.directory)]
    for verdict in verdicts:
        _say(verb, verdict.line())
    found = [{"path": str(v.path), "good": v.good, "faults": v.faults, "differences": v.differences} for v in verdicts]
    return {"good": all(verdict.good for verdict in verdicts), "checkpoints": found}


def _export(verb: Export) -> dict[str, Any]:
    from detonation.train.export import export

    exported = export(verb.directory, verb.out)
    _say(verb, f"{exported['checkpoint']}: {exported['num_parameters']:,} parameters written to {verb.out}")
    return exported


def _fetch(verb: Fetch) -> dict[str, Any]:
    from detonation.data import SOURCES
    from detonation.data.fetch import fetch

    if not verb.names:
        raise ValueError(f"fetch needs at least one name: {', '.join(SOURCES)}")
    paths = {}
    for name in verb.names:
        paths[name] = str(fetch(name))
        _say(verb, f"{name}: {paths[name]}")
    return paths


def _env(verb: Env) -> dict[str, Any]:
    from detonation.train.environment import environment, lines

    found = environment()
    for line in lines(found):
        _say(verb, line)
    return found


_VERBS: dict[type, Any] = {
    Train: _train,
    Compare: _compare,
    Simulate: _simulate,
    Probe: _probe,
    Plan: _plan,
    Report: _report,
    Verify: _verify,
    Export: _export,
    Fetch: _fetch,
    Env: _env,
}


def _say(verb: _Common, line: str) -> None:
    print(line, file=sys.stderr if verb.json else sys.stdout)


def _explain(verb: _Common, error: Exception) -> int:
    from detonation.cluster.failure import WorldError, describe

    world = error if isinstance(error, WorldError) else None
    if verb.debug:
        trace = world.failure.trace if world else ""
        print(trace or "".join(traceback.format_exception(error)), file=sys.stderr, end="")
    if world and world.told:
        return 2 if world.failure.bad_input else 1
    bad_input = world.failure.bad_input if world else isinstance(error, ValueError)
    return _fail(verb, describe(error), 2 if bad_input else 1)


def _fail(verb: _Common, line: str, code: int) -> int:
    print(f"error: {line}", file=sys.stderr)
    if verb.json:
        print(json.dumps({"error": line, "code": code}))
    return code
