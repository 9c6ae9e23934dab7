"""Raises the number of files and sockets that a process may have open."""

import resource
from contextlib import suppress

LEAST_OPEN = 64
"""Number of open files that a rank needs to meet the others and to save."""
OPEN_PER_RANK = 3
"""Number of open files needed per other rank: connections of the default group, of saving and of
the axis.
"""
_SAFE_OPEN = 4096
_MOST_OPEN = 1 << 20
"""Higher limits are useless, and slow down programs that visit each number up to the limit."""


def allow_open_files(ranks: int = 1) -> None:
    """Raises the soft limit of open files to the hard limit.

    gloo aborts if it accepts a connection without a free descriptor, and it never closes
    connections of other programs. Raises `ValueError` if the hard limit is too low for a run of
    `ranks` ranks.
    """
    least = LEAST_OPEN + OPEN_PER_RANK * (ranks - 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN
    if hard != resource.RLIM_INFINITY:
        most = min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a sandbox may refuse to change the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft != resource.RLIM_INFINITY and soft < least:
        among = ""
        if ranks > 1:
            among = f" among {ranks} ranks"
        raise ValueError(
            f"a process may open {soft} files here, a rank needs at least {least}{among}: raise the"
            f" limit with ulimit -n {least * 16}"
        )


def few_open_files() -> str:
    """A warning to append to a log line, if a few foreign connections to gloo's ports can end this
    process; "" if the process may open enough files.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _SAFE_OPEN:
        return (
            f"; a port scan may end the run, because a process may open {soft} files here: raise"
            f" the hard limit (ulimit -Hn) to {_SAFE_OPEN}"
        )
    return ""
