"""Data sets of the Hugging Face hub, spelled `hf:NAME` or `hf:NAME:CONFIG`, loaded with its `datasets` package."""

from collections.abc import Sequence
from typing import Any

PREFIX = "hf:"


def is_hub(source: str) -> bool:
    """True for the spelling of a data set of the hub."""
    return source.startswith(PREFIX)


def label(source: str) -> str:
    """Shortens a source to a label for figures.

    >>> label("hf:allenai/c4:en")
    'c4'
    """
    return _parts(source)[0].rsplit("/", 1)[-1]


def hub_rows(source: str, split: str) -> Any:
    """Loads one split as a `datasets.Dataset`; `split` may be a slice such as `train[:1%]`.

    Errors of `datasets.load_dataset` for an unknown name, configuration or split pass through.
    """
    name, config = _parts(source)
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{source} needs the datasets package: pip install 'detonation-torch[hub]'") from error
    return datasets.load_dataset(name, config, split=split)


def column(rows: Any, name: str | None, usual: Sequence[str]) -> Any:
    """Returns the values of column `name`, or without a name of the first `usual` column that exists."""
    wanted = [name] if name is not None else list(usual)
    for candidate in wanted:
        if candidate in rows.column_names:
            return rows[candidate]
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
