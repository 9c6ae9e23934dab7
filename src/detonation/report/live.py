"""Page of a run in training, for `train --web`: a separate process serves it on 127.0.0.1.

The process draws on request, at most every two seconds, and ends with its parent.
"""

import os
import signal
import socket
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean

from detonation.report.figures import charts
from detonation.report.page import rendered, subtitle, waits_grid
from detonation.report.read import FILES, Run, agreeing_s, read_begun, records
from detonation.report.words import duration, loss_text, size_text

_EVERY_S = 2.0
_SILENT_S = 5.0
"""Seconds after which a connection without a request is closed."""
_LATEST = 20
_HOSTS = ("127.0.0.1", "localhost")


def html(directory: Path) -> str:
    """Page about the run in `directory` so far."""
    run = read_begun(directory)
    levels = run.settings["scheme"]
    if not isinstance(levels, list):
        levels = [levels]
    scheme = "+".join(level["name"] for level in levels)
    page = {
        "title": run.name,
        "subtitle": f"{scheme} {subtitle([run])} · in training",
        "runs": [run],
        "live": True,
    }
    if not (directory / FILES[0]).stat().st_size:
        return rendered(**page, tiles=[("0", "steps: the first one sets up")])
    run = replace(run, records=records(directory / FILES[0]))
    loss, costs = charts([run])
    waits = next((record["waits"] for record in reversed(run.records) if "waits" in record), None)
    return rendered(**page, tiles=progress(run), loss=loss, costs=costs, waits=waits_grid(waits))


def progress(run: Run) -> list[tuple[str, str]]:
    """Progress of a run in training, as numbers with labels."""
    steps = run.summary["steps"]
    done = run.records[-1]["step"]
    latest = run.records[-_LATEST:]
    step_s = fmean(record["seconds"] for record in latest)
    loss = fmean(record["loss"] for record in latest)
    sent = run.bytes_so_far()[-1]
    waited = sum(record.get("waited_s", 0.0) + agreeing_s(record) for record in run.records)
    return [
        (f"{done:,} of {steps:,}", "steps"),
        (loss_text(loss), "training loss, mean of the last steps"),
        *((loss_text(loss), "validation loss") for _, loss in run.validations()[-1:]),
        (size_text(sent / len(run.records)), "sent per step by a replica, on average"),
        (size_text(sent), "sent by a replica so far"),
        (duration(step_s), "per step"),
        (f"{waited / run.seconds_so_far()[-1]:.1%}", "of the time waiting for others"),
        (duration(step_s * (steps - done)), "left"),
    ]


def serve(directory: Path, listener: socket.socket) -> ThreadingHTTPServer:
    """HTTP server on `listener` for the page about the run in `directory`."""
    lock = threading.Lock()
    drawn_at = -_EVERY_S
    page = b""

    class Handler(BaseHTTPRequestHandler):
        timeout = _SILENT_S

        def do_GET(self) -> None:
            nonlocal drawn_at, page
            host = self.headers.get("Host", "").partition(":")[0]
            content = b""
            code = 404
            if host not in _HOSTS:  # another website may resolve its own name to this address
                code = 403
            elif self.path == "/":
                code = 200
                with lock:  # matplotlib can draw for only one request at a time
                    if time.monotonic() - drawn_at >= _EVERY_S:
                        page = html(directory).encode()
                        drawn_at = time.monotonic()
                    content = page
            self.send_response(code)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Prints nothing, because the terminal shows the run."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_address = listener.getsockname()
    return server


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(10)
    server = serve(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()  # read returns when the parent process ends
