"""What each rank does in a run, from joining the others to the summary; rank 0 also keeps the run directory."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from detonation.checkpoint.gather import gather
from detonation.checkpoint.load.newest import Loaded
from detonation.cluster.init import device_here, expect
from detonation.cluster.processes.signals import Stop, stoppable
from detonation.core.link.link_speed import Pace
from detonation.core.replicator.channel import Channel
from detonation.core.schemes.traffic import message_bytes
from detonation.plan.spelling import spelled
from detonation.train.auto.adapt import Adapter, Followed
from detonation.train.auto.asked import Asked
from detonation.train.auto.decide import Chosen, again, decide
from detonation.train.loop import counts
from detonation.train.loop.checkpoints import opened, resume, save, save_now
from detonation.train.loop.fit import NonFiniteLoss, Stopped, fit
from detonation.train.loop.session import Session, start
from detonation.train.output import directory, metrics, trackers
from detonation.train.output.environment import environment
from detonation.train.output.gauges import Portion
from detonation.train.output.screen import Screen
from detonation.train.output.summary import summarise
from detonation.train.recipe import toml
from detonation.train.recipe.schema import Config, Table, from_table, to_table


@dataclasses.dataclass(frozen=True)
class Task:
    """What to run, in plain values that can travel to another process. `out` "" means a new directory in `runs`.

    may_start: `resume` starts from the beginning where no checkpoint was saved yet. asked: where the scheme is still to
    be chosen, how (`auto.Asked`); `config` then has another in its place.
    """

    config: Table
    name: str
    out: str = ""
    resume: bool = False
    may_start: bool = False
    stop_after: int = 0
    to_stderr: bool = False
    asked: Table | None = None


def work(task: Table) -> Table:
    """Runs a `Task`, given as a table, on this rank; returns its summary and, as `directory`, where the run lies.

    A run that `stop_after` or a signal ended has no summary: it returns `stopped_after`, `stopped_by` (the signal's
    name) and `directory` alone.
    """
    with stoppable() as stop:
        return _work(Task(**task), stop)


def _work(todo: Task, stop: Stop) -> Table:
    config, chosen = _chosen(todo)
    session = start(config, device_here())
    # The replicas compare notes, and sizes are checked, before anything is written.
    replicators = session.optimizer.set_up()
    _expect(session, [replicator.channel for replicator in replicators])
    screen = Screen(session.rank != 0, todo.to_stderr)
    stop.last_act = screen.wipe
    with _run_directory(session, todo, chosen) as path, screen:
        if chosen is not None:
            screen.line(chosen.line)
        checkpoints = path / directory.CHECKPOINTS
        loaded, told = resume(session, checkpoints, todo.may_start) if todo.resume else (None, [])
        done = loaded.step if loaded else 0
        before = counts.saved(loaded.extra if loaded else {})
        adapter, more = _adapter(session, todo, chosen, loaded)
        with contextlib.closing(Recorder(session, path, screen, done, before)) as recorder:
            for line in (*told, *more):
                screen.line(line)
            return _train(session, path, recorder, done, todo.stop_after, stop, adapter)


def _chosen(todo: Task) -> tuple[Config, Chosen | None]:
    """The configuration, and how its scheme was chosen where that was asked for and had not been done before."""
    if todo.asked is None:
        return from_table(todo.config), None
    asked, out = Asked.of(todo.asked), Path(todo.out) if todo.resume and todo.out else None
    before = again(asked, out, device_here())
    if before is not None:
        return before, None
    chosen = decide(asked, device_here())
    return chosen.config, chosen


def _adapter(
    session: Session, todo: Task, chosen: Chosen | None, loaded: Loaded | None
) -> tuple[Adapter | None, list[str]]:
    """What follows the link, where the run asks for it: from what was measured at its start, or saved since."""
    if todo.asked is None or not Asked.of(todo.asked).auto.adapt:
        return None, []
    if session.device.type != "cpu":
        return None, ["adapt: on accelerators the host does not see how long an exchange takes; the setting stays"]
    if chosen is not None:
        return Adapter(session, chosen.followed), []
    saved = loaded.extra.get("followed") if loaded else None
    if saved is None:
        return None, ["adapt: this run began without it, and keeps its setting"]
    return Adapter(session, Followed.of(saved, session.config.mesh.replicas, session.config.mesh.shards)), []


def _expect(session: Session, channels: Sequence[Channel]) -> None:
    """Says how long to wait for other ranks, by what the largest message takes at the lowest rate."""
    config, (_, scheme) = session.config, session.optimizer.levels[0]
    largest = max((message_bytes(scheme, c.layout, config.mesh.replicas) for c in channels), default=0)
    rate = config.peers.lowest_bits_per_s
    if config.mesh.link:
        rate = min(rate, Pace.parse(config.mesh.link).rate_bits_per_s)
    expect(largest, config.mesh.shards, config.peers.silence_s, rate)


class Recorder:
    """Keeps every step's record; rank 0 also writes it down, and shows the ones to be logged.

    done: steps of earlier starts; before: what they went on without.
    """

    def __init__(
        self, session: Session, path: Path, screen: Screen, done: int, before: counts.Counts = counts.NOTHING
    ) -> None:
        self.before = before
        self._train, self._screen = session.config.train, screen
        self._full_sync = session.world.over_shards(session.optimizer.dense_bytes)
        file = path / directory.METRICS
        self.records = [record for record in (metrics.read(file) if done else []) if record.step <= done]
        if done:
            dist.barrier()  # all have read before rank 0 writes
        self._loggers: list[trackers.Logger] = []
        self._logged = len(self.records)
        screen.line(_title(session, path))
        if session.rank == 0:
            self._loggers = [metrics.MetricsFile(file, self.records)]
            self._loggers += trackers.opened(path, session.config, done, lambda line: self.warn([line]))
        screen.start(done, self._train.steps, portion(session))

    def add(self, record: metrics.Record) -> None:
        """Takes in the record of one more step."""
        self.records.append(record)
        for logger in self._loggers:
            logger.write(record)
        self._screen.advance(record)
        if record.step % self._train.log_every == 0 or record.val_loss is not None:
            self._screen.line(metrics.log_line(self.records[self._logged :], self._train.steps, self._full_sync))
            self._logged = len(self.records)

    def warn(self, lines: Sequence[str]) -> None:
        """Shows what went wrong and does not stop the run."""
        for line in lines:
            self._screen.line(f"warning: {line}; training goes on")

    def tell(self, lines: Sequence[str]) -> None:
        """Shows what has changed in the run."""
        for line in lines:
            self._screen.line(line)

    def close(self) -> None:
        """Closes the metrics file and the loggers."""
        for logger in reversed(self._loggers):  # the metrics file last: it raises where the disk is full
            logger.close()


def _train(
    session: Session, path: Path, recorder: Recorder, done: int, stop_after: int, stop: Stop, adapter: Adapter | None
) -> Table:
    steps = session.config.train.steps
    until = max(done, min(steps, stop_after or steps))
    checkpoints = opened(session, path / directory.CHECKPOINTS)

    def followed() -> Table | None:
        return None if adapter is None else adapter.followed.table()

    def after_step(record: metrics.Record) -> None:
        told = [] if adapter is None else adapter.after(record)
        if told:
            _expect(session, [replicator.channel for replicator in session.optimizer.built()])
            record = dataclasses.replace(record, setting=spelled(session.optimizer.levels[-1][1]))
        recorder.add(record)
        recorder.tell(told)
        recorder.warn(checkpoints.news())
        every = session.config.train.checkpoint_every
        if every and record.step % every == 0 and record.step < until:
            save(session, checkpoints, recorder.before, followed())

    try:
        fit(session, done, until, after_step, stop)
    except NonFiniteLoss as error:
        saved = save_now(session, checkpoints, recorder.before, followed())
        raise NonFiniteLoss(f"{error}; the state before that step is saved in {saved}") from error
    except Stopped as stopped:
        save_now(session, checkpoints, recorder.before, followed())
        return {"stopped_after": stopped.after, "stopped_by": stopped.signal, "directory": str(path)}
    save_now(session, checkpoints, recorder.before, followed())
    recorder.warn(checkpoints.news())
    if until < steps:
        return {"stopped_after": until, "stopped_by": "--stop-after", "directory": str(path)}
    summary = summarise(session, recorder.records, recorder.before)
    if session.rank == 0:
        directory.write_json(path / directory.SUMMARY, summary)
    return {**summary, "directory": str(path)}


def _title(session: Session, path: Path) -> str:
    config, numel = session.config, sum(parameter.numel() for parameter in session.model.parameters())
    world = f"{config.mesh.replicas} replicas x {config.mesh.shards} shards"
    what = f"{config.model.name} with {numel:,} parameters on {session.data.name}"
    return f"{config.schemes} over {world}: {what}, in {path}"


def portion(session: Session) -> Portion:
    """What all ranks together take in at one step: tokens of text, or whole examples."""
    train, data = session.config.train, session.data
    examples = train.batch_size * train.accumulate * session.world_size
    if data.kind == "text":
        return Portion(examples * data.train[torch.tensor([0])]["input_ids"].shape[1], "tokens")
    return Portion(examples, "images" if data.kind == "images" else "pairs")


@contextlib.contextmanager
def _run_directory(session: Session, todo: Task, chosen: Chosen | None) -> Iterator[Path]:
    """The run's directory, the same on all ranks; rank 0 makes it, writes down what runs, and holds its lock."""
    held = None
    if session.rank == 0:
        path = Path(todo.out) if todo.out else fresh_directory(f"{todo.name}-{session.config.schemes}")
        directory.check_free(path, todo.resume, todo.may_start)
        held = directory.RunDirectory(path)
        directory.write_text(path / directory.CONFIG, toml.dumps(to_table(session.config)))
        directory.write_json(path / directory.ENVIRONMENT, environment())
        if chosen is not None:
            directory.write_json(path / directory.PLAN, chosen.plan)
    try:
        yield Path(gather(str(held.path) if held else "", session.device)[0])
    finally:
        if held is not None:
            held.close()


def fresh_directory(name: str) -> Path:
    """A directory of `runs` that is not there yet."""
    now = time.time()
    while (path := Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}").exists():
        now += 1
    return path
