"""Trackers, which record the steps of a run: TensorBoard, trackio, Weights & Biases, a web page,
and loggers of the user. All of them have the methods of `Logger`.
"""

import contextlib
import errno
import importlib.util
import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from detonation.choices import imported
from detonation.train.output.metrics import Record
from detonation.train.recipe.schema import Config, Table
from detonation.train.recipe.tables import to_table

PORT = 8000
"""Port of the web page of a run, unless its logger is "web:PORT"."""


class Logger(Protocol):
    """Receives the record of each step. `MetricsFile` is also a logger."""

    def write(self, record: Record) -> None:
        """Receives the record of one step."""
        ...

    def close(self) -> None:
        """Flushes and closes the logger. No call of `write` follows."""
        ...


Opener = Callable[[Path, Config, int], Logger]
"""Opens a logger on rank 0. Its arguments are the run directory, the configuration, and the number
of steps that earlier starts logged.
"""


class TensorBoard:
    """Writes event files to `tensorboard/` in the run directory, for `tensorboard --logdir DIR`."""

    def __init__(self, path: Path, config: Config, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # If a resumed run repeats a step, the new values of the step replace its earlier values.
        # A killed run loses at most the values of its last ten seconds.
        folder = str(path / "tensorboard")
        repeated = None
        if done:
            repeated = done + 1
        self._writer: Any = SummaryWriter(folder, purge_step=repeated, flush_secs=10)

    def write(self, record: Record) -> None:
        for name, value in values(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Writes a run of Weights & Biases to `wandb/` in the run directory, for `wandb sync`.

    The logger sends nothing to a server, unless the environment variable WANDB_MODE asks for this.
    """

    def __init__(self, path: Path, config: Config, done: int) -> None:
        self._run = self._opened(path.name, path, to_table(config))

    def _opened(self, name: str, path: Path, config: Table) -> Any:
        os.environ.setdefault("WANDB_MODE", "offline")
        # without this setting, wandb connects to a host even in offline mode
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        quiet = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        return wandb.init(
            project="detonation", name=name, dir=str(path), config=config, settings=quiet
        )

    def write(self, record: Record) -> None:
        self._run.log(values(record), step=record.step)

    def close(self) -> None:
        self._run.finish()


class Trackio(WeightsAndBiases):
    """Writes a run of trackio to trackio's own folder of projects, for `trackio show --project
    detonation`.
    """

    def _opened(self, name: str, path: Path, config: Table) -> Any:
        import trackio

        quiet: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        # hides trackio's greetings, because stdout is only for results
        with contextlib.redirect_stdout(io.StringIO()):
            return trackio.init(
                project="detonation", name=name, config=config, resume="allow", **quiet
            )

    def close(self) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            # after `run.finish()` alone, trackio would finish again at exit, and print lines
            trackio.finish()


class Web:
    """Serves a page about the run in `path` at http://127.0.0.1:PORT. A separate process reads the
    files of the run.
    """

    def __init__(self, path: Path, config: Config, done: int, port: int = PORT) -> None:
        with listener_on(port) as listener:
            file = listener.fileno()
            command = [sys.executable, "-m", "detonation.report.live", str(path), str(file)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[file],
            )
        self.said = f"watch it at http://127.0.0.1:{port}"

    def write(self, record: Record) -> None:
        """Does nothing, because the page reads the metrics file."""

    def close(self) -> None:
        self._process.communicate()


def port_of(name: str) -> int | None:
    """Returns the port of the logger "web" or "web:PORT"; None for any other logger.

    >>> port_of("web"), port_of("web:8080"), port_of("package:web")
    (8000, 8080, None)
    """
    kind, _, port = name.partition(":")
    if kind == "web" and (port.isdecimal() or name == kind):
        return int(port or PORT)
    return None


def listener_on(port: int) -> socket.socket:
    """Opens a listening socket at 127.0.0.1; raises `ValueError` if the port is not free."""
    if not 0 < port < 1 << 16:
        raise ValueError(f"the port of logger web is {port}, but must be from 1 to 65535")
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        problem = f"cannot be opened ({error.strerror})"
        if error.errno == errno.EADDRINUSE:
            problem = "is in use"
        other = PORT + 1 if port == PORT else PORT
        raise ValueError(
            f"port {port} of 127.0.0.1 {problem}: give another port, --logger web:{other}"
        ) from error


OPENERS: dict[str, Opener] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
    "web": Web,
}
"""Functions that open loggers, by name. Each except "web" needs the package of its name. A logger
of the user is named "package.module:function".
"""


class Forgiving:
    """Wraps a logger. If the logger raises an error, warns once and stops using the logger. The run
    continues.
    """

    def __init__(
        self, name: str, open_it: Callable[[], Logger], warn: Callable[[str], None]
    ) -> None:
        self._name = name
        self._warn = warn
        self._inner: Logger | None = None
        with self._given_up():
            self._inner = open_it()

    @property
    def said(self) -> str:
        """A line of the logger for the terminal; "" if the logger has none."""
        return getattr(self._inner, "said", "")

    def write(self, record: Record) -> None:
        if self._inner is not None:
            with self._given_up():
                self._inner.write(record)

    def close(self) -> None:
        if self._inner is not None:
            with self._given_up():
                self._inner.close()

    @contextlib.contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            self._inner = None
            reason = type(error).__name__
            lines = str(error).splitlines()
            if lines:
                reason += f": {lines[0]}"
            self._warn(
                f"logger {self._name} failed and gets no more records ({reason}); metrics.jsonl"
                " has every step"
            )


def check_trackers(names: Sequence[str]) -> None:
    """Raises `ValueError` if a logger does not exist, if its package is not installed, or if its
    port is in use.
    """
    for name in names:
        if (port := port_of(name)) is not None:
            if importlib.util.find_spec("matplotlib") is None:
                raise ValueError(
                    f"logger {name} needs matplotlib: pip install '.[plots]' in a clone"
                )
            listener_on(port).close()
            continue
        _opener(name)
        if name in OPENERS and importlib.util.find_spec(name) is None:
            raise ValueError(f"logger {name} needs the package {name}: pip install {name}")


def open_trackers(
    path: Path, config: Config, done: int, warn: Callable[[str], None]
) -> list[Forgiving]:
    """Opens the loggers that `config` names for the run in `path`.

    Calls `warn` with a line for each logger that fails.
    """

    def open_logger(name: str) -> Logger:
        return _opener(name)(path, config, done)

    return [Forgiving(name, partial(open_logger, name), warn) for name in config.train.loggers]


def _opener(name: str) -> Opener:
    if (port := port_of(name)) is not None:
        return partial(Web, port=port)
    if ":" in name:
        return imported(name)
    return OPENERS[name]


def values(record: Record) -> dict[str, float]:
    """Returns the measured values of a step by name, for example `loss` and `bytes_sent`. With
    several levels, each axis has its own value, such as `bytes_sent/rack`.
    """
    found: dict[str, float] = {}
    for name, value in record.values().items():
        if name == "levels":
            found |= {f"bytes_sent/{axis}": count for axis, count in value.items()}
        elif name == "waits":
            for i, row in enumerate(value["seconds"]):
                found |= {f"waited/{i} for {j}": seconds for j, seconds in enumerate(row) if i != j}
        elif name != "step":
            found[name] = value
    return found
