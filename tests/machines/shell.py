"""The few words of a shell that blocks of the documentation have: commands, variables, `export` and `>`."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import forks

RECORDS = """#!/bin/sh
[ -e "$CALLED" ] || exec "$PYTHON" - "$0" "$@" <<'END'
import json, os, sys
name, *words = sys.argv[1:]
with open(os.environ["CALLED"], "w") as file:
    json.dump([[os.path.basename(name), *words], dict(os.environ)], file)
END
"""
"""A program that writes down its command line and its environment."""


@dataclass(frozen=True)
class Line:
    """A command line: its words, the variables before it, and the file that its output goes to."""

    words: list[str]
    env: dict[str, str]
    target: str = ""


def lines_of(text: str) -> Iterator[Line]:
    """The command lines of a block."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        env: dict[str, str] = {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            env[name] = value
        target = ""
        if ">" in words:
            target = words[words.index(">") + 1]
            words = words[: words.index(">")]
        if words or env:
            yield Line(words, env, target)


def run(text: str, env: Mapping[str, str], smaller: Callable[[str], str]) -> int:
    """Runs the lines of a block one after the other; returns the code of the first that fails, or 0.

    smaller: Changes the command line that a script ends in.
    """
    shell = dict(env)
    for line in lines_of(text):
        if line.words and line.words[0] == "export":
            shell |= dict(word.split("=", 1) for word in line.words[1:])
            continue
        code = _run_line(line, {**shell, **line.env}, smaller)
        if code:
            return code
    return 0


def exports(text: str) -> dict[str, str]:
    """The variables that a block leaves to the blocks after it."""
    found = [line.words[1:] for line in lines_of(text) if line.words[:1] == ["export"]]
    return dict(word.split("=", 1) for words in found for word in words)


def _run_line(line: Line, env: dict[str, str], smaller: Callable[[str], str]) -> int:
    words = line.words
    if words[0] == "bash":
        words, env = called(words, env)
        words = shlex.split(smaller(shlex.join(words)))
    print("$", shlex.join(words), file=sys.stderr, flush=True)
    if words[0] in ("srun", "mpirun"):
        words, given = task(words[1:])
        env = {**env, **given}
    saved = os.dup(1)
    if line.target:
        os.dup2(os.open(line.target, os.O_WRONLY | os.O_CREAT), 1)
    try:
        process = forks.start(words, env)
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    return process.wait()


def task(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command line of a task that srun or mpirun starts, and the variables that they are given."""
    words, given = [*words], {}
    while words[0].startswith("-"):
        if words.pop(0) == "-x":
            given |= dict([words.pop(0).split("=", 1)])
    return words, given


def called(words: list[str], env: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command line of a launcher, and its environment, that a script ends in."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for program in ("torchrun", "srun", "scontrol", "detonation"):
            (folder / program).write_text(RECORDS)
            (folder / program).chmod(0o755)
        # a scheduler runs the script once, so that all tasks have one secret
        (folder / "openssl").write_text("#!/bin/sh\necho 0123456789abcdef0123456789abcdef\n")
        (folder / "openssl").chmod(0o755)
        record = {"CALLED": str(folder / "called"), "PYTHON": sys.executable}
        path = f"{folder}:{os.environ['PATH']}"
        subprocess.run(words, env={**env, **record, "PATH": path}, check=True)
        found, its_env = json.loads((folder / "called").read_text())
    own = {key: value for key, value in its_env.items() if key not in record}
    return found, own | {"PATH": os.environ["PATH"]}
