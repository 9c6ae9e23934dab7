"""The cache of compiled kernels: nobody else writes to it, what is in it is whole, and training goes on without it."""

import hashlib
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from detonation.kernels import cache, native

NAME = "native-0123.so"
ONLY_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home and an empty place for temporary files."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    tmp_path.chmod(0o755)
    for name in ("home", "tmp"):
        (tmp_path / name).mkdir(0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "home"


@pytest.fixture
def made():
    """How often each path was made."""
    return []


def get(made, content=b"code"):
    """What is read from the cache: the content without its checksum, and where it lies."""

    def make(path):
        made.append(path)
        path.write_bytes(content)

    return cache.cached(NAME, make, lambda path: (path.read_bytes()[:-32], path.parent))


def in_cache(home):
    return home / ".cache" / "detonation" / "kernels"


def test_a_library_is_made_once_in_a_directory_of_the_user_alone(home, made, caplog):
    assert get(made) == get(made) == (b"code", in_cache(home))
    assert len(made) == 1 and not caplog.messages
    assert stat.S_IMODE(in_cache(home).stat().st_mode) == 0o700
    assert stat.S_IMODE((in_cache(home) / NAME).stat().st_mode) == 0o600
    assert sorted(path.name for path in in_cache(home).iterdir()) == ["native-0123.lock", NAME]


@pytest.mark.parametrize(
    "damage", [lambda c: c[:-5], lambda c: b"", lambda c: c[:2] + b"X" + c[3:], lambda c: b"old"]
)
def test_a_file_that_is_not_whole_is_made_again(home, made, damage):
    get(made)
    path = in_cache(home) / NAME
    path.write_bytes(damage(path.read_bytes()))
    assert get(made) == (b"code", in_cache(home))
    assert len(made) == 2


def planted(path):
    content = b"planted"
    path.write_bytes(content + hashlib.sha256(content).digest())


@ONLY_ROOT
def test_a_file_of_another_user_is_not_loaded(home, made):
    get(made)
    planted(in_cache(home) / NAME)
    os.chown(in_cache(home) / NAME, 12345, -1)
    assert get(made)[0] == b"code"


@pytest.mark.parametrize("how", ["others may write to it", "a symbolic link"])
def test_a_file_that_others_can_change_is_not_loaded(home, made, how):
    get(made)
    path = in_cache(home) / NAME
    planted(path)
    if how == "a symbolic link":
        path.rename(home / "elsewhere")
        path.symlink_to(home / "elsewhere")
    else:
        path.chmod(0o666)
    assert get(made)[0] == b"code"


@pytest.mark.parametrize("way", ["owner", "link", "parent", "home is no directory", "no home"])
def test_a_directory_that_is_not_the_users_own_is_passed_over_with_one_line(
    home, made, caplog, monkeypatch, way
):
    if way in ("owner", "link") and os.getuid():
        pytest.skip("only root can give a directory to another user")
    if way == "owner":
        in_cache(home).mkdir(parents=True)
        os.chown(in_cache(home), 12345, -1)
        planted(in_cache(home) / NAME)
    elif way == "link":
        (home / "theirs").mkdir()
        os.chown(home / "theirs", 12345, -1)
        planted(home / "theirs" / NAME)
        in_cache(home).parent.mkdir(parents=True)
        in_cache(home).symlink_to(home / "theirs")
    elif way == "parent":
        home.chmod(0o777)
    elif way == "home is no directory":
        monkeypatch.setenv("HOME", "/dev/null")
    else:
        monkeypatch.setattr(
            Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home"))
        )
    shared = home.parent / "tmp" / f"detonation-kernels-{os.getuid()}"
    assert get(made) == (b"code", shared)
    assert len(made) == 1 and len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"the compiled kernels are kept in {shared}, because ")
    assert get(made)[1] == shared and len(made) == 1, "all processes of the user share it"


def test_a_parent_that_all_may_write_to_serves_if_it_is_sticky(home, made):
    home.chmod(0o1777)
    assert get(made)[1] == in_cache(home)


@ONLY_ROOT
@pytest.mark.parametrize("hostile", [False, True])
def test_a_home_that_cannot_be_written_and_a_planted_directory_still_leave_a_private_one(
    home, hostile, monkeypatch, request
):
    temporary = Path(
        tempfile.mkdtemp(dir="/tmp")
    )  # pytest's own directories are closed to other users
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    temporary.chmod(0o1777)
    monkeypatch.setattr(cache.tempfile, "tempdir", str(temporary))
    shared = temporary / "detonation-kernels-54321"
    if hostile:
        shared.mkdir()
        planted(shared / NAME)
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:  # root writes anywhere
        try:
            os.setuid(54321)
            os.write(sender, repr(get([])).encode())
        finally:
            os._exit(0)
    os.close(sender)
    os.waitpid(child, 0)
    said = os.read(receiver, 1000).decode()
    assert said.startswith("(b'code'") and (str(shared) in said) is not hostile


def test_of_many_ranks_with_an_empty_cache_one_compiles(home):
    receiver, sender = os.pipe()
    children = []
    for _ in range(8):
        children.append(os.fork())
        if children[-1] == 0:
            made = []
            content, _ = get(made, b"code" * 100_000)
            os.write(sender, b"1" if made else b"0")
            os._exit(0 if content == b"code" * 100_000 else 1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
    assert sorted(os.read(receiver, 8)) == sorted(b"10000000")


@pytest.fixture
def compiler(home, monkeypatch):
    """Makes another g++ the first in PATH: a shell script, or none."""

    def put(script):
        folder = home / "bin"
        folder.mkdir()
        if script:
            (folder / "g++").write_text(f"#!/bin/sh\n{script}\n")
            (folder / "g++").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/bin" if script else str(folder))
        native.load_library.cache_clear()

    yield put
    native.load_library.cache_clear()


WRITES = 'while [ "$1" != -o ]; do [ "$1" = --version ] && exit 0; shift; done; '


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("", None),
        ("exit 1", "returned non-zero exit status 1"),
        (
            WRITES + 'echo "first"; echo "fatal error: no header" >&2; exit 1',
            "g\\+\\+ failed: fatal error: no h",
        ),
        (
            WRITES + 'printf "a.cpp: error: it\\ncollect2: failed\\n" >&2; exit 1',
            "g\\+\\+ failed: a.cpp: error: it$",
        ),
        (
            WRITES + 'echo "this is no library" > "$2"',
            "this is no library|invalid ELF header|file too short",
        ),
        (WRITES + "true", "No such file or directory"),
        (
            WRITES + 'echo "int nothing;" | /usr/bin/gcc -shared -xc - -o "$2"',
            "is not the library: .*undefined symbol",
        ),
    ],
)
def test_a_compiler_that_is_not_there_or_fails_is_one_line_and_plain_torch(
    compiler, caplog, script, line
):
    compiler(script)
    assert native.load_library() is None
    assert len(caplog.messages) == (line is not None)
    if line:
        assert re.match(
            rf"plain torch replaces the C\+\+ kernels: .*(?:{line})", caplog.messages[0]
        )


def test_a_home_that_is_full_is_passed_over(compiler, caplog):
    """The next directory is tried; what is made there holds no kernels, since that would take long."""
    full = 'case "$2" in */.cache/*) echo "ld: final link failed: No space left on device" >&2; exit 1;; esac; '
    compiler(WRITES + full + 'echo "int nothing;" | /usr/bin/gcc -shared -xc - -o "$2"')
    native.load_library()
    assert re.search(
        "failed: ld: .* No space left on device; .*is not the library", caplog.messages[0]
    )
