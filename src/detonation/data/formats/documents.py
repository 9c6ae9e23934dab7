"""Documents of one's own: text files, rows of JSON lines, CSV and Parquet, and directories of them."""

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from detonation.data.download.extras import needs

Row = Mapping[str, Any]
PLAIN = {"", ".txt", ".text", ".md"}
"""Suffixes of files that are one document each."""


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number} is {line.strip()[:40]!r}, must be an object")
                yield row


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # 128 KiB otherwise, which a text may exceed
    with path.open(encoding="utf-8", newline="") as lines:
        try:
            yield from csv.DictReader(lines)
        except csv.Error as error:
            raise ValueError(f"{path} is no CSV: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    parquet, damaged = needs("pyarrow.parquet", "hub"), needs("pyarrow", "hub").ArrowException
    with path.open("rb") as file:
        try:
            for batch in parquet.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
        except (damaged, OSError) as error:  # of either kind, by the place of the damage
            reason = str(error).split("\n")[0].rstrip(".")
            raise ValueError(f"{path} is no whole Parquet file: {reason}; copy or download it again") from error


ROWS: Mapping[str, Callable[[Path], Iterator[Row]]] = {".jsonl": _json_lines, ".csv": _csv, ".parquet": _parquet}
"""Suffixes of files of rows, with their readers."""


def files_of(path: Path) -> list[Path]:
    """The files of a source: `path` itself, or all files below a directory, hidden ones aside, by name.

    Raises:
        ValueError: There is none, or one has a suffix that cannot be read.
    """
    inside = (file for file in path.rglob("*") if file.is_file())
    found = sorted(f for f in inside if not any(p.startswith(".") for p in f.relative_to(path).parts))
    files = found if path.is_dir() else [path]
    other = [file for file in files if file.suffix.lower() not in {*PLAIN, *ROWS}]
    readable = ", ".join(sorted({*PLAIN, *ROWS} - {""}))
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise ValueError(f"{other[0]}{more} cannot be read as text: a source holds {readable}")
    if not files:
        raise ValueError(f"{path} holds no file of text ({readable})")
    return files


@contextlib.contextmanager
def in_file(path: Path) -> Iterator[None]:
    """Turns the errors of a `path` that cannot be read, or holds no Unicode, into a `ValueError` that names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}"
        remedy = f"convert it, as with iconv -f LATIN1 -t UTF-8 {path.name}"
        raise ValueError(f"{path} is not UTF-8 ({byte}): {remedy}") from error
    except UnicodeEncodeError as error:  # JSON can spell half a character
        half = f"U+{ord(error.object[error.start]):04X}"
        raise ValueError(f"{path} has text that is not Unicode ({half}): remove or replace it") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


def documents(path: Path, column: str | None) -> list[bytes]:
    """The documents of a file or a directory: a text file is one, and so is the `column` of each row ("text").

    Raises:
        ValueError: A file cannot be read, has no such column, or has no columns and `column` is given.
    """
    files = files_of(path)
    if column is not None and all(file.suffix.lower() in PLAIN for file in files):
        raise ValueError(f"column is for sources of rows; {path} would ignore it")
    found: list[bytes] = []
    for file in files:
        read = ROWS.get(file.suffix.lower())
        with in_file(file):
            if read is None:
                found.append(file.read_bytes())
            else:
                found.extend(str(value).encode() for value in values_of(file, read(file), column or "text") if value)
    return found


def values_of(path: Path, rows: Iterable[Row], column: str) -> Iterator[Any]:
    """The values of `column` in `rows`; raises `ValueError` with the columns that there are where one has it not."""
    for number, row in enumerate(rows, start=1):
        if column not in row:
            raise ValueError(f"{path}, row {number} has no column {column}; there are {', '.join(map(str, row))}")
        yield row[column]
