"""How many files and sockets a process may have open: as many as the system lets it."""

import resource
from contextlib import suppress

LEAST_OPEN = 64
"""Number of open files below which no rank can meet the others and save."""
_MOST_OPEN = 1 << 20
"""More is of no use, and some programs look at each number up to the limit."""


def allow_open_files() -> None:
    """Raises the soft limit of open files to the hard one.

    gloo aborts in its accept where descriptors run out, and keeps those of strangers that connect.
    Raises `ValueError` if the hard limit is too low for any run.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        most = _MOST_OPEN
    else:
        most = min(hard, _MOST_OPEN)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # of a sandbox that lets nobody change it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN:
        raise ValueError(
            f"a process may open {soft} files here, a rank needs at least {LEAST_OPEN}: raise the "
            f"limit with ulimit -n {LEAST_OPEN * 16}"
        )
