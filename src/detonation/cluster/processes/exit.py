"""How a rank ends: with its launcher, however that ended, and without waiting for the network library."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From here on this process ends when process `parent`, which started it, does. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call above
            os._exit(1)


def die_with_agent(env: Mapping[str, str]) -> None:
    """The same for a rank of torchrun, whose agent leaves its ranks behind when it is killed.

    Not for srun: Linux means the thread that started a process, and only torchrun is known to do so from its main one.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        die_with(os.getppid())


def end_now(code: int) -> NoReturn:
    """Ends this process with `code`, from any thread, with what it printed but without tearing anything down.

    The network libraries have threads of their own, which may still hold on to Python's objects or wait for a peer that
    is gone: an interpreter that is taken down around them may hang or abort.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
