"""Files that are there whole or not at all. Pure Python, a leaf."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes | bytearray | Iterable[memoryview]) -> None:
    """Puts `content`, or its parts one after another, at `path`, on the disk when it returns.

    After a crash there is the old file or the new one. Raises `OSError` where it cannot; then the
    old file stays, and nothing lies beside it.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes | bytearray) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
