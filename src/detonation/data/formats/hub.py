"""Data sets of the Hugging Face hub, spelled `hf:NAME` or `hf:NAME:CONFIG`, and those on disk, by `datasets`."""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from detonation.data.download.extras import needs
from detonation.data.formats.documents import files_of

PREFIX = "hf:"
_SAVED = ("dataset_dict.json", "state.json")
"""The marks of a directory that `save_to_disk` has written."""
_BUILDERS = {".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}


def is_hub(source: str) -> bool:
    """True for the spelling of a data set of the hub, and for a directory of `save_to_disk`."""
    return source.startswith(PREFIX) or is_saved(Path(source).expanduser())


def is_saved(path: Path) -> bool:
    """True for a directory that `datasets` has saved."""
    return any((path / mark).is_file() for mark in _SAVED)


def label(source: str) -> str:
    """Shortens a source to a label for figures.

    >>> label("hf:allenai/c4:en")
    'c4'
    """
    return _parts(source)[0].rstrip("/").rsplit("/", 1)[-1]


def hub_rows(source: str, split: str) -> Any:
    """Loads one split as a `datasets.Dataset`; `split` may be a slice such as `train[:1%]`, but of a saved directory.

    Raises `ValueError` in one line where the set cannot be reached, or has no such configuration or split.
    """
    name, config = _parts(source)
    datasets = needs("datasets", "hub")
    with one_line(source):
        if not is_saved(Path(name).expanduser()):
            return datasets.load_dataset(name, config, split=split)
        found = datasets.load_from_disk(str(Path(name).expanduser()))
        if not hasattr(found, "column_names") or isinstance(found.column_names, dict):
            if split not in found:
                raise ValueError(f"no split {split}; there are {', '.join(found)}")
            return found[split]
        if split != "train":
            raise ValueError(f"no split {split}: the directory holds one set")
        return found


def stream(source: str, split: str) -> Any:
    """One split as a `datasets.IterableDataset`, of which nothing is read yet; also of a file or directory of rows.

    Raises `ValueError` as `hub_rows` does.
    """
    datasets, name = needs("datasets", "hub"), _parts(source)[0]
    path = Path(source).expanduser()
    with one_line(source):
        if is_saved(Path(name).expanduser()):
            return hub_rows(source, split).to_iterable_dataset()
        if source.startswith(PREFIX):
            return datasets.load_dataset(*_parts(source), split=split, streaming=True)
        files = files_of(path) if path.is_dir() else [path]
        kinds = {_BUILDERS.get(file.suffix.lower()) for file in files}
        builder = kinds.pop()
        if kinds or builder is None:
            raise ValueError(f"a stream reads files of one suffix, of {', '.join(_BUILDERS)}")
        return datasets.load_dataset(builder, data_files=list(map(str, files)), split="train", streaming=True)


@contextlib.contextmanager
def one_line(source: str) -> Iterator[None]:
    """Turns the errors of `datasets` into a `ValueError` of one line that names the source."""
    bars = getattr(sys.modules.get("datasets"), "disable_progress_bars", None)
    if bars is not None:
        bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each try
    try:
        yield
    except ConnectionError as error:
        raise ValueError(f"{source}: the hub cannot be reached from here ({_first_line(error)})") from error
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"{source}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def column(rows: Any, name: str | None, usual: Sequence[str]) -> Any:
    """Returns the values of column `name`, or without a name of the first `usual` column that exists."""
    return rows[column_name(rows, name, usual)]


def column_name(rows: Any, name: str | None, usual: Sequence[str]) -> str:
    """`name`, or without one the first `usual` column of `rows`; raises `ValueError` where there is none."""
    wanted = [name] if name is not None else list(usual)
    for candidate in wanted:
        if candidate in rows.column_names:
            return candidate
    raise ValueError(f"no column {' or '.join(wanted)}; there are {', '.join(rows.column_names)}")


def refuse(source: str, **settings: Any) -> None:
    """Raises `ValueError` for a hub setting that another `source` would ignore."""
    for name, value in settings.items():
        if value is not None:
            raise ValueError(f"{name} is for sources hf:NAME; {source} would ignore it")


def _parts(source: str) -> tuple[str, str | None]:
    name, _, config = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise ValueError(f"{source!r} names no data set: write hf:NAME or hf:NAME:CONFIG")
    return name, config or None
