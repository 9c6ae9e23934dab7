"""`detonation simulate`: any number of replicas, trained in one process by the code that trains
real ones."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tomli_w
import torch

from detonation.checkpoint.verify import load_weights
from detonation.cluster.network.simulated import SimulatedCommunicator, simulate_replicas
from detonation.cluster.processes.signals import Stop
from detonation.train.loop.fit import fit
from detonation.train.loop.session import (
    Session,
    check_config,
    load_data,
    replicated_run,
    seeded_model,
)
from detonation.train.loop.summary import summarise
from detonation.train.loop.world import Alone
from detonation.train.output import directory, metrics, trackers
from detonation.train.output.directory import environment
from detonation.train.output.screen import Screen
from detonation.train.recipe import optimizers
from detonation.train.recipe.resolve import parse_sets, read_layers
from detonation.train.recipe.schema import Config, Table, require
from detonation.train.recipe.tables import to_table
from detonation.train.run.decide import Auto
from detonation.train.run.recorder import Recorder

_LEFT_OUT = {
    "mesh": ("elastic", "slow_backend"),
    "train": ("publish", "log_updates", "checkpoint_every", "compile", "checkpoint_activations"),
}
"""Settings that a simulation has nothing for: it has no network, no checkpoints and no compiled
layers."""


@dataclass(frozen=True)
class Simulation:
    """A simulation that a user asks for; the fields are named like the flags of `detonation
    simulate`.

    total_batch: Examples per step over all replicas; `train.batch_size` for each replica when None.
    """

    recipe: Path
    overrides: tuple[str, ...] = ()
    replicas: int | None = None
    total_batch: int | None = None
    out: Path | None = None
    to_stderr: bool = False


def simulate(request: Simulation) -> Table:
    """Trains in this process; returns the summary and, as `directory`, the path of the run.

    It equals a real run of as many replicas of one shard each, bit for bit, except where a network
    sums more than two numbers in another order. Raises `ValueError` for bad input before anything
    is written.
    """
    config = configured(request)
    trackers.check_trackers(config.train.loggers)
    if request.out is not None:
        directory.check_free(request.out, resume=False)
    screen = Screen(silent=False, to_stderr=request.to_stderr)
    tables = to_table(config)
    left_out = [
        f"{table}.{key}"
        for table, keys in _LEFT_OUT.items()
        for key in keys
        if tables[table].get(key)
    ]
    if left_out:
        screen.line(f"not simulated: {', '.join(left_out)}")

    def act(communicator: SimulatedCommunicator) -> Table:
        session = virtual(config, communicator, None if communicator.replica else screen.line)
        # replicas compare their schemes, and sizes are checked, before anything is written
        session.optimizer.set_up()
        if communicator.replica:
            return train_virtual(session, None)
        name = f"{request.recipe.stem}-{config.scheme.name}-{config.mesh.replicas}"
        out = request.out or directory.fresh_directory(name)
        with contextlib.closing(directory.RunDirectory(out)):
            directory.write_text(out / directory.CONFIG, tomli_w.dumps(to_table(session.config)))
            directory.write_json(out / directory.ENVIRONMENT, environment())
            with contextlib.closing(Recorder(session, out, screen, done=0)) as recorder:
                summary = train_virtual(session, recorder)
                directory.write_json(out / directory.SUMMARY, summary)
        return {**summary, "directory": str(out)}

    with screen:
        return simulate_replicas(act, config.mesh.replicas)[0]


def configured(request: Simulation) -> Config:
    """The whole configuration: replicas of one shard, and the batch of each where a total is given."""
    shards = parse_sets(request.overrides).get("mesh", {}).get("shards", 1)
    require(shards == 1, "mesh.shards", shards, "1 in a simulation, where each replica is whole")
    config = read_layers(
        request.recipe, request.overrides, mesh={"replicas": request.replicas}
    ).config()
    require(
        not config.mesh.nodes,
        "mesh.nodes",
        [*config.mesh.nodes],
        "left out in a simulation of whole replicas",
    )
    config = replace(config, mesh=replace(config.mesh, shards=1))
    if Auto.of(config) is not None:
        raise ValueError(
            "scheme auto needs a link to measure, and a simulation has none: --set scheme.name=demo"
        )
    require(len(config.levels) == 1, "scheme", config.schemes, "one level in a simulation")
    require(
        not config.mesh.link,
        "mesh.link",
        config.mesh.link,
        "'' in a simulation, where nothing is sent",
    )
    require(
        not config.train.balance,
        "train.balance",
        True,
        "False in a simulation, whose replicas compute in turns",
    )
    return check_config(
        config if request.total_batch is None else batch_share(config, request.total_batch)
    )


def batch_share(config: Config, total: int) -> Config:
    """`config` with a `batch_size` that makes `total` examples per step, validated on as many
    examples as before."""
    train, parts = config.train, config.mesh.replicas * config.train.accumulate
    allowed = f"a multiple of {parts} (replicas x train.accumulate), at least {parts}"
    require(total >= parts and total % parts == 0, "--total-batch", total, allowed)
    size = total // parts
    batches = -(-train.batch_size * train.validation_batches // size)
    return replace(config, train=replace(train, batch_size=size, validation_batches=batches))


def virtual(
    config: Config,
    communicator: SimulatedCommunicator,
    show: Callable[[str], object] | None = None,
) -> Session:
    """The session of one virtual replica: a model, a memory and data of its own.

    show: Takes a line about the weights that it begins with.
    """
    model = seeded_model(config)
    if config.train.init_from:
        begin = load_weights(Path(config.train.init_from), model)
        if show is not None:
            show(begin)
    base = optimizers.build_optimizer(config.optimizer, model)
    optimizer = replicated_run(config, base, model, [communicator])
    return Session(
        config,
        Alone(communicator),
        torch.device("cpu"),
        load_data(config.data),
        model,
        base,
        optimizer,
    )


def train_virtual(session: Session, recorder: Recorder | None = None) -> dict[str, Any]:
    """Trains one virtual replica to the end; `recorder` takes in each step.

    Returns the summary. Collective.
    """
    records: list[metrics.Record] = []
    add = recorder.add if recorder else records.append

    def report(record: metrics.Record) -> None:
        add(replace(record, waited_s=0.0, step_s=0.0))  # other replicas compute while one waits

    _share_steps(session)
    fit(session, 0, session.config.train.steps, report, Stop())
    summary = summarise(session, recorder.records if recorder else records)
    summary.pop("waits", None)  # of replicas that compute in turns
    return {**summary, "simulated": True}


def _share_steps(session: Session) -> None:
    """Lets replicas that agree at every step share the weights of the first, which decodes and
    steps for all.

    They begin alike and receive the same messages, as the digests in these tell, so each would do
    the same. Collective.
    """
    replicators, ((axis, scheme),) = session.optimizer.set_up(), session.optimizer.levels
    if scheme.signal != "gradients" or not isinstance(axis, SimulatedCommunicator):
        return
    axis.together([*session.model.parameters()], _share_weights)
    channel: Any = replicators[0].channel
    write, step = channel.engine.write, session.base.step
    if session.optimizer.base_step.clip is None:  # which looks at the update of each
        channel.engine.write = lambda *update: axis.together(
            partial(write, *update), lambda writes: writes[0]()
        )
    session.base.step = lambda: axis.together((session.base, step), _step)  # type: ignore


def _share_weights(weights: Sequence[Sequence[torch.Tensor]]) -> None:
    for first, *others in zip(*weights, strict=True):
        for other in others:
            other.data = first.data


def _step(brought: Sequence[tuple[torch.optim.Optimizer, Callable[[], Any]]]) -> None:
    """Takes the step of the first replica, and shares the state of its optimizer."""
    (first, step), *others = brought
    step()
    for base, _ in others if first.state else ():
        for mine, group in zip(base.param_groups, first.param_groups, strict=True):
            pairs = zip(mine["params"], group["params"], strict=True)
            base.state.update({p: first.state[q] for p, q in pairs if q in first.state})
