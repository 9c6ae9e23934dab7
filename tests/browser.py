"""Drives a headless Chromium by the DevTools protocol over two pipes; needs nothing but the browser."""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path

from limits import LIMIT_S

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
)


def found():
    """The path of the first browser of `NAMES` that is installed, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page. `complaints`: messages of its console; `requests`: URLs that it fetched."""

    def __init__(self, path, profile: Path):
        (theirs, self._write), (self._read, answers) = _high(os.pipe()), _high(os.pipe())
        flags = [
            "--headless=new",
            "--remote-debugging-pipe",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
        ]
        quiet = [
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-extensions",
        ]
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox as root
        argv = [path, *flags, *quiet, *root, f"--user-data-dir={profile}", "about:blank"]
        null = [
            (os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)
        ]
        pipes = [(os.POSIX_SPAWN_DUP2, theirs, 3), (os.POSIX_SPAWN_DUP2, answers, 4)]
        self._pid = os.posix_spawn(
            path, argv, os.environ, file_actions=[*null, *pipes], setsid=True
        )
        os.close(theirs), os.close(answers)
        self._buffer, self._number, self._session = b"", 0, None
        self.complaints, self.requests, self._loaded = [], [], False

    def __enter__(self):
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._read), os.close(self._write)

    def show(self, url, width, dark=False):
        """Loads `url` in a window of `width` CSS pixels (a phone below 600), in light or dark mode."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self._call("Page.navigate", url=url)
        while not self._loaded:
            self._take()

    def evaluate(self, expression, wait=False):
        """The value of a JavaScript expression in the page; with `wait` that of its promise."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=wait
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self):
        """The whole page as PNG."""
        return base64.b64decode(
            self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        )

    def _call(self, method, **parameters):
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._take()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def _take(self):
        """Reads the next message and records events."""
        limit = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], limit - time.monotonic())[0], (
                "the browser does not answer"
            )
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser has ended"
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params"))
        return message

    def _note(self, method, parameters):
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(parameters)


def _high(descriptors):
    """Copies `descriptors` to numbers above those that the browser uses."""
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    return copies
