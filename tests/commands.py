"""The command line as a process of its own: a fork of this one, where torch is imported already."""

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import tomli_w
import torch

from detonation.cli.command import run_command
from detonation.report import figures
from limits import LIMIT_S

for name in (
    *("torch._dynamo", "torch.distributed.fsdp", "transformers.models.olmo2.modeling_olmo2"),
    *(
        "matplotlib.figure",
        "matplotlib.lines",
        "matplotlib.patches",
        "matplotlib.backends.backend_svg",
    ),
    *("detonation.train.run.start", "detonation.train.recipe.resolve", "detonation.report.page"),
    *("detonation.cluster.mesh", "detonation.cluster.init", "detonation.core.optimizer.replicate"),
    *("detonation.engines.native_engine", "detonation.engines.triton", "detonation.wire.wire"),
    *("tyro._backends._tyro_backend", "torch.profiler._cupti_monitor"),
):
    with contextlib.suppress(ImportError):  # what a release of these libraries may not have
        importlib.import_module(
            name
        )  # before the fork, and not once in every command: half of a run of some steps

RECIPE = {
    "model": {"name": "olmo2", "layers": 1, "hidden_size": 32, "heads": 2, "feed_forward": 64},
    "data": {"task": "text", "source": "sotu-sample", "context": 32},
    "scheme": {"name": "demo", "topk": 4, "chunk": 32},
    "optimizer": {"name": "AdamW", "lr": 0.003},
    "train": {"steps": 6, "batch_size": 4, "validation_batches": 4, "log_every": 1},
    "schedule": {"warmup": 2},
    "mesh": {"replicas": 2, "shards": 1},
}
"""A run small enough for a test: a real model on the shipped text, in fractions of a second a step."""


class Command:
    """`detonation arguments...`, running in a session of its own; what it prints is in `folder`.

    env: what it finds in its environment besides. network: the network namespace that it runs in. program: another than
    `detonation`: takes the arguments, returns its exit code. enter: is called in the new process before all else.
    pictures: its report has the figures that people see; otherwise they are empty, for to draw them takes as long as to
    train for some steps. pipes: descriptors that are its standard output and standard error, in place of files.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: object,
        env: Mapping[str, object] = {},
        network: str = "",
        program: Callable[[list[str]], int] = run_command,
        enter: Callable[[], object] = lambda: None,
        pictures: bool = False,
        pipes: Mapping[int, int] = {},
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._env = {name: str(value) for name, value in env.items()}
        self._network = network
        self._program, self._enter, self._pictures, self._pipes = program, enter, pictures, pipes
        self._out, self._err = folder / "stdout", folder / "stderr"
        self._out.write_text("")
        self._err.write_text("")
        self.code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run([str(argument) for argument in arguments])
        self._handle = os.pidfd_open(self.pid)

    def _run(self, arguments: Sequence[str]) -> None:
        code = 70
        gc.freeze()  # to look for garbage in what the parent holds would copy all of its memory
        try:
            os.setsid()
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite may run under nohup
            self._enter()
            if not self._pictures:
                figures.Chart.image = _empty
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for descriptor, path in ((1, self._out), (2, self._err)):
                os.dup2(self._pipes.get(descriptor) or os.open(path, os.O_WRONLY), descriptor)
            for pipe in self._pipes.values():
                os.close(pipe)
            sys.stdout, sys.stderr = (
                os.fdopen(1, "w", closefd=False),
                os.fdopen(2, "w", closefd=False),
            )
            torch.set_num_threads(1)
            os.environ.update(self._env)
            tempfile.tempdir = None  # what the parent found in its own environment
            if self._network:
                _enter(self._network)
            code = self._program(list(arguments))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.flush()
            with contextlib.suppress(BrokenPipeError):
                sys.stderr.flush()
            os._exit(code)

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")  # it may be in the middle of a character

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return self.code is not None or bool(select.select([self._handle], [], [], 0)[0])

    @property
    def errors(self) -> str:
        """What it says went wrong, without what torch's C++ adds where torch was imported before the command was."""
        return "".join(
            line for line in self.stderr.splitlines(keepends=True) if line.startswith("error: ")
        )

    @property
    def ranks(self) -> list[int]:
        """The processes that it has started, in the order of their start; none once it has ended."""
        if self.ended:
            return []
        return [
            int(pid)
            for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        ]

    def wait(self) -> int:
        """Its exit code, once it has ended; below 0 it is the signal that ended it."""
        if self.code is None:
            if not select.select([self._handle], [], [], LIMIT_S)[0]:
                self.kill()
                raise AssertionError(
                    f"still running after {LIMIT_S} s:\n{self.stdout[-1000:]}\n{self.stderr}"
                )
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._handle)
        return self.code

    def wait_for_step(self, step: int) -> None:
        """Returns when it has shown that many steps."""
        if not self.comes_to_step(step):
            self.kill()
            raise AssertionError(
                f"did not come to step {step}:\n{self.stdout[-1000:]}\n{self.stderr}"
            )

    def comes_to_step(self, step: int) -> bool:
        """Waits until it has shown that many steps; False where it ended or the time was over before."""
        limit, over = time.monotonic() + LIMIT_S, False
        while not over and self.stdout.count("\nstep ") < step:
            over = bool(select.select([self._handle], [], [], 0.01)[0]) or time.monotonic() > limit
        return self.stdout.count("\nstep ") >= step

    def kill(self) -> None:
        """Ends it, and with it its ranks, if it still runs."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._handle)


def _empty(chart: object) -> str:
    """What stands in a report in place of a figure."""
    return "data:image/png;base64,"


def launched(
    folder: Path,
    world_size: int,
    *arguments: object,
    networks: Sequence[str] = (),
    address: str = "127.0.0.1",
    env: Mapping[str, object] = {},
    enter: Callable[[int], object] = lambda rank: None,
) -> list[Command]:
    """The ranks of a world that a launcher like srun starts: each is told its place, and rank 0's address.

    enter: is called in the process of each rank, with its number, before all else.
    """
    meeting = {"WORLD_SIZE": world_size, "MASTER_ADDR": address, "MASTER_PORT": free_port()}
    local = {"LOCAL_WORLD_SIZE": 1 if networks else world_size}
    return [
        Command(
            folder / f"rank{rank}",
            *arguments,
            env={**env, **meeting, **local, "RANK": rank, "LOCAL_RANK": 0 if networks else rank},
            network=networks[rank] if networks else "",
            enter=partial(enter, rank),
        )
        for rank in range(world_size)
    ]


_reserved: list[socket.socket] = []
"""Names of ports of `free_port`, which no other process of the tests takes while this one lives."""


def free_port(count: int = 1) -> int:
    """The first of `count` ports in a row to listen on later, as the shards of a feed do: those of no other process.

    They are below those that the kernel gives out by itself.
    """
    for first in range(20_000, 32_000):
        names = [socket.socket(socket.AF_UNIX) for _ in range(count)]
        try:
            for port, name in enumerate(names, first):
                name.bind(
                    f"\0detonation-test-port-{port}"
                )  # of no file: free when its processes have ended
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            for name in names:
                name.close()
            continue
        _reserved.extend(names)
        return first
    raise OSError("no port is free")


def outliving(pids: Sequence[int], timeout_s: float = LIMIT_S) -> list[int]:
    """Waits until these processes have ended; returns those that have not after `timeout_s` seconds in all."""
    limit, found = time.monotonic() + timeout_s, []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            if not select.select([handle], [], [], max(limit - time.monotonic(), 0))[0]:
                found.append(pid)
            os.close(handle)
    return found


def _enter(network: str) -> None:
    with Path("/run/netns", network).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")


def write_recipe(path: Path, **tables: object) -> Path:
    """The tiny recipe as a file at `path`, with some tables in the place of its own."""
    path.write_text(tomli_w.dumps({**RECIPE, **tables}))
    return path


def listening(pids):
    """The addresses, as /proc/net writes them, and ports on which these processes listen."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                target = str(descriptor.readlink())
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
    rows = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    own = [row[1].partition(":") for row in rows if row[3] == _LISTENING and row[9] in sockets]
    return {(address, int(port, 16)) for address, _, port in own}


_LISTENING = "0A"
