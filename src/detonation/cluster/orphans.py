"""No rank outlives its launcher: the kernel ends it when the launcher is gone, however that ended."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

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
