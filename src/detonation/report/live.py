"""The page of a run in training, for `train --web`. A separate process serves the page on
127.0.0.1.

The separate process draws the page on request, at most every two seconds, and ends when its parent
process ends.
"""

import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from detonation.report.page import html_of_begun

_EVERY_S = 2.0
_SILENT_S = 5.0
"""Seconds after which the server closes a connection on which no request has arrived."""
_HOSTS = ("127.0.0.1", "localhost")


def serve(directory: Path, listener: socket.socket) -> ThreadingHTTPServer:
    """Creates an HTTP server on `listener` that serves the page about the run in `directory`."""
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
            # refuse other host names: another website may let its name resolve to this address
            if host not in _HOSTS:
                code = 403
            elif self.path == "/":
                code = 200
                with lock:  # matplotlib can draw for only one request at a time
                    if time.monotonic() - drawn_at >= _EVERY_S:
                        page = html_of_begun(directory, "in training", live=True).encode()
                        drawn_at = time.monotonic()
                    content = page
            self.send_response(code)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Prints nothing, because the terminal shows the run itself."""

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
    sys.stdin.buffer.read()  # the pipe is closed when the parent process ends
