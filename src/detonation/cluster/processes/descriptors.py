"""How many files and sockets a process may have open: as many as the system lets it."""

import resource
from contextlib import suppress

LEAST_OPEN = 64
"""The number of open files below which no rank can meet the others and save."""
OPEN_PER_RANK = 3
"""More of them for each other rank: connections in the group of all, of saving, and of the axis."""
_MOST_OPEN = 1 << 20
"""More is of no use, and some programs look at each number up to the limit."""


def allow_open_files(ranks: int = 1) -> None:
    """Raises the soft limit of open files to the hard one.

    gloo aborts in its accept where descriptors run out, and keeps those of strangers that connect.
    Raises `ValueError` where the hard limit is too low for a run of so many ranks.
    """
    least = LEAST_OPEN + OPEN_PER_RANK * (ranks - 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # of a sandbox that lets nobody change it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft != resource.RLIM_INFINITY and soft < least:
        among = f" among {ranks} ranks" if ranks > 1 else ""
        raise ValueError(
            f"a process may open {soft} files here, a rank needs at least {least}{among}: raise the "
            f"limit with ulimit -n {least * 16}"
        )
