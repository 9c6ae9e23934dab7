"""A training run that is killed, stopped and preempted again and again, and started again each time."""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rows import Row

from commands import Command, outliving, write_recipe
from detonation.checkpoint.files.manifest import MANIFEST_NAME
from detonation.checkpoint.verify import newest

SETS = ("peers.silence_s=1.5", "train.validate_every=20")
WORLD = ("--replicas", 2, "--shards", 2, "--checkpoint-every", 4)
SAME = ("fingerprint", "train_loss", "val_loss", "bytes_sent_per_step", "steps")


Result = tuple[dict[str, object], list[float]]


class Run:
    """One run in `folder`, started as often as it takes."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.out, self.steps = folder, folder / "run", steps
        self._sets = (*SETS, f"train.steps={steps}")
        folder.mkdir(parents=True)
        self._recipe = write_recipe(folder / "tiny.toml")
        self._starts = 0

    def start(self) -> Command:
        """Starts the run, or continues it as a job that was queued again does."""
        env: dict[str, object] = {
            "TMPDIR": self.folder
        }  # leftovers of a killed launcher go with the folder
        if self._starts:
            env["SLURM_RESTART_COUNT"] = self._starts
        self._starts += 1
        return Command(
            self.folder,
            "train",
            self._recipe,
            "--out",
            self.out,
            *WORLD,
            "--set",
            *self._sets,
            env=env,
        )

    def result(self) -> Result:
        """The results that must not depend on interruptions."""
        summary = json.loads((self.out / "summary.json").read_text())
        losses = [
            json.loads(line)["loss"]
            for line in (self.out / "metrics.jsonl").read_text().splitlines()
        ]
        return {key: summary[key] for key in SAME}, losses

    @property
    def finished(self) -> bool:
        return (self.out / "summary.json").exists()


def uninterrupted(folder: Path, steps: int) -> Run:
    """A run that nothing happens to."""
    run = Run(folder, steps)
    command = run.start()
    assert command.wait() == 0, command.errors
    return run


class Job:
    """Runs one after the other, each started again until it has finished; all must end as `whole` did.

    within: a fault hits at a random step below this one after each start.
    """

    def __init__(self, folder: Path, whole: Run, rng: random.Random, within: int) -> None:
        self._folder, self._whole, self._rng, self._within = folder, whole, rng, within
        self._runs = [Run(folder / "run0", whole.steps)]

    def going(self) -> Command:
        """A started run at a random moment of a step, a save or a validation."""
        while True:
            if self._runs[-1].finished:
                self._runs.append(Run(self._folder / f"run{len(self._runs)}", self._whole.steps))
            command = self._runs[-1].start()
            if command.comes_to_step(self._rng.randrange(1, self._within)):
                time.sleep(self._rng.random() * 0.05)
                if not command.ended:
                    return command
            if command.wait() != 0:
                raise AssertionError(f"could not go on: {command.stdout[-1000:]}{command.errors}")

    @property
    def finished(self) -> bool:
        return self._runs[-1].finished

    def end(self) -> list[str]:
        """Lets the last run finish; returns the faults of the results."""
        if not self.finished and (command := self._runs[-1].start()).wait() != 0:
            return [f"could not go on: {command.errors}"]
        expected = self._whole.result()
        return [
            f"{r.out} did not end as the uninterrupted run"
            for r in self._runs
            if r.result() != expected
        ]


def killed_and_stopped(folder: Path, whole: Run, seed: int, kills: int, stops: int) -> list[Row]:
    """Ranks, or the launcher, end or hang at random moments; the other processes end, and a new start goes on."""
    kill, stop = Row("kill -9 of a rank or the launcher"), Row("SIGSTOP of a rank")
    rng = random.Random(seed)
    faults = ["kill"] * kills + ["stop"] * stops
    rng.shuffle(faults)
    job = Job(folder, whole, rng, 6)
    for fault in faults:
        command = job.going()
        ranks, row = command.ranks, kill if fault == "kill" else stop
        victim = rng.choice([*ranks, command.pid] if fault == "kill" or not ranks else ranks)
        since = time.monotonic()
        os.kill(victim, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        code = command.wait()
        well = code == (-signal.SIGKILL if victim == command.pid else 1) or (
            code == 0 and job.finished
        )
        problem = "" if well else f"ended with {code}: {command.errors}"
        left = outliving(ranks)
        row.add(problem or (f"processes {left} outlived their launcher" if left else ""), since)
    kill.losses += job.end()
    return [kill, stop]


def preempted(folder: Path, whole: Run, seed: int, count: int) -> Row:
    """A scheduler's signals at random moments, to the launcher, to one rank or to all."""
    row, rng = Row("SIGTERM or SIGUSR1, then resumed"), random.Random(seed)
    job = Job(folder, whole, rng, 12)
    for _ in range(count):
        command = job.going()
        number, to = (
            rng.choice([signal.SIGTERM, signal.SIGUSR1]),
            rng.choice(["launcher", "rank", "all"]),
        )
        since, ranks = time.monotonic(), command.ranks
        if to == "all":
            os.killpg(command.pid, number)
        else:
            os.kill(rng.choice(ranks) if to == "rank" else command.pid, number)
        code = command.wait()
        last = (command.stdout.splitlines() or [""])[-1]
        well = code == 0 and (
            job.finished or last.startswith(f"stopped by {number.name} after step")
        )
        row.add(
            "" if well else f"{number.name} to {to}: ended with {code}: {command.errors}{last}",
            since,
        )
    row.losses += job.end()
    return row


def disk_full(folder: Path, whole: Run, sizes: int) -> list[Row]:
    """A disk that is full again and again while a run saves, each time at another size; in between there is room.

    whole: the uninterrupted run, replaced by a run of the needed length where it is shorter or longer.
    """
    if whole.steps != (steps := 15 * sizes + 60):
        whole = uninterrupted(folder / "whole", steps)
    saved = [file.bytes for file in newest(whole.out / "checkpoints").manifest.files.values()]
    files, disk = Row("disk full: no file may grow"), Row("disk full: a file system of 64 MB")
    widen = partial(_limit, resource.RLIM_INFINITY)
    _squeezed(
        files,
        Run(folder / "files", whole.steps),
        whole,
        sizes,
        partial(_limit_files, max(saved)),
        widen,
    )
    run = Run(folder / "disk", whole.steps)
    run.out.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "none", run.out], capture_output=True
    ).returncode:
        disk.note = "not tried: only root can mount a file system"
        return [files, disk]
    try:
        _squeezed(
            disk, run, whole, sizes, partial(_fill, run.out, sum(saved)), partial(_empty, run.out)
        )
    finally:
        subprocess.run(["umount", "--lazy", run.out], check=True)
    return [files, disk]


def _squeezed(
    row: Row,
    run: Run,
    whole: Run,
    sizes: int,
    squeeze: Callable[[Command, float], None],
    relieve: Callable[[Command], None],
) -> None:
    """Takes room from a run until it reports that it could not save, `sizes` times.

    squeeze: leaves the given share of the room that a checkpoint needs.
    """
    command = run.start()
    command.wait_for_step(5)
    while not any((run.out / "checkpoints").glob(f"*/{MANIFEST_NAME}")) and not command.ended:
        time.sleep(0.01)  # a thread saves, and it may be behind the steps
    for index in range(sizes):
        since, reported = time.monotonic(), command.stdout.count("; training goes on")
        while command.stdout.count("; training goes on") == reported and not command.ended:
            squeeze(command, index / sizes)
            time.sleep(0.01)
        found = newest(run.out / "checkpoints")
        relieve(command)
        row.add(
            "" if found is not None and not command.ended else f"size {index}: {command.errors}",
            since,
        )
        command.wait_for_step(command.stdout.count("\nstep ") + 5)
    if command.wait() or run.result() != whole.result():
        row.losses.append(f"the run did not end where one with room did: {command.errors}")


def _limit_files(largest: int, command: Command, share: float) -> None:
    """Limits files to less than the `largest` file of a checkpoint, and more than any other file."""
    _limit(64_000 + int((largest - 64_000) * share), command)


def _limit(size: int, command: Command) -> None:
    for pid in command.ranks:
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def _fill(out: Path, saved: int, command: Command, share: float) -> None:
    """Leaves a share of the `saved` bytes that a checkpoint takes. Called again when old checkpoints have gone."""
    with (out / "checkpoints" / "filling").open("ab") as filling, contextlib.suppress(OSError):
        room = os.statvfs(out)
        over = room.f_bavail * room.f_frsize - int(saved * share)
        if over > 0:
            os.posix_fallocate(filling.fileno(), os.fstat(filling.fileno()).st_size, over)


def _empty(out: Path, command: Command) -> None:
    (out / "checkpoints" / "filling").unlink()
