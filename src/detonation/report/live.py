"""The page of a run while it trains, for `train --web`: a process of its own serves it on 127.0.0.1.

It draws when somebody looks, at most every two seconds, and ends with the process that started it.
"""

import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean

from detonation.report.figures import charts
from detonation.report.page import rendered, subtitle, waits_grid
from detonation.report.read import Run, agreeing_s, read_begun
from detonation.report.words import duration, loss_text, size_text

_EVERY_S = 2.0
_LATEST = 20
_HOSTS = ("127.0.0.1", "localhost")


class Live:
    """The page about the run in `directory` so far; reads of its metrics only what is new."""

    def __init__(self, directory: Path) -> None:
        self._run, self._read = read_begun(directory), 0
        self._lock, self._drawn, self._page = threading.Lock(), -_EVERY_S, b""

    def page(self) -> bytes:
        """The page in UTF-8; matplotlib draws for one reader at a time."""
        with self._lock:
            if time.monotonic() - self._drawn >= _EVERY_S:
                self._read += self._run.read_on(self._read)
                self._page, self._drawn = _html(self._run).encode(), time.monotonic()
            return self._page


def _html(run: Run) -> str:
    levels = run.settings["scheme"]
    scheme = "+".join(level["name"] for level in (levels if isinstance(levels, list) else [levels]))
    page = {"title": run.name, "subtitle": f"{scheme} {subtitle([run])} · in training", "runs": [run], "live": True}
    if not run.records:
        return rendered(**page, tiles=[("0", "steps: the first one sets up")])
    loss, costs = charts([run])
    waits = next((record["waits"] for record in reversed(run.records) if "waits" in record), None)
    costs = [chart for chart in costs if chart.name == "step-time"]
    return rendered(**page, tiles=tiles(run), loss=loss, costs=costs, waits=waits_grid(waits))


def tiles(run: Run) -> list[tuple[str, str]]:
    """The state of a run in training, each number with its label."""
    records, latest, steps = run.records, run.records[-_LATEST:], run.summary["steps"]
    step_s = fmean(record["seconds"] for record in latest)
    waited = sum(record.get("waited_s", 0.0) + agreeing_s(record) for record in records)
    sent, validations = run.bytes_so_far()[-1], run.validations()
    return [
        (f"{records[-1]['step']:,} of {steps:,}", "steps"),
        (loss_text(fmean(record["loss"] for record in latest)), "training loss, mean of the last steps"),
        *([(loss_text(validations[-1][1]), "validation loss")] if validations else []),
        (size_text(sent / len(records)), "sent per step by a replica, on average"),
        (size_text(sent), "sent by a replica so far"),
        (duration(step_s), "per step"),
        (f"{waited / run.seconds_so_far()[-1]:.1%}", "of the time waiting for others"),
        (duration(step_s * (steps - records[-1]["step"])), "left"),
    ]


def serve(directory: Path, listener: socket.socket) -> ThreadingHTTPServer:
    """A server on `listener` of the page about the run in `directory`."""
    live = Live(directory)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").partition(":")[0]
            # A page from elsewhere reaches this server under its own name only.
            code = 403 if host not in _HOSTS else 200 if self.path == "/" else 404
            content = live.page() if code == 200 else b""
            self.send_response(code)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Says nothing: the screen is that of the run."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket, server.server_address = listener, listener.getsockname()
    return server


def main(directory: str, descriptor: str) -> None:
    """Serves until the standard input ends, which the process that started this one holds open."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    server = serve(Path(directory), socket.socket(fileno=int(descriptor)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
