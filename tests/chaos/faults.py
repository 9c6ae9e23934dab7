"""A training run that is killed, stopped and preempted again and again, and started again each time."""

import json
import os
import random
import resource
import signal
import time
from pathlib import Path

from rows import Row

from commands import Command, write_recipe
from detonation.checkpoint.verify import newest

SETS = ("peers.silence_s=1.5", "train.validate_every=50")
WORLD = ("--replicas", 2, "--shards", 2, "--checkpoint-every", 4)
STEPS = 60
SAME = ("fingerprint", "train_loss", "val_loss", "bytes_sent_per_step", "steps")


Result = tuple[dict[str, object], list[float]]


class Run:
    """One run in `folder`, started as often as it takes."""

    def __init__(self, folder: Path, steps: int = STEPS) -> None:
        self.folder, self.out = folder, folder / "run"
        self._sets = (*SETS, f"train.steps={steps}")
        folder.mkdir(parents=True)
        self._recipe = write_recipe(folder / "tiny.toml")
        self._starts = 0

    def start(self) -> Command:
        """Starts the run, or goes on with it as a job that was queued again does."""
        env = {"SLURM_RESTART_COUNT": self._starts} if self._starts else {}
        self._starts += 1
        return Command(self.folder, "train", self._recipe, "--out", self.out, *WORLD, "--set", *self._sets, env=env)

    def result(self) -> Result:
        """What must not depend on interruptions."""
        summary = json.loads((self.out / "summary.json").read_text())
        losses = [json.loads(line)["loss"] for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        return {key: summary[key] for key in SAME}, losses

    @property
    def finished(self) -> bool:
        return (self.out / "summary.json").exists()


def uninterrupted(folder: Path, steps: int = STEPS) -> Run:
    """A run that nothing happens to."""
    run = Run(folder, steps)
    command = run.start()
    assert command.wait(300) == 0, command.errors
    return run


def killed_and_stopped(folder: Path, expected: Result, seed: int, kills: int, stops: int) -> list[Row]:
    """Ranks, or the launcher, end or hang at random moments; whoever is left ends, and a new start goes on."""
    kill, stop = Row("kill -9 of a rank or the launcher"), Row("SIGSTOP of a rank")
    rng = random.Random(seed)
    faults = ["kill"] * kills + ["stop"] * stops
    rng.shuffle(faults)
    runs = [Run(folder / "run0")]
    for fault in faults:
        if runs[-1].finished:
            runs.append(Run(folder / f"run{len(runs)}"))
        command = runs[-1].start()
        command.wait_for_step(rng.randrange(1, 6), 120)
        time.sleep(rng.random() * 0.05)  # any moment of a step, a save or a validation
        victims = [*command.ranks, command.pid] if fault == "kill" else command.ranks
        if not victims:
            command.wait()
            continue
        victim = rng.choice(victims)
        since, row = time.monotonic(), kill if fault == "kill" else stop
        os.kill(victim, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        code = command.wait(60)
        named = code == (-signal.SIGKILL if victim == command.pid else 1) or (code == 0 and runs[-1].finished)
        row.add("" if named else f"ended with {code}: {command.errors}", since)
    for run in runs:
        while not run.finished:
            command = run.start()
            if command.wait(300) != 0:
                kill.fails(f"could not go on: {command.errors}")
                break
        if run.finished and run.result() != expected:
            kill.fails(f"{run.out} did not end where the uninterrupted run did")
    return [kill, stop]


def preempted(folder: Path, expected: Result, seed: int, count: int) -> Row:
    """A scheduler's signals at random moments, to the launcher, to one rank or to all."""
    row = Row("SIGTERM or SIGUSR1, then resumed")
    rng = random.Random(seed)
    runs = [Run(folder / "run0")]
    for _ in range(count):
        if runs[-1].finished:
            runs.append(Run(folder / f"run{len(runs)}"))
        command = runs[-1].start()
        command.wait_for_step(rng.randrange(1, 12), 120)
        time.sleep(rng.random() * 0.05)
        number = rng.choice([signal.SIGTERM, signal.SIGUSR1])
        since, to = time.monotonic(), rng.choice(["launcher", "rank", "all"])
        if to == "all":
            os.killpg(command.pid, number)
        else:
            os.kill(rng.choice(command.ranks or [command.pid]) if to == "rank" else command.pid, number)
        code = command.wait(60)
        last = (command.stdout.splitlines() or [""])[-1]
        well = code == 0 and (runs[-1].finished or last.startswith(f"stopped by {number.name} after step"))
        row.add("" if well else f"{number.name} to {to}: ended with {code}: {command.errors}{last}", since)
    for run in runs:
        if not run.finished and run.start().wait(300) != 0:
            row.fails(f"{run.out} could not go on")
        elif run.result() != expected:
            row.fails(f"{run.out} did not end where the uninterrupted run did")
    return row


def disk_full(folder: Path, sizes: int) -> Row:
    """The files of a checkpoint may not grow beyond a size, for many sizes in one run; in between there is room."""
    row = Row("disk full while saving")
    expected = uninterrupted(folder / "whole", 15 * sizes + 10).result()
    largest = max(path.stat().st_size for path in (folder / "whole").rglob("*.safetensors"))
    run = Run(folder / "run", 15 * sizes + 10)
    command = run.start()
    command.wait_for_step(5, 120)  # there is a checkpoint
    for index in range(sizes):
        since, told = time.monotonic(), command.stdout.count("; training goes on")
        _limit(command, 64_000 + (largest - 64_000) * index // sizes)
        while command.stdout.count("; training goes on") == told and not command.ended:
            time.sleep(0.01)
        found = newest(run.out / "checkpoints")
        _limit(command, resource.RLIM_INFINITY)
        row.add("" if found is not None and not command.ended else f"size {index}: {command.errors}", since)
        command.wait_for_step(command.stdout.count("\nstep ") + 5, 120)
    if command.wait(300) or run.result() != expected:
        row.fails(f"the run did not end where one with room did: {command.errors}")
    return row


def _limit(command: Command, size: int) -> None:
    for pid in command.ranks:
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))
