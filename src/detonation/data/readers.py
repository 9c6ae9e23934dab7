"""Reads documents and rows from text files, JSON lines, CSV and Parquet files, and from the Hugging
Face hub.
"""

import codecs
import contextlib
import csv
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from detonation.choices import first_line, needs

Row = Mapping[str, Any]
PREFIX = "hf:"
PLAIN = {"", ".txt", ".text", ".md"}
"""Suffixes of files that hold one document each."""
_SAVED = ("dataset_dict.json", "state.json")
"""A directory that `save_to_disk` has written holds one of these files."""
_AT_ONCE = 1024
"""Number of rows of a Parquet file that are in memory at a time."""


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:  # skips a byte order mark, as Excel writes it
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}, line {number} is {line.strip()[:40]!r}, but must be a JSON object"
                )
            yield row


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # a text may exceed csv's default limit of 128 KiB
    with path.open(encoding="utf-8-sig", newline="") as lines:
        try:
            yield from csv.DictReader(lines)
        except csv.Error as error:
            raise ValueError(f"{path} is no CSV: {error}; correct the file") from error


def _parquet(path: Path) -> Iterator[Row]:
    parquet = needs("pyarrow.parquet", "hub")
    damaged = needs("pyarrow", "hub").ArrowException
    with path.open("rb") as file:
        try:
            for batch in parquet.ParquetFile(file).iter_batches(_AT_ONCE):
                yield from batch.to_pylist()
        # depending on the damage in the file, pyarrow raises ArrowException or OSError
        except (damaged, OSError) as error:
            reason = first_line(error).rstrip(".")
            raise ValueError(
                f"{path} is no whole Parquet file: {reason}; copy or download it again"
            ) from error


def _text_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        yield from ({"text": line.removesuffix("\n")} for line in lines)


ROWS: Mapping[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""Readers of files with rows, by the suffix of the file."""
_STREAMED = {**ROWS, ".txt": _text_lines}
"""Readers of the files of a stream. In a stream each line of a text file is a row."""


def files_of(path: Path) -> list[Path]:
    """Returns the files of a source: `path` itself or, if `path` is a directory, all visible files
    below it, sorted by name. Follows links to folders.

    Raises:
        ValueError: There is no file, a file has a suffix that cannot be read, or a link leads back
            to a folder that contains the link.
    """
    files = [path]
    if path.is_dir():
        files = sorted(_visible_files(path, ()))
    require_suffix(files, {*PLAIN, *ROWS}, "text")
    if not files:
        raise ValueError(f"{path} holds no text files: add some ({_listed({*PLAIN, *ROWS})})")
    return files


def require_suffix(files: Iterable[Path], suffixes: Iterable[str], kind: str) -> None:
    """Raises `ValueError` if a file has none of the `suffixes`. `kind` is the noun for the error,
    such as "text".
    """
    other = [file for file in files if file.suffix.lower() not in suffixes]
    if other:
        raise ValueError(
            f"{first_of(other)} cannot be read as {kind}: give files of type {_listed(suffixes)}"
        )


def first_of(items: Sequence[object]) -> str:
    """Returns the first of `items` and the number of further items, as text for a message.

    >>> first_of(["a.gif", "b.gif", "c.gif"])
    'a.gif and 2 more'
    """
    if len(items) == 1:
        return str(items[0])
    return f"{items[0]} and {len(items) - 1} more"


def _listed(suffixes: Iterable[str]) -> str:
    return ", ".join(sorted(filter(None, suffixes)))


def _visible_files(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Yields the files below `folder` that are not hidden.

    Args:
        above: The folders that contain `folder`, without links.
    """
    place = folder.resolve()
    if place in above:
        raise ValueError(f"{folder} is a link to {place}, which contains it: remove the link")
    for each in visible(folder):
        if each.is_dir():
            yield from _visible_files(each, (*above, place))
        elif each.is_file() or each.is_symlink():  # reading a broken link raises an error
            yield each


def visible(folder: Path) -> list[Path]:
    """Returns the entries of `folder` that are not hidden, sorted by name."""
    with in_file(folder):
        return sorted(each for each in folder.iterdir() if not each.name.startswith("."))


@contextlib.contextmanager
def in_file(path: Path) -> Iterator[None]:
    """Context manager that raises `ValueError` with the name of the file, if the file cannot be
    read or is not Unicode.
    """
    try:
        yield
    except UnicodeDecodeError as error:
        byte = f"byte 0x{error.object[error.start]:02x}"
        encoding = "LATIN1"
        if error.object[:2] in _WIDE_MARKS or b"\0" in error.object:
            encoding = "UTF-16"
        remedy = f"convert it, as with iconv -f {encoding} -t UTF-8 {path.name}"
        raise ValueError(f"{path} is not UTF-8 ({byte}): {remedy}") from error
    except UnicodeEncodeError as error:
        # JSON can contain half of a surrogate pair, which is no character
        half = f"U+{ord(error.object[error.start]):04X}"
        raise ValueError(
            f"{path} has text that is not Unicode ({half}): remove or replace it"
        ) from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from error


_WIDE_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _utf8(content: bytes) -> bytes:
    """Returns `content`. Raises `UnicodeDecodeError` unless `content` is text in UTF-8.

    The last character may be incomplete, because a corpus may be cut after a round number of bytes.
    Zero bytes are valid UTF-8, but this function refuses them, because they are a sign of UTF-16
    without a byte order mark.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(content), _CHUNK):
        decoder.decode(content[start : start + _CHUNK])
    zero = content.find(b"\0")
    if zero >= 0:
        near = content[max(zero - 1, 0) : zero + 1]
        raise UnicodeDecodeError("utf-8", near, len(near) - 1, len(near), "zero byte")
    return content


_CHUNK = 1 << 20
"""Number of bytes that are decoded at a time, to save memory."""


def documents(path: Path, column: str | None) -> list[bytes]:
    """Returns the documents of a file or a directory. A text file is one document. In a file with
    rows, each value of `column` is one document.

    Args:
        column: None for "text".

    Raises:
        ValueError: A file cannot be read or has no such column, or `column` is given for text
            files.
    """
    files = files_of(path)
    if column is not None and all(file.suffix.lower() in PLAIN for file in files):
        raise ValueError(
            f"column is for files with rows, but {path} holds plain text: leave column out"
        )
    found: list[bytes] = []
    for file in files:
        with in_file(file):
            if file.suffix.lower() in ROWS:
                texts = texts_of(file, column or "text")
                found.extend(text.encode() for text in texts if text)
            else:
                found.append(_utf8(file.read_bytes()).removeprefix(codecs.BOM_UTF8))
    return found


def values_of(path: Path, name: str) -> Iterator[Any]:
    """Yields the values of the column `name` in a file of rows. Raises `ValueError` if a row lacks
    this column.
    """
    for nth, row in enumerate(_STREAMED[path.suffix.lower()](path), start=1):
        if name not in row:
            raise ValueError(
                f"{path}, row {nth} has no column {name}: name one of its columns,"
                f" {', '.join(map(str, row))}"
            )
        yield row[name]


def texts_of(path: Path, name: str) -> Iterator[str]:
    """Yields the texts in the column `name` of a file of rows; see `text_in`."""
    return texts_in(str(path), values_of(path, name), name)


def texts_in(source: str, values: Iterable[object], name: str) -> Iterator[str]:
    """Yields the texts among the `values` of the column `name` of a source; see `text_in`."""
    numbered = enumerate(values, start=1)
    return (text_in(value, f"{source}, row {nth}", name) for nth, value in numbered)


def text_in(value: object, row: str, name: str) -> str:
    """Returns `value`, the text in the column `name` of `row`; "" if `value` is None.

    Raises `ValueError` for any other value. A number or a list is refused, because its text could
    differ from what its author wrote.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(
            f"{row} has {str(value)[:40]} in column {name}, must be text: write it in quotes, or"
            " name another column"
        )
    return value


def is_hub(source: str) -> bool:
    """True if `source` is `hf:NAME`, or a directory that `save_to_disk` has written."""
    return source.startswith(PREFIX) or is_saved(Path(source).expanduser())


def is_saved(folder: Path) -> bool:
    return any((folder / mark).is_file() for mark in _SAVED)


def label(source: str) -> str:
    """Shortens the name of a source on the hub to a label for figures.

    >>> label("hf:allenai/c4:en")
    'c4'
    """
    return _parts(source)[0].rstrip("/").rsplit("/", 1)[-1]


def column_of(rows: Any, name: str | None, usual: Sequence[str]) -> Any:
    """Returns the values of a column of a hub data set. If `name` is None, returns the first column
    of `usual` that exists.
    """
    return rows[column_name(rows, name, usual)]


def class_names(rows: Any, column: str) -> list[str]:
    """Returns the names of the classes in a column of labels of a hub data set, in the order of the
    numbers of the classes. Returns [] if the data set does not contain the names.
    """
    return list(getattr(rows.features[column], "names", ()))


def column_name(rows: Any, name: str | None, usual: Sequence[str]) -> str:
    """Returns `name` or, if it is None, the first column of `usual` that exists. Raises
    `ValueError` if there is no such column.
    """
    wanted = usual
    if name is not None:
        wanted = [name]
    for candidate in wanted:
        if candidate in rows.column_names:
            return candidate
    raise ValueError(f"no column {' or '.join(wanted)}: name one of {', '.join(rows.column_names)}")


def hub_rows(source: str, split: str) -> Any:
    """Loads one split as a `datasets.Dataset`.

    `split` may be a slice such as `train[:1%]`, except for a directory written by `save_to_disk`.
    Raises `ValueError` if the data set cannot be reached, or has no such configuration or split.
    """
    name, config = _parts(source)
    datasets = needs("datasets", "hub")
    with one_line(source):
        if not is_saved(Path(name).expanduser()):
            return datasets.load_dataset(name, config, split=split)
        splits = datasets.load_from_disk(str(Path(name).expanduser()))
        if not isinstance(splits, dict):
            splits = {"train": splits}
        if split not in splits:
            raise ValueError(f"no split {split}: name one of {', '.join(splits)}")
        return splits[split]


def stream(source: str, split: str, column: str) -> tuple[Any, dict[str, int]]:
    """Opens one split, or a file or directory of rows. Returns a `datasets.IterableDataset`, and
    the sizes of its files by name; no sizes if the files are on the hub.

    Files are read by the functions of this module, so a row has only the column `column`. The
    readers of `datasets` would treat file names as patterns, and guess the types of values.

    Raises `ValueError` for the same reasons as `hub_rows`.
    """
    datasets = needs("datasets", "hub")
    name, config = _parts(source)
    saved = Path(name).expanduser()
    with one_line(source):
        if is_saved(saved):
            whole = hub_rows(source, split)
            parts = [Path(part["filename"]) for part in whole.cache_files]
            return whole.to_iterable_dataset(), _sizes(parts, saved)
        if source.startswith(PREFIX):
            return datasets.load_dataset(name, config, split=split, streaming=True), {}
        path = Path(source).expanduser()
        files = files_of(path)
        require_suffix(files, _STREAMED, "a stream")
        # if an argument is a list, `datasets` can divide the list among the parts of the stream
        arguments = {"files": files, "column": column}
        rows = datasets.IterableDataset.from_generator(_text_rows, gen_kwargs=arguments)
        return rows, _sizes(files, path)


def _text_rows(files: Sequence[Path], column: str) -> Iterator[Row]:
    for file in files:
        with in_file(file):
            yield from ({column: text} for text in texts_of(file, column))


def _sizes(files: Iterable[Path], source: Path) -> dict[str, int]:
    """Returns the size of each file, by its name relative to `source`."""
    return {os.path.relpath(file, source): file.stat().st_size for file in files}


@contextlib.contextmanager
def one_line(source: str) -> Iterator[None]:
    """Context manager that turns an error of the library `datasets` into a `ValueError`. The
    message is one line that names the source.
    """
    bars = getattr(sys.modules.get("datasets"), "disable_progress_bars", None)
    if bars is not None:
        bars()
    # do not print a warning for each retry of a download
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        yield
    except ConnectionError as error:
        raise ValueError(
            f"{source}: the Hugging Face hub cannot be reached ({first_line(error)}): check the"
            " network, or give a path as source"
        ) from error
    except (ValueError, OSError, KeyError) as error:
        message = first_line(error)
        if source not in message:
            message = f"{source}: {message}"
        raise ValueError(message) from error


def refuse(source: str, **settings: Any) -> None:
    """Raises `ValueError` if any of the `settings` is given (not None), because they do not apply
    to `source`.
    """
    for name, value in settings.items():
        if value is not None:
            raise ValueError(f"{name} does not apply to source {source}: leave it out")


def _parts(source: str) -> tuple[str, str | None]:
    name, _, config = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise ValueError(f"{source!r} names no data set: write hf:NAME or hf:NAME:CONFIG")
    return name, config or None
