"""Files are opened in `whole_files` alone, which follows no link and waits for no pipe."""

import ast
import os
import socket
from pathlib import Path

import pytest

import detonation
from detonation import whole_files

SOURCE = Path(detonation.__file__).parent
OPENER = "whole_files.py"
WAYS = {
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "mkstemp", "memmap",
    "tofile", "fromfile", "NamedTemporaryFile",
}  # fmt: skip
OF_PACKAGE = "a file of the installed package"
OF_USER = "a file that the user names, which may be a link or a pipe"
OF_SYSTEM = "a file of the system"
OF_CACHE = "a file of the user's own cache of data, and what the user names as data"
ELSEWHERE = {
    ("__init__.py", "open"): OF_PACKAGE,
    ("report/page.py", "read_text"): OF_PACKAGE,
    ("plan/losses.py", "read_text"): OF_PACKAGE,
    ("cli/verbs.py", "read_text"): OF_PACKAGE,
    ("data/packages.py", "read_text"): OF_CACHE,
    ("data/packages.py", "read_bytes"): OF_CACHE,
    ("data/packages.py", "write_text"): OF_CACHE,
    ("data/packages.py", "write_bytes"): OF_CACHE,
    ("data/packages.py", "open"): OF_CACHE,
    ("data/labels.py", "read_text"): OF_CACHE,
    ("data/text.py", "read_bytes"): OF_CACHE,
    ("data/images.py", "read_bytes"): OF_CACHE,
    ("data/images.py", "open"): OF_CACHE,
    ("data/translation.py", "open"): OF_CACHE,
    ("data/readers.py", "open"): OF_USER,
    ("data/readers.py", "read_bytes"): OF_USER,
    ("cli/command.py", "read_text"): OF_USER,
    ("train/recipe/resolve.py", "read_text"): OF_USER,
    ("feed/token.py", "open"): OF_USER,
    ("cluster/network/profile.py", "read_text"): OF_USER,
    ("cluster/network/profile.py", "write_text"): OF_USER,
    ("kernels/native.py", "read_text"): OF_SYSTEM,
    ("kernels/native.py", "read_bytes"): OF_PACKAGE,
    ("kernels/cache.py", "read_text"): OF_SYSTEM,
    ("cluster/interface.py", "read_text"): OF_SYSTEM,
    ("interrupts.py", "open"): OF_SYSTEM,
    ("cluster/network/throttled.py", "mkstemp"): "it makes a new file under a name of its own",
    ("report/terminal.py", "open"): OF_SYSTEM,
    ("feed/weights/folders.py", "open"): "an object of a remote store, by fsspec",
    ("checkpoint/gather.py", "touch"): "a function of `checkpoint/files/disk.py`, by whole_files",
    ("train/output/directory.py", "write_text"): "a function of its own, by whole_files",
    ("train/output/metrics.py", "write_text"): "a function of `directory.py`, by whole_files",
    ("core/exchange/exchange.py", "open"): "a message, which the guard opens",
    ("core/exchange/two_stage.py", "open"): "a message, which the guard opens",
    ("engines/triton/device_guard.py", "open"): "a message, which the guard opens",
}


def ways_in(path):
    """The calls in a file of the package that may open a file, but for those of `whole_files`."""
    tree = ast.parse((SOURCE / path).read_text())
    own = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "detonation.whole_files"
        for alias in node.names
    }
    through = {
        node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (isinstance(node.func, ast.Attribute) or getattr(node.func, "id", "") not in own)
        and isinstance(node.func, ast.Attribute | ast.Name)
        and not (isinstance(node.func, ast.Attribute) and is_directory(node.func.value))
    }
    return {(path, way) for way in through & WAYS}


def is_directory(value):
    """True for the run directory's own functions, which write through `whole_files`."""
    return isinstance(value, ast.Name) and value.id == "directory"


def test_files_are_opened_by_one_file_alone():
    paths = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
    found = {way for path in paths if path != OPENER for way in ways_in(path)}
    assert sorted(found - ELSEWHERE.keys()) == []
    assert sorted(ELSEWHERE.keys() - found) == [], "an exception that nothing needs"


@pytest.fixture
def odd(tmp_path):
    """By name, an entry that is no ordinary file."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    yield tmp_path
    listener.close()
    assert (tmp_path / "victim").read_text() == "precious" and not (tmp_path / "none").exists()


ODD = ["link", "nowhere", "zero", "folder", "fifo", "socket"]


@pytest.mark.parametrize("name", ODD)
def test_nothing_but_an_ordinary_file_is_read(odd, name):
    with pytest.raises(OSError, match=r"link, which is not followed|no ordinary file|directory"):
        whole_files.read_bytes(odd / name)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC])
@pytest.mark.parametrize("name", ODD)
def test_nothing_but_an_ordinary_file_is_written(odd, name, flags):
    with pytest.raises(OSError):
        os.close(whole_files.opened(odd / name, flags))


@pytest.mark.parametrize("name", [name for name in ODD if name != "folder"])
def test_an_odd_entry_is_replaced_and_never_followed(odd, name):
    (odd / "file.part").unlink(missing_ok=True)
    (odd / name).rename(odd / "file.part")
    whole_files.write_whole(odd / "file", b"new")
    (odd / "file").rename(odd / name)
    (odd / "again").symlink_to(odd / "victim")
    whole_files.write_whole(odd / "again", b"newer")
    assert (odd / name).read_bytes() == b"new" and (odd / "again").read_bytes() == b"newer"
    assert not (odd / "again").is_symlink()


def test_a_file_that_the_user_names_may_be_a_link(odd):
    assert whole_files.read_text(odd / "link", links=True) == "precious"
    with pytest.raises(OSError, match="no ordinary file"):
        whole_files.read_text(odd / "zero", links=True)


def test_a_file_is_read_up_to_a_bound(tmp_path):
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="it has more than 67,108,864 bytes"):
        whole_files.read_bytes(tmp_path / "sparse")


def test_two_writers_of_one_file_leave_no_mixture(tmp_path):
    def parts():
        yield memoryview(b"mine")
        whole_files.write_whole(tmp_path / "file", b"theirs")

    with pytest.raises(OSError, match=r"another process writes it, too|No such file"):
        whole_files.write_whole(tmp_path / "file", parts())
    assert (tmp_path / "file").read_bytes() == b"theirs"
