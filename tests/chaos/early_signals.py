"""Ctrl-C and SIGTERM at any moment of every verb, from its first instruction on. Seeded.

OMP_NUM_THREADS=1 PYTHONPATH=tests:. python tests/chaos/early_signals.py [--tries N] [--seed N] [--within S]

Each try starts a command of its own as a terminal does, in its own process group. Ctrl-C goes to
the group, SIGTERM to the process alone. The command has to end with one line and code 128 + n, or,
where it trains, with its state saved. Only a command that had printed all may end with its own code.
No process of its group may be left. Prints what failed.

Before the command's first instruction the interpreter starts, and after its last one it shuts down:
a signal ends it in its own way then.
"""

import argparse
import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from commands import free_port, write_recipe
from limits import LIMIT_S

WITHIN_S = 1.0
LONGEST_DELAY_S = 10.0
SAVED = "stopped by SIGTERM after step "
TOKEN = "0123456789abcdef" * 4


@dataclass(frozen=True)
class Case:
    """A command, the environment that it finds besides, and whether it ends by itself."""

    name: str
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    ends: bool


@dataclass(frozen=True)
class Outcome:
    """How a command ended: "over" before the signal, "interpreter", "at once" or "saved".

    problem: what it did wrong; "" for nothing.
    """

    how: str
    problem: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Cases:
    """Commands of every verb. Those that wait for others wait for ever, some at `listener`."""

    commands: list[Case]
    listener: socket.socket


@contextlib.contextmanager
def cases(folder: Path) -> Iterator[Cases]:
    """The commands, with what they need in `folder`."""
    recipe = str(write_recipe(folder / "tiny.toml", train={"steps": 100_000, "batch_size": 4}))
    short = str(write_recipe(folder / "short.toml"))
    run = str(folder / "run")
    program = folder / "bin" / "npm"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o700)
    first = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        made = ["train", short, "--out", run, "--log"]
        subprocess.run(_command(made), check=True, capture_output=True, env=_env(folder, {}))

        def case(
            *arguments: str, note: str = "", env: Mapping[str, str] = {}, ends: bool = False
        ) -> Case:
            name = " ".join(each.removeprefix(f"{folder}/") for each in arguments)
            name = name.replace(address, "HOST:PORT")
            return Case(f"{name}{note}", arguments, {"DETONATION_TOKEN": TOKEN, **env}, ends)

        train = ("train", recipe, "--out", "OUT")
        launched = {**first, "MASTER_PORT": str(free_port())}
        commands = [
            case("train", ends=True),
            case(*train, note=" (alone)"),
            case(*train, "--elastic", note=" (alone)"),
            case(*train, "--elastic", "--replica", "1", "--meet", address),
            case(*train, "--join", address),
            case(*train, note=" (launched)", env=launched),
            case("compare", recipe, "--schemes", "full,demo", "--out", "OUT"),
            case("simulate", recipe, "--out", "OUT"),
            case("probe", recipe, "--out", f"{folder}/profile.json", ends=True),
            case("plan", short, "--link", "100mbit", "--step-time", "1", ends=True),
            case("plan", "--parameters", "1b", "--link", "100mbit", "--step-time", "1", ends=True),
            case("report", run, "--out", f"{folder}/report.html", ends=True),
            case("verify", run, ends=True),
            case("export", run, "--out", "OUT", ends=True),
            case("follow", run, ends=True),
            case("follow", address, "--out", "OUT", ends=True),  # after some seconds
            case("meet", f"127.0.0.1:{free_port()}"),
            case("fetch", "sotu", env={"XDG_CACHE_HOME": f"{folder}/cache"}),
            case("--version", ends=True),
        ]
        yield Cases(commands, silent)


class Started:
    """A command in a process group of its own."""

    def __init__(self, case: Case, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._ends, self._compares = case.ends, case.arguments[0] == "compare"
        self.env = _env(folder.parent, case.env)
        arguments = [each.replace("OUT", str(folder / "out")) for each in case.arguments]
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            self._process = subprocess.Popen(
                _command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.env,
                start_new_session=True,
                preexec_fn=_hear_signals,
            )
        self.pid = self._process.pid
        self._handle = os.pidfd_open(self.pid)

    @property
    def stdout(self) -> str:
        return (self._folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text(errors="replace")

    def runs(self, program: str) -> bool:
        """True while a process of its group runs `program`."""
        names = [Path(f"/proc/{pid}/comm") for pid in _group(self.pid)]
        return program in [name.read_text().strip() for name in names if name.exists()]

    def maps(self, name: str) -> bool:
        """True once a library of that name is in its memory."""
        return name in Path(f"/proc/{self.pid}/maps").read_text()

    @property
    def has_begun(self) -> bool:
        """True from its first instruction on: Python alone has no handler of SIGTERM."""
        status = Path(f"/proc/{self.pid}/status").read_text().split("SigCgt:")[1].split()[0]
        return bool(int(status, 16) & 1 << (signal.SIGTERM - 1))

    def ended_within(self, seconds: float) -> bool:
        return bool(select.select([self._handle], [], [], seconds)[0])

    def end_by(self, number: int) -> Outcome:
        """Sends the signal, waits for the end, and judges it."""
        if self.ended_within(0):
            return Outcome("over", "" if self._ends else f"ended by itself, {self.stderr!r}")
        begun, loaded = self.has_begun, self.maps("libtorch_cpu")
        errors = self.stderr
        since = time.monotonic()
        if number == signal.SIGINT:
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)
        printed = self.stdout, errors
        ended = self.ended_within(LIMIT_S)
        seconds = time.monotonic() - since
        problem = "" if ended else f"still running after {LIMIT_S} s"
        if ended:
            outcome = self._judged(number, begun, loaded, printed, seconds)
        else:
            outcome = Outcome("", problem)
        left = self.left()
        if left:
            return Outcome(outcome.how, f"{outcome.problem}; processes are left: {left}", seconds)
        return outcome

    def _judged(
        self, number: int, begun: bool, loaded: bool, printed: tuple[str, str], seconds: float
    ) -> Outcome:
        """How it ended. At the signal it had handlers if it had `begun`, torch if it had `loaded`
        it, and had `printed` so much to both streams."""
        code = self._process.wait()
        errors = self.stderr
        says = (
            "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        )
        told = f"code {code} after {seconds:.2f} s, {errors[-500:]!r}"
        lines = errors.splitlines()
        reasons = [line for line in lines if line.startswith("error: ")]
        told_last = ""
        if reasons and reasons == lines[-1:]:
            told_last = reasons[0]
        if code == 128 + number and told_last.startswith(f"error: {says}"):
            return Outcome("at once", "", seconds)
        if self._compares and code == 128 + number and told_last.startswith(f"error: {SAVED}"):
            return Outcome("saved", "", seconds)
        # warnings and bars of libraries, but no error
        quiet = not reasons and "Traceback" not in errors
        if code == 0 and quiet and number == signal.SIGTERM and SAVED in self.stdout:
            return Outcome("saved", "", seconds)
        by_interpreter = code == -number or "KeyboardInterrupt" in errors
        if not begun and not loaded and not any(printed) and by_interpreter:
            return Outcome("interpreter", "", seconds)
        done = self._ends and any(printed) and printed == (self.stdout, errors)
        if done and (code >= 0 or (code == -number and not begun)):
            return Outcome("over", "", seconds)
        return Outcome("at once", told, seconds)

    def left(self) -> list[int]:
        """The processes of its group that are left; the kernel may need a moment to end them."""
        limit = time.monotonic() + WITHIN_S
        found = _group(self.pid)
        while found and time.monotonic() < limit:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    handle = os.pidfd_open(pid)
                    select.select([handle], [], [], max(limit - time.monotonic(), 0))
                    os.close(handle)
            found = _group(self.pid)
        return found

    def close(self) -> None:
        for pid in {self.pid, *_group(self.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._handle)


def _command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "detonation", *arguments]


def _env(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    path = f"{folder}/bin:{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "PATH": path, **more}


def _hear_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the script is in the background


def _group(group: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(folder.name))
    return found


def main() -> int:
    """Tries, prints what failed and how many held."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--within",
        type=float,
        default=WITHIN_S,
        help="seconds; more where other programs have the processors",
    )
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    counts, slowest, failed = Counter[str](), 0.0, 0
    with tempfile.TemporaryDirectory() as name, cases(Path(name)) as all_cases:
        for number in range(asked.tries):
            case = rng.choice(all_cases.commands)
            delay = LONGEST_DELAY_S * rng.random() ** 2  # more of them in the first seconds
            which = rng.choice([signal.SIGINT, signal.SIGTERM])
            command = Started(case, Path(name, f"try{number}"))
            try:
                command.ended_within(delay)
                outcome = command.end_by(which)
            finally:
                command.close()
            late = outcome.how != "saved" and outcome.seconds > asked.within
            problem = outcome.problem
            if late and not problem:
                problem = f"{outcome.how}, too late: after {outcome.seconds:.2f} s"
            counts[outcome.how] += 1
            if outcome.how != "saved":
                slowest = max(slowest, outcome.seconds)
            if problem:
                failed += 1
                moment = f"{which.name} {delay:.2f} s after the start"
                print(f"try {number}, {case.name}, {moment}: {problem}", flush=True)
    kinds = ", ".join(f"{count} {how}" for how, count in counts.most_common())
    print(f"{asked.tries - failed} of {asked.tries}: {kinds}; at once within {slowest:.2f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
