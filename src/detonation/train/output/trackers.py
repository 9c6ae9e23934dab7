"""Trackers: TensorBoard, trackio, Weights & Biases, a page, your own: behind one protocol, besides
`metrics.jsonl`."""

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
"""Of the page of a run, unless its logger is "web:PORT"."""


class Logger(Protocol):
    """Takes in the steps of a run one after another. `MetricsFile` is a logger, too."""

    def write(self, record: Record) -> None:
        """Takes in one step more."""
        ...

    def close(self) -> None:
        """Flushes and closes; nothing is written afterwards."""
        ...


Opener = Callable[[Path, Config, int], Logger]
"""Opens a logger on rank 0 for the run in a directory; the number is that of the steps that were
logged before."""


class TensorBoard:
    """Event files in `tensorboard/` of the run directory, for `tensorboard --logdir DIR`."""

    def __init__(self, path: Path, config: Config, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Steps that are done again replace their first values. A run that is killed loses ten
        # seconds.
        folder, again = str(path / "tensorboard"), done + 1 if done else None
        self._writer: Any = SummaryWriter(folder, purge_step=again, flush_secs=10)

    def write(self, record: Record) -> None:
        for name, value in values(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, in `wandb/` of the run directory, for `wandb sync`; offline, but
    for WANDB_MODE."""

    def __init__(self, path: Path, config: Config, done: int) -> None:
        self._run = self._opened(path.name, path, to_table(config))

    def _opened(self, name: str, path: Path, config: Table) -> Any:
        os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault(
            "WANDB_ERROR_REPORTING", "false"
        )  # it looks up a host even when offline
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
    """A run of trackio, kept where trackio keeps its projects, for `trackio show --project
    detonation`."""

    def _opened(self, name: str, path: Path, config: Table) -> Any:
        import trackio

        quiet: dict[str, Any] = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with contextlib.redirect_stdout(
            io.StringIO()
        ):  # its greetings: only results may go to stdout
            return trackio.init(
                project="detonation", name=name, config=config, resume="allow", **quiet
            )

    def close(self) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):
            # the module's finish: after the run's own, trackio finishes again at exit, aloud
            trackio.finish()


class Web:
    """A page about the run in `path` at http://127.0.0.1:PORT; it reads what the run writes."""

    def __init__(self, path: Path, config: Config, done: int, port: int = PORT) -> None:
        with listener_on(port) as listener:
            command = [
                sys.executable,
                "-m",
                "detonation.report.live",
                str(path),
                str(listener.fileno()),
            ]
            nowhere = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=nowhere,
                stderr=nowhere,
                pass_fds=[listener.fileno()],
            )
        self.said = f"watch it at http://127.0.0.1:{port}"

    def write(self, record: Record) -> None:
        """Does nothing: the page reads the metrics file."""

    def close(self) -> None:
        """Ends the page."""
        self._process.communicate()


def port_of(name: str) -> int | None:
    """The port of the logger "web" or "web:PORT"; None for another logger.

    >>> port_of("web"), port_of("web:8080"), port_of("package:web")
    (8000, 8080, None)
    """
    kind, _, port = name.partition(":")
    return int(port or PORT) if kind == "web" and (port.isdecimal() or name == kind) else None


def listener_on(port: int) -> socket.socket:
    """A socket of this machine alone; raises `ValueError` for a port that is not to be had."""
    if not 0 < port < 1 << 16:
        raise ValueError(f"the port of logger web is {port}, but must be from 1 to 65535")
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        problem = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
        )
        raise ValueError(
            f"port {port} of 127.0.0.1 {problem}: give another one, --logger web:{PORT + 1}"
        ) from error


OPENERS: dict[str, Opener] = {
    "tensorboard": TensorBoard,
    "trackio": Trackio,
    "wandb": WeightsAndBiases,
    "web": Web,
}
"""By name; each needs the package of that name.

Any other opener is named "package.module:function".
"""


class Forgiving:
    """A logger that drops the logger inside it, with one warning, when that raises: no run should
    stop for it."""

    def __init__(
        self, name: str, open_it: Callable[[], Logger], warn: Callable[[str], None]
    ) -> None:
        self._name, self._warn = name, warn
        self._inner: Logger | None = None
        with self._given_up():
            self._inner = open_it()

    @property
    def said(self) -> str:
        """Words of the logger for people; "" for none."""
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
            lines = str(error).splitlines()
            reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
            self._warn(
                f"logger {self._name} failed and gets no more ({reason}); metrics.jsonl has every"
                " step"
            )


def check_trackers(names: Sequence[str]) -> None:
    """Raises `ValueError` for a logger that does not exist, whose package is not installed, or
    whose port is taken."""
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
    """The loggers that `config` names, for the run in `path`; `warn` gets a line for each that
    fails."""

    def opened(name: str) -> Callable[[], Logger]:
        return lambda: _opener(name)(path, config, done)

    return [Forgiving(name, opened(name), warn) for name in config.train.loggers]


def _opener(name: str) -> Opener:
    if (port := port_of(name)) is not None:
        return partial(Web, port=port)
    return imported(name) if ":" in name else OPENERS[name]


def values(record: Record) -> dict[str, float]:
    """The numbers of a step by name: `loss`, `bytes_sent`, and of several levels `bytes_sent/rack`."""
    found: dict[str, float] = {}
    for name, value in record.values().items():
        if name == "levels":
            found |= {f"bytes_sent/{axis}": count for axis, count in value.items()}
        elif name == "waits":
            rows = enumerate(value["seconds"])
            found |= {
                f"waited/{i} for {j}": seconds
                for i, row in rows
                for j, seconds in enumerate(row)
                if i != j
            }
        elif name not in ("step", "setting"):  # which is text
            found[name] = value
    return found
