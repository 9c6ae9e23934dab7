"""Files that are there whole or not at all. Pure Python, a leaf."""

import os
from pathlib import Path


def write_whole(path: Path, content: bytes | bytearray) -> None:
    """Puts `content` at `path`, on the disk when it returns: after a crash there is the old file or the new one.

    Raises `OSError` where it cannot; then the old file is as it was, and nothing lies beside it.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
