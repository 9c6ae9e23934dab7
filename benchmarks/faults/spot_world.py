"""Machines that come and go, as processes: replicas that train, and the conductor that starts and ends them.

Each machine is one replica, forked from a process that has imported torch once. It takes steps of a
tiny model all the time, and writes a line after each (`spot_machine`). With `stores` some machines
also keep a store, which ends with them. Once most stores of a world are lost, all its machines end,
and those that are there begin anew, with other stores.

Checkpoints and the log of updates are in one place, which outlives all machines: a world that starts from nothing loads
the newest checkpoint, and takes the steps of the log after it again.
"""

import os
import random
import signal
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.faults.forks import Fork
from benchmarks.faults.spot_machine import (
    BATCH,
    POLL_S,
    SCHEMES,
    WARM,
    forked,
    keep_store,
    made,
    train,
)

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.log.continuity import log_files


class Broken(RuntimeError):
    """A replica ended that should train, or does not go on."""


@dataclass(frozen=True)
class Event:
    """The number of machines changes at `at` seconds of the trace, and stays until `until`. noticed: those that go."""

    at: float
    before: int
    after: int
    until: float
    noticed: bool = False

    @property
    def kind(self) -> str:
        if self.before < self.after:
            return "join" if self.before else "start"
        return ("notice" if self.noticed else "kill") + ("" if self.after else ", all gone")


@dataclass
class Outcome:
    """What an event did. Seconds are real ones.

    until_s: from the event until all that are there have taken a step together; where all go, until all have ended.
    stalled_s: the same without the ordinary steps that the slowest took meanwhile. longest_s: the longest step of those
    that were there before, above an ordinary one. came_s: of each newcomer, until its first step. left_s: until the
    last that had a notice has ended. lost_steps: those that no message or log has, whose batches will be drawn again.
    saved_at: second of the trace at which the newest checkpoint was saved. replayed: steps that a start took from the
    log, in at most replay_s. checked: changes of numbers over which the sum of memories was compared. stores: of the
    world after it, those that are left, and all of its start. anew: all ended with most of the stores, and those that
    are there began anew. whole, short: steps in which machines had each example once, and those that lack some because
    a machine was killed in them. step, loss: of the last step.
    """

    kind: str
    at: float
    before: int
    after: int
    until: float
    until_s: float = 0.0
    ordinary_s: float = 0.0
    stalled_s: float = 0.0
    longest_s: float = 0.0
    came_s: list[float] = field(default_factory=list)
    left_s: float = 0.0
    lost_steps: int = 0
    saved_at: float | None = None
    replayed: int = 0
    replay_s: float = 0.0
    checked: int = 0
    stores: tuple[int, int] = (0, 0)
    anew: bool = False
    whole: int = 0
    short: int = 0
    step: int = 0
    loss: float = 0.0
    unequal: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    broken: str = ""


@dataclass(frozen=True)
class Line:
    """One step of a replica: when it ended, its number, the number of replicas, the digest of the weights, the examples
    that the replica computed, and the loss after it.
    """

    moment: float
    step: int
    replicas: int
    digest: str
    examples: range
    loss: float


def seconds_of_a_replayed_step(scheme: str, machines: int, steps: int = 300) -> float:
    """The seconds in which each of `machines` takes one step of a log again, all of them at once."""

    def alike() -> tuple[torch.nn.Module, Any]:
        model = made()
        base = dt.SignSGD(model.parameters(), lr=1e-3)
        return model, dt.replicate(base, model, LoopbackCommunicator(machines), SCHEMES[scheme])

    def replay(path: Path, to: int) -> None:
        dt.replay(path, alike()[1], to=to)

    with tempfile.TemporaryDirectory(prefix="spot-") as folder:
        path, (model, optimizer) = Path(folder), alike()
        optimizer.record(dt.UpdateLog(path / "updates"))
        for _ in range(steps):
            model(torch.rand(4, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        taken = []
        for to in (steps // 3, steps):
            began = time.monotonic()
            pids = [
                forked(lambda to=to: replay(path / "updates", to), path / "error")
                for _ in range(machines)
            ]
            if sum(os.waitpid(pid, 0)[1] for pid in pids):
                raise Broken((path / "error").read_text())
            taken.append(time.monotonic() - began)
    return (taken[1] - taken[0]) / (steps - steps // 3)


def memory_law(folder: Path, lossless: bool) -> tuple[int, list[str]]:
    """How many changes of the number of replicas were compared, and those over which their mean memory changed.

    A change without the memories of all replicas before it had a loss. Without `lossless` it is passed over.
    """
    checked, forgotten = 0, []
    for step in sorted({int(path.name.partition("-")[0]) for path in folder.glob("*-after-*.npy")}):
        was, now = ([*folder.glob(f"{step}-{side}-*.npy")] for side in ("before", "after"))
        sizes = [int(paths[0].name.split("-")[2]) for paths in (was, now)]
        if len(was) != sizes[0]:
            forgotten += [
                f"step {step}: {len(was)} of {sizes[0]} memories were handed over"
            ] * lossless
            continue
        means = [
            sum(np.load(path).astype(float) for path in paths) / size
            for paths, size in zip((was, now), sizes, strict=True)
        ]
        checked += 1
        if not np.allclose(*means, rtol=1e-4, atol=1e-5):
            forgotten.append(
                f"step {step}: {np.abs(means[0] - means[1]).max():.2e} of {np.abs(means[0]).max():.2e}"
            )
    for path in folder.glob("*.npy"):
        path.unlink()
    return checked, forgotten


class Machine(Fork):
    """One process that trains, and, on a host of a store, the `store`, a process that ends with it."""

    def __init__(
        self, name: str, folder: Path, act: Callable[[], None], store: Fork | None = None
    ) -> None:
        self.store = store
        self.name, self.file, self.lines = name, folder / f"{name}.steps", list[Line]()
        self._error, self._read, self.noted = folder / f"{name}.error", 0, 0
        self.began = time.monotonic()
        self.pid = forked(act, self._error)

    def look(self) -> list[Line]:
        """All lines so far."""
        if self.file.exists():
            with self.file.open("rb") as file:
                file.seek(self._read)
                text = file.read()
            text = text[: text.rfind(b"\n") + 1]
            self._read += len(text)
            for line in text.decode().splitlines():
                moment, step, replicas, found, start, stop, loss = line.split()
                part = range(int(start), int(stop))
                self.lines.append(
                    Line(float(moment), int(step), int(replicas), found, part, float(loss))
                )
        return self.lines

    def kill(self) -> None:
        """Ends the machine with all that it runs."""
        super().kill()
        if self.store is not None:
            self.store.kill()

    def has_ended(self) -> bool:
        return self.poll() is not None

    def error(self) -> str:
        return self._error.read_text() if self._error.exists() else f"code {self.code}"


class StoreFork(Fork):
    """A process that keeps a store, and listens at `address`."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
            self.pid = forked(lambda: keep_store(listener), folder / "store.error")


class Conductor:
    """Lets machines come and go by events, and measures each. A context: all its processes end with it.

    Args:
        folder: For files of this run, which must be empty or new.
        checkpoint_s: Seconds of the trace between checkpoints.
        settle: Steps between two events.
        pace_s: Seconds for which a machine stands still in each step.
        limit_s: An event that takes longer is counted as broken.
        stores: The largest number of machines of a world that keep a store, an odd one; 0 for one store on a machine
            that never goes. A world has as many as the machines that begin it allow.
        seed: Draws the data.
    """

    def __init__(
        self,
        folder: Path,
        scheme: str = "demo",
        checkpoint_s: float = 600,
        settle: int = 3,
        pace_s: float = 0.05,
        limit_s: float = 120,
        stores: int = 0,
        seed: int = 0,
    ) -> None:
        exec(WARM, {})  # once, for all that are forked
        for name in (
            "Admission",
            "Guest",
            "admitted",
            "elastic",
            "load_checkpoint",
            "replicate",
            "save_checkpoint",
        ):
            getattr(dt, name)
        self._pace_s = pace_s
        self._folder, self._scheme, self._settle, self._limit_s = folder, scheme, settle, limit_s
        self._checkpoint_s = checkpoint_s
        self._alive: list[Machine] = []
        self._hosts, self._seed = stores, seed
        self._stores: list[StoreFork] = []
        self._parts: dict[int, list[range]] = {}
        self._count = 0
        self._saved: tuple[int, str] | None = None
        self._saved_at: float | None = None
        self._seen: dict[int, str] = {}

    def __enter__(self) -> "Conductor":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def handle(self, event: Event, rng: random.Random) -> Outcome:
        """Does what happens at `event`, and takes some steps of the time until the next one."""
        outcome = Outcome(event.kind, event.at, event.before, event.after, event.until)
        try:
            if event.before and len(self._alive) != event.before:  # after an interruption
                self._start(event.before)
                self._steps_on(2 * self._settle)
                self._save()
            self._change(event, outcome, rng)
            if event.after:
                self._steps_on(self._settle)
                if (mark := last_mark(event.until, self._checkpoint_s)) > event.at:
                    self._save()
                    self._saved_at = mark
                self._steps_on(self._settle)
            lossless = event.kind in ("join", "notice", "start")
            outcome.checked, outcome.forgotten = memory_law(self._folder, lossless)
            outcome.unequal += self._compare()
            self._judge_parts(outcome, self._alive)
        except Broken as error:
            outcome.broken = str(error)
            self._end()
        outcome.saved_at = self._saved_at
        outcome.stores = sum(each.poll() is None for each in self._stores), len(self._stores)
        return outcome

    def undisturbed(self, replicas: int, steps: int) -> float:
        """The loss after `steps` steps of `replicas` of which none goes."""
        self._start(replicas)
        self._wait(lambda: self._alive[0].look()[-1].step >= steps, "take steps")
        return next(line.loss for line in self._alive[0].lines if line.step == steps)

    def _change(self, event: Event, outcome: Outcome, rng: random.Random) -> None:
        stay, going = list(self._alive), list[Machine]()
        if event.after < event.before:
            going = rng.sample(self._alive, event.before - event.after)
            stay = [machine for machine in self._alive if machine not in going]
        marks = {machine: len(machine.look()) for machine in stay}
        outcome.ordinary_s = ordinary(self._alive)
        self._alive = stay
        began = time.monotonic()
        if event.kind == "start":
            self._start(event.after)
            outcome.unequal += self._compare_loaded(outcome)
        elif event.kind == "join":
            self._alive = stay + [self._machine(-1, 0) for _ in range(event.after - event.before)]
        else:
            for machine in going:
                if event.noticed:
                    os.kill(machine.pid, signal.SIGTERM)
                else:
                    machine.kill()
        if event.noticed:
            self._wait(lambda: all(machine.has_ended() for machine in going), "leave")
            outcome.left_s = time.monotonic() - began
            if problems := [
                f"{machine.name}: {machine.error()}" for machine in going if machine.code
            ]:
                raise Broken(f"asked to leave, {problems}")
            for machine in going:
                machine.kill()  # its store, too
        outcome.unequal += [text for machine in going for text in self._note(machine)]
        if event.after and going and self._most_stores_are_lost():
            self._begin_anew(event, outcome, [*going, *stay], began)
            return
        if not event.after:
            outcome.until_s = time.monotonic() - began
            outcome.lost_steps = self._all_gone(going, event)
            self._judge_parts(outcome, going)
            return
        self._wait(
            lambda: all(self._first(machine, event.after) for machine in self._alive), event.kind
        )
        firsts = {machine: self._first(machine, event.after) for machine in self._alive}
        end = max(line.moment for line in firsts.values() if line)
        outcome.until_s = end - began
        outcome.came_s = [each.lines[0].moment - began for each in self._alive if each not in marks]
        taken, longest = [], [0.0]
        for machine, mark in marks.items():
            moments = [began if mark == 0 else machine.lines[mark - 1].moment]
            moments += [line.moment for line in machine.lines[mark:] if line.moment <= end]
            taken.append(len(moments) - 1)
            longest += [after - before - outcome.ordinary_s for before, after in pairwise(moments)]
        outcome.longest_s = max(longest)
        outcome.stalled_s = max(0.0, outcome.until_s - min(taken, default=0) * outcome.ordinary_s)
        outcome.lost_steps = sum(
            after.step - before.step - 1
            for machine in self._alive
            for before, after in pairwise(machine.lines)
        )

    def _most_stores_are_lost(self) -> bool:
        return 2 * sum(each.poll() is None for each in self._stores) < len(self._stores)

    def _begin_anew(
        self, event: Event, outcome: Outcome, known: Sequence[Machine], began: float
    ) -> None:
        """All that are left end, each by itself, and begin a world with other stores."""
        left, self._alive = self._alive, []
        self._wait(lambda: all(machine.has_ended() for machine in left), "end with the stores")
        outcome.anew = True
        outcome.lost_steps = self._all_gone(known, event, saves=False)
        for machine in left:
            if "ReplicaLost" not in machine.error():
                raise Broken(f"{machine.name}, without a store: {machine.error()}")
        self._judge_parts(outcome, left)
        self._start(event.after)
        outcome.unequal += self._compare_loaded(outcome)
        self._wait(
            lambda: all(self._first(machine, event.after) for machine in self._alive), event.kind
        )
        outcome.until_s = time.monotonic() - began

    @staticmethod
    def _first(machine: Machine, replicas: int) -> Line | None:
        """The step with which `machine` came to its present world of `replicas`."""
        found = None
        for line in reversed(machine.look()):
            if line.replicas != replicas:
                break
            found = line
        return found

    def _start(self, replicas: int) -> None:
        """A world with a store of its own, which goes on from the newest checkpoint."""
        self._end()
        hosts = min(self._hosts, replicas)
        if hosts and hosts % 2 == 0:
            hosts -= 1
        self._stores = [StoreFork(self._folder) for _ in range(max(1, hosts))]
        kept = [*self._stores[:hosts], *[None] * (replicas - hosts)]
        for replica in range(replicas):
            self._alive.append(self._machine(replica, replicas, kept[replica]))
        self._wait(lambda: all(machine.look() for machine in self._alive), "start")

    def _machine(self, replica: int, replicas: int, store: Fork | None = None) -> Machine:
        self._count += 1
        name, folder = f"machine{self._count}", self._folder
        addresses = ",".join(each.address for each in self._stores)

        def act() -> None:
            more = self._scheme, self._pace_s, self._seed
            train(folder, addresses, name, replica, replicas, *more)

        return Machine(name, folder, act, store)

    def _save(self) -> None:
        """All save between two of the next steps, and wait until all have."""
        order = self._folder / "save"
        order.write_text("1")
        files = [self._folder / f"{machine.name}.saved" for machine in self._alive]
        self._wait(lambda: all(file.exists() and file.read_text() for file in files), "save")
        said = {file.read_text() for file in files}
        for file in files:
            file.unlink()
        order.unlink()
        if len(said) > 1:
            raise Broken(f"checkpoints of different states: {said}")
        _, name, found = said.pop().split()
        self._saved = int(name.rpartition("-")[2]), found

    def _all_gone(self, gone: Sequence[Machine], event: Event, saves: bool = True) -> int:
        """The steps that are lost with the last machines, none after a notice; the next begin after the others.

        saves: After a notice they have saved a checkpoint.
        """
        saves = saves and event.noticed
        for machine in gone:
            self._note(machine)
        last = max(machine.lines[-1].step for machine in gone if machine.lines)
        manifests = (self._folder / "checkpoints").glob("step-*/manifest.json")
        saved = [int(path.parent.name.rpartition("-")[2]) for path in manifests]
        logged = [log.last for log in log_files(self._folder / "updates")]
        step = max([0, *saved, *([] if saves else logged)])
        if saves:
            self._saved_at = event.at
        self._saved = step, self._seen.get(step, "")  # killed before it wrote a line of this step
        return max(0, last - step)

    def _compare_loaded(self, outcome: Outcome) -> list[str]:
        """Where a world went on from other weights than those of the step that it goes on from."""
        files = [self._folder / f"{machine.name}.loaded" for machine in self._alive]
        said = [
            file.read_text().split() if file.exists() else ["0", "nothing", "0", "0"]
            for file in files
        ]
        outcome.replayed = max(int(words[2]) for words in said)
        outcome.replay_s = max(float(words[3]) for words in said)
        step, wanted = self._saved or (0, "nothing")
        found = {(int(words[0]), words[1] if wanted else "") for words in said}
        return (
            []
            if found == {(step, wanted)}
            else [f"went on from {sorted(found)}, the last was {step} {wanted}"]
        )

    def _compare(self) -> list[str]:
        return [text for machine in self._alive for text in self._note(machine)]

    def _note(self, machine: Machine) -> list[str]:
        """Steps after which a machine had other weights than the others of its world. Forgets all but the last."""
        unequal = [
            f"{machine.name} differs after step {line.step}"
            for line in machine.look()
            if self._seen.setdefault(line.step, line.digest) != line.digest
        ]
        for line in machine.lines:
            if line.step > machine.noted:
                self._parts.setdefault(line.step, []).append(line.examples)
                machine.noted = line.step
        machine.lines = machine.lines[-20:]
        return unequal

    def _judge_parts(self, outcome: Outcome, machines: Sequence[Machine]) -> None:
        """Whether each example of a step was computed once, for each step that all `machines` have taken."""
        lasts = [machine.lines[-1] for machine in machines if machine.lines]
        if not lasts:
            return
        last = min(lasts, key=lambda line: line.step)
        taken, outcome.step, outcome.loss = last.step, last.step, last.loss
        for step in sorted(each for each in self._parts if each <= taken):
            had = sorted(example for part in self._parts.pop(step) for example in part)
            if had == [*range(BATCH)]:
                outcome.whole += 1
            elif outcome.kind == "kill" and len({*had}) == len(had):
                outcome.short += 1
            else:
                outcome.unequal.append(f"step {step} had the examples {had}")

    def _steps_on(self, steps: int) -> None:
        goals = {machine: machine.look()[-1].step + steps for machine in self._alive}
        self._wait(
            lambda: all(each.look()[-1].step >= goal for each, goal in goals.items()), "take steps"
        )

    def _wait(self, met: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self._limit_s
        while not met():
            ended = [
                f"{machine.name}: {machine.error()}"
                for machine in self._alive
                if machine.has_ended()
            ]
            if ended or time.monotonic() > deadline:
                raise Broken(
                    f"{what}: " + (f"ended {ended}" if ended else f"not within {self._limit_s:g} s")
                )
            time.sleep(POLL_S)

    def _end(self) -> None:
        for machine in self._alive:
            machine.kill()
        self._alive = []
        for store in self._stores:
            store.kill()
        self._stores, self._seen, self._parts = [], {}, {}
        for pattern in ("save", "*.saved", "*.npy"):
            for path in self._folder.glob(pattern):
                path.unlink()


def ordinary(machines: Sequence[Machine]) -> float:
    """The median seconds of the last steps of `machines`; 0 where there are none."""
    gaps = [
        after.moment - before.moment
        for machine in machines
        for before, after in pairwise(machine.lines[-6:])
    ]
    return statistics.median(gaps) if gaps else 0.0


def last_mark(moment: float, every_s: float) -> float:
    """The last moment before `moment` at which a checkpoint is due.

    A trace has a grid of its own, often of a whole part of `every_s`. So checkpoints are a quarter of `every_s` beside
    multiples of it: for a trace of 300 s and checkpoints of 600 s half of `every_s` is lost on average.

    >>> last_mark(900, 600), last_mark(1200, 600)
    (750.0, 750.0)
    """
    first = every_s / 4
    return (moment - first) // every_s * every_s + first


def as_row(outcome: Outcome, **more: Any) -> dict[str, Any]:
    return {**asdict(outcome), **more}
