"""A simulated run: as many replicas as one likes, trained in one process by the code that trains real ones."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import detonation as dt
from detonation import models
from detonation.cluster.network.simulated import VirtualWire, play
from detonation.cluster.processes.signals import Stop
from detonation.plan.cost import Cost
from detonation.train.auto.asked import Auto
from detonation.train.auto.predict import predict
from detonation.train.loop.fit import fit
from detonation.train.loop.session import Session, check, load_data, safety
from detonation.train.loop.world import Alone
from detonation.train.output import directory, metrics, trackers
from detonation.train.output.environment import environment
from detonation.train.output.screen import Screen
from detonation.train.output.summary import summarise
from detonation.train.recipe import optimizers, toml
from detonation.train.recipe.resolve import parse_sets
from detonation.train.recipe.schema import Config, Table, require, to_table
from detonation.train.run.run import Request, configure
from detonation.train.run.worker import Recorder, fresh_directory


@dataclass(frozen=True)
class Simulation:
    """What a user asked for. `total_batch`: examples a step over all replicas; the recipe's for each when None.

    profile: of a cluster, whose seconds the steps are given; those of this machine when None.
    """

    recipe: Path
    overrides: tuple[str, ...] = ()
    replicas: int | None = None
    total_batch: int | None = None
    profile: Path | None = None
    out: Path | None = None
    to_stderr: bool = False


def simulate(request: Simulation) -> Table:
    """Trains as `request` says, in this process; returns the summary and, as `directory`, where the run lies.

    It equals a real run of as many replicas of one shard each, bit for bit, but where a network adds up more than two
    numbers in another order. Raises `ValueError` for bad input before anything is written.
    """
    config = configured(request)
    trackers.check(config.train.loggers)
    predicted = predict(config, request.recipe, request.profile) if request.profile else None
    if request.out is not None:
        directory.check_free(request.out, resume=False)
    out = request.out or fresh_directory(f"{request.recipe.stem}-{config.scheme.name}-{config.mesh.replicas}")
    screen = Screen(silent=False, to_stderr=request.to_stderr)

    def act(wire: VirtualWire) -> Table:
        session = virtual(config, wire)
        session.optimizer.set_up()  # the replicas compare notes, and sizes are checked, before anything is written
        with contextlib.ExitStack() as stack:
            recorder = stack.enter_context(_recorder(session, out, screen)) if wire.replica == 0 else None
            summary = train_virtual(session, recorder, predicted)
            if recorder is not None:
                directory.write_json(out / directory.SUMMARY, summary)
        return summary

    with screen:
        return {**play(act, config.mesh.replicas)[0], "directory": str(out)}


def configured(request: Simulation) -> Config:
    """The whole configuration: replicas of one shard, and the batch of each where a total is asked for."""
    shards = parse_sets(request.overrides).get("mesh", {}).get("shards", 1)
    require(shards == 1, "mesh.shards", shards, "1 in a simulation, where each replica is whole")
    world = Request(request.recipe, request.overrides, replicas=request.replicas, shards=1)
    config = configure(world, None)
    if Auto.of(config) is not None:
        raise ValueError("scheme auto needs a link to measure, and a simulation has none: --set scheme.name=demo")
    require(len(config.levels) == 1, "scheme", config.schemes, "one level in a simulation")
    require(not config.mesh.link, "mesh.link", config.mesh.link, "'' in a simulation, where nothing is sent")
    return check(config if request.total_batch is None else share(config, request.total_batch))


def share(config: Config, total: int) -> Config:
    """`config` with a `batch_size` that makes `total` examples a step, validated on as many examples as before."""
    train, parts = config.train, config.mesh.replicas * config.train.accumulate
    what = f"a multiple of {parts} (replicas x train.accumulate), at least {parts}"
    require(total >= parts and total % parts == 0, "--total-batch", total, what)
    size = total // parts
    batches = -(-train.batch_size * train.validation_batches // size)
    return replace(config, train=replace(train, batch_size=size, validation_batches=batches))


def virtual(config: Config, wire: VirtualWire) -> Session:
    """What the replica at the end of `wire` needs for a run: a model, a memory and data of its own."""
    torch.manual_seed(config.seed)
    model = models.build(config.model.name, config.model.arguments)
    base = optimizers.build(config.optimizer, model)
    scheme = dt.scheme(config.scheme.name, config.scheme.arguments)
    optimizer = dt.replicate(base, model, wire, scheme, seed=config.seed, safety=safety(config))
    return Session(config, Alone(wire), torch.device("cpu"), load_data(config.data), model, base, optimizer)


def train_virtual(session: Session, recorder: Recorder | None = None, predicted: Cost | None = None) -> dict[str, Any]:
    """Trains one virtual replica to the end, telling `recorder` each step; returns the summary. Collective.

    Seconds are those of `predicted`, a step's on average; else what this machine took for all replicas together.
    """
    records: list[metrics.Record] = []
    add = recorder.add if recorder else records.append

    def report(record: metrics.Record) -> None:
        add(timed(record, predicted))

    fit(session, 0, session.config.train.steps, report, Stop())
    told = {"simulated": True, "seconds_predicted": predicted is not None}
    return {**summarise(session, recorder.records if recorder else records), **told}


def timed(record: metrics.Record, predicted: Cost | None) -> metrics.Record:
    """`record` with the seconds that are predicted. Without: while one replica waits here, the others compute."""
    if predicted is None:
        return replace(record, waited_s=0.0, step_s=0.0)
    waited = predicted.exposed_s
    return replace(record, seconds=predicted.total_s, waited_s=waited, step_s=predicted.step_s + waited)


@contextlib.contextmanager
def _recorder(session: Session, path: Path, screen: Screen) -> Iterator[Recorder]:
    """Keeps the steps, in a run directory that says what runs and is locked until the end."""
    with contextlib.closing(directory.RunDirectory(path)):
        directory.write_text(path / directory.CONFIG, toml.dumps(to_table(session.config)))
        directory.write_json(path / directory.ENVIRONMENT, environment())
        with contextlib.closing(Recorder(session, path, screen, done=0)) as recorder:
            yield recorder
