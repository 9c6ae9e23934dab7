"""The consoles of rich that the package prints with, and the end of a stream that nobody reads any more."""

import os
from typing import IO

from rich.console import Console


class PlainConsole(Console):
    """Prints text as it is, in lines that reach a pipe whole, whatever its width.

    Raises `BrokenPipeError` where nobody reads the pipe any more. rich would end the process, in the middle of a run,
    and with a code that says nothing.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(file=stream, highlight=False, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error."""
        raise


def discard(stream: IO[str]) -> None:
    """Lets all that `stream` still holds, and all that it is given from now on, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
