"""Data sets of the Hugging Face hub, written `hf:NAME` or `hf:NAME:CONFIG`, through the ordinary `load_dataset`."""

from collections.abc import Sequence
from typing import Any

PREFIX = "hf:"


def is_hub(source: str) -> bool:
    """Whether `source` names a data set of the hub."""
    return source.startswith(PREFIX)


def label(source: str) -> str:
    """A short name for figures.

    >>> label("hf:allenai/c4:en")
    'c4'
    """
    return _parts(source)[0].rsplit("/", 1)[-1]


def rows(source: str, split: str) -> Any:
    """The rows of one split, a `datasets.Dataset`; `split` may be a slice such as `train[:1%]`.

    What `load_dataset` raises for an unknown name, configuration or split passes through.
    """
    name, config = _parts(source)
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{source} needs the datasets package: pip install 'detonation-torch[hub]'") from error
    return datasets.load_dataset(name, config, split=split)


def column(rows: Any, name: str | None, usual: Sequence[str]) -> Any:
    """The values of column `name`, or of the first of the `usual` ones that is there."""
    wanted = [name] if name is not None else list(usual)
    for candidate in wanted:
        if candidate in rows.column_names:
            return rows[candidate]
    raise ValueError(f"no column {' or '.join(wanted)}; there are {', '.join(rows.column_names)}")


def refuse(source: str, **settings: Any) -> None:
    """Raises `ValueError` for a setting of the hub that `source`, which is elsewhere, would ignore."""
    for name, value in settings.items():
        if value is not None:
            raise ValueError(f"{name} is for sources hf:NAME; {source} would ignore it")


def _parts(source: str) -> tuple[str, str | None]:
    name, _, config = source.removeprefix(PREFIX).partition(":")
    if not name:
        raise ValueError(f"{source!r} names no data set: write hf:NAME or hf:NAME:CONFIG")
    return name, config or None
