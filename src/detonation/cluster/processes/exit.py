"""How a rank ends: together with its launcher, and without waiting for the network library."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Makes the kernel end this process as soon as its parent, process `parent`, ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the call above
            os._exit(1)


def die_with_agent(env: Mapping[str, str]) -> None:
    """Applies `die_with_parent` to a rank of torchrun, whose agent leaves its ranks behind when it is killed.

    Not for srun: Linux watches the thread that started a process; torchrun alone is known to use its main thread.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        die_with_parent(os.getppid())


def end_now(code: int) -> NoReturn:
    """Flushes the output and ends this process with `code` at once, from any thread.

    The network libraries have threads of their own, which may hold Python objects or wait for a peer that is gone. An
    interpreter that shuts down around them may hang or abort.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
