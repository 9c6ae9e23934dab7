"""The page about a run while it trains, as one of its loggers: a process that ends with the run serves it."""

import errno
import socket
import subprocess
import sys
from pathlib import Path

from detonation.train.output.metrics import Record
from detonation.train.recipe.schema import Config

PORT = 8000


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
        problem = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
        raise ValueError(f"port {port} of 127.0.0.1 {problem}: give another one, --logger web:{PORT + 1}") from error


class Web:
    """A page about the run in `path` at http://127.0.0.1:PORT; it reads what the run writes."""

    def __init__(self, path: Path, config: Config, done: int, port: int = PORT) -> None:
        with listener_on(port) as listener:
            command = [sys.executable, "-m", "detonation.report.live", str(path), str(listener.fileno())]
            nowhere = subprocess.DEVNULL
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, pass_fds=[listener.fileno()]
            )
        self.said = f"watch it at http://127.0.0.1:{port}"

    def write(self, record: Record) -> None:
        """Does nothing: the page reads the metrics file."""

    def close(self) -> None:
        """Ends the page."""
        self._process.communicate()
