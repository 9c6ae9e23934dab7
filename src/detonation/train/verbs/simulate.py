"""`detonation simulate`: trains many replicas in one process, with the same code as real runs."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from detonation.checkpoint.verify import load_weights
from detonation.cluster.network.simulated import SimulatedCommunicator, simulate_replicas
from detonation.cluster.processes.signals import Stop
from detonation.train.choice.asked import Auto
from detonation.train.loop.checks import check_config, load_data
from detonation.train.loop.fit import fit
from detonation.train.loop.session import Session, replicated_run, seeded_model
from detonation.train.loop.summary import summarise
from detonation.train.loop.world import Alone
from detonation.train.output import directory, metrics, screen, trackers
from detonation.train.recipe import optimizers
from detonation.train.recipe.resolve import parse_sets, read_layers
from detonation.train.recipe.schema import Config, Table, require
from detonation.train.recipe.tables import to_table
from detonation.train.run.recorder import Recorder

_LEFT_OUT = {
    "mesh": ("elastic", "slow_backend"),
    "train": ("publish", "log_updates", "checkpoint_every", "compile", "checkpoint_activations"),
}
"""Settings that a simulation ignores, because it has no network, no checkpoints and no compiled
layers.
"""


@dataclass(frozen=True)
class Simulation:
    """A user's command; its fields are named after the flags of `detonation simulate`.

    Args:
        total_batch: Examples per step over all replicas; None for `train.batch_size` per replica.
    """

    recipe: Path
    overrides: tuple[str, ...] = ()
    replicas: int | None = None
    total_batch: int | None = None
    out: Path | None = None
    to_stderr: bool = False


def simulate(request: Simulation) -> Table:
    """Trains in this process. Returns the summary and, as `directory`, the path of the run.

    The result equals, bit for bit, the result of a real run with equally many replicas of one
    shard. There is one exception: a network that adds more than two messages may add them in
    another order. Raises `ValueError` for bad input before it writes any file.
    """
    config = configured(request)
    trackers.check_trackers(config.train.loggers)
    if request.out is not None:
        directory.check_free(request.out, resume=False)
    terminal = screen.Screen(silent=False, to_stderr=request.to_stderr)
    tables = to_table(config)
    left_out = [
        f"{table}.{key}"
        for table, keys in _LEFT_OUT.items()
        for key in keys
        if tables[table].get(key)
    ]
    if left_out:
        terminal.line(f"not simulated: {', '.join(left_out)}")

    def act(communicator: SimulatedCommunicator) -> Table:
        show = None
        if communicator.replica == 0:
            show = terminal.line
        session = virtual(config, communicator, show)
        # compare the schemes of the replicas and check sizes before any file is written
        session.optimizer.set_up()
        if communicator.replica:
            return train_virtual(session, None)
        name = f"{request.recipe.stem}-{config.scheme.name}-{config.mesh.replicas}"
        out = request.out or directory.fresh_directory(name)
        with contextlib.closing(directory.RunDirectory(out)):
            directory.begin_run(out, to_table(session.config))
            with contextlib.closing(Recorder(session, out, terminal, done=0)) as recorder:
                summary = train_virtual(session, recorder)
                directory.write_json(out / directory.SUMMARY, summary)
        return {**summary, "directory": str(out)}

    with terminal:
        return simulate_replicas(act, config.mesh.replicas)[0]


def configured(request: Simulation) -> Config:
    """Returns the checked configuration. Each replica has one shard, and computes its share of the
    `total_batch` examples.
    """
    shards = parse_sets(request.overrides).get("mesh", {}).get("shards", 1)
    require(shards == 1, "mesh.shards", shards, "1 in a simulation, where each replica is whole")
    mesh = {"replicas": request.replicas}
    config = read_layers(request.recipe, request.overrides, mesh=mesh).config()
    nodes = [*config.mesh.nodes]
    require(not nodes, "mesh.nodes", nodes, "left out in a simulation of whole replicas")
    config = replace(config, mesh=replace(config.mesh, shards=1))
    if Auto.of(config) is not None:
        raise ValueError(
            "scheme auto needs a link to measure, and a simulation has none: --set scheme.name=demo"
        )
    require(len(config.levels) == 1, "scheme", config.schemes, "one level in a simulation")
    link = config.mesh.link
    require(not link, "mesh.link", link, "'' in a simulation, where nothing is sent")
    allowed = "False in a simulation, whose replicas compute in turns"
    require(not config.train.balance, "train.balance", True, allowed)
    if request.total_batch is not None:
        config = batch_share(config, request.total_batch)
    return check_config(config)


def batch_share(config: Config, total: int) -> Config:
    """Returns `config` with a `batch_size` for which all replicas together have `total` examples
    per step.

    Validation uses at least as many examples as with `config`.
    """
    train = config.train
    parts = config.mesh.replicas * config.train.accumulate
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
    """Builds the session of one simulated replica. Each replica has its own model, memory of unsent
    values, and data.

    Args:
        show: Called with a line about the initial weights.
    """
    model = seeded_model(config)
    if config.train.init_from:
        begin = load_weights(Path(config.train.init_from), model)
        if show is not None:
            show(begin)
    base = optimizers.build_optimizer(config.optimizer, model)
    optimizer = replicated_run(config, base, model, [communicator])
    world = Alone(communicator)
    cpu = torch.device("cpu")
    return Session(config, world, cpu, load_data(config.data), model, base, optimizer)


def train_virtual(session: Session, recorder: Recorder | None = None) -> dict[str, Any]:
    """Trains one simulated replica to the end of the run. Returns the summary. Collective.

    Args:
        recorder: Receives the record of each step.
    """
    records: list[metrics.Record] = []

    def report(record: metrics.Record) -> None:
        # Waiting times have no meaning here: other replicas compute while one replica waits.
        record = replace(record, waited_s=0.0, step_s=0.0)
        if recorder is None:
            records.append(record)
        else:
            recorder.add(record)

    _share_steps(session)
    fit(session, 0, session.config.train.steps, report, Stop())
    if recorder is not None:
        records = recorder.records
    summary = summarise(session, records)
    summary.pop("waits", None)  # the waiting times have no meaning in a simulation
    return {**summary, "simulated": True}


def _share_steps(session: Session) -> None:
    """Shares the first replica's weights with all replicas, if the scheme exchanges at each step.

    From then on, the first replica decodes messages and steps for all replicas. Each replica would
    compute the same weights, because all replicas start with equal weights and receive equal
    messages, as digests of these messages prove. Collective.
    """
    replicators = session.optimizer.set_up()
    ((axis, scheme),) = session.optimizer.levels
    if scheme.signal != "gradients" or not isinstance(axis, SimulatedCommunicator):
        return
    axis.together([*session.model.parameters()], _share_weights)
    channel: Any = replicators[0].channel
    write = channel.engine.write
    step = session.base.step

    def write_once(*update: Any) -> Any:
        return axis.together(partial(write, *update), lambda writes: writes[0]())

    # clipping reads the update of every replica, so each replica must write its own update
    if session.optimizer.base_step.clip is None:
        channel.engine.write = write_once
    session.base.step = lambda: axis.together((session.base, step), _step)  # type: ignore


def _share_weights(weights: Sequence[Sequence[torch.Tensor]]) -> None:
    for first, *others in zip(*weights, strict=True):
        for other in others:
            other.data = first.data


def _step(brought: Sequence[tuple[torch.optim.Optimizer, Callable[[], Any]]]) -> None:
    """Runs the step of the first replica, and copies the state of its optimizer to all other
    replicas.
    """
    (first, step), *others = brought
    step()
    if not first.state:
        return
    for base, _ in others:
        for mine, group in zip(base.param_groups, first.param_groups, strict=True):
            pairs = zip(mine["params"], group["params"], strict=True)
            base.state.update({p: first.state[q] for p, q in pairs if q in first.state})
