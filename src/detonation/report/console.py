"""The consoles of rich that the package prints with, and the end of a stream that nobody reads any more."""

import os
import sys
from typing import IO

from rich.console import Console


class PlainConsole(Console):
    """Prints text as it is, in lines that reach a pipe whole, whatever its width.

    Raises `BrokenPipeError` where nobody reads stdout any more, and drops its lines where nobody reads another stream.
    rich would end the process, in the middle of a run, and with a code that says nothing.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(file=stream, highlight=False, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error."""
        if self.file is sys.stdout:
            raise
        discard(self.file)


def discard(stream: IO[str]) -> None:
    """Lets all that `stream` still holds, and all that it is given from now on, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
