"""What three strangers need, by the clock: the words that each reads, and the seconds of the commands on those pages.

    python -m benchmarks.door.strangers [a b c]

    a  from the README to a scheme: nothing runs
    b  from a text file of the reader's to a trained model that writes: the commands of the quickstart
    c  from an FSDP2 loop to a replicated one: both loops of docs/your-loop.md, under torchrun

Words are those of the sections that a reader passes, with tables and code, at 230 a minute. Commands and loops are read
from the pages and run in a fresh directory, with the package of this clone. Downloads and the installation come on top.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WORDS_PER_MINUTE = 230
GOAL_S = 300
PROGRAMS = {"detonation": ["-m", "detonation"], "torchrun": ["-m", "torch.distributed.run"]}
_HEADING = re.compile(r"^## ", re.MULTILINE)


class Task(NamedTuple):
    """sections: of each page, the headings whose sections are read; "" is what stands before the first one."""

    title: str
    sections: dict[str, tuple[str, ...]]
    run: Callable[[Path], None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", metavar="a b c", help="all, when left out")
    chosen = parser.parse_args().tasks or list(TASKS)
    print(f"{'':44}{'words':>7}{'to read':>10}{'to run':>10}{'in all':>10}{'goal':>8}")
    for name in chosen:
        words, reading_s = reading(name)
        with tempfile.TemporaryDirectory(prefix="stranger-") as folder:
            begun = time.monotonic()
            TASKS[name].run(Path(folder))
            run_s = time.monotonic() - begun
        seconds = "".join(
            f"{f'{each:.0f} s':>10}" for each in (reading_s, run_s, reading_s + run_s)
        )
        print(f"{name}  {TASKS[name].title:41}{words:7}{seconds}{f'{GOAL_S} s':>8}", flush=True)


def reading(name: str) -> tuple[int, float]:
    """The words that the reader of a task passes, and the seconds that this takes."""
    words = sum(
        len(text.split())
        for page, heads in TASKS[name].sections.items()
        for text in parts(page, *heads)
    )
    return words, 60 * words / WORDS_PER_MINUTE


def parts(page: str, *headings: str) -> list[str]:
    """The sections of a page under these headings, without deeper pages; a heading that is not there is an error."""
    first, *rest = _HEADING.split((ROOT / page).read_text())
    named = {"": first} | {text.partition("\n")[0]: text for text in rest}
    return [named[heading] for heading in headings]


def blocks(text: str, language: str) -> list[str]:
    """The blocks of code in a text, those that no test runs among them."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def nothing(folder: Path) -> None:
    """Nothing: the README alone answers."""


def own_text(folder: Path) -> None:
    """Trains on a text, exports the model, and lets it write."""
    (folder / "my.txt").write_text(
        "\n".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md")))
    )
    (section,) = parts("docs/quickstart.md", "Your own text")
    for line in "".join(blocks(section, "bash")).replace("\\\n", " ").splitlines():
        run(folder, shlex.split(line, comments=True))
    (writing,) = blocks(section, "python")
    script(folder, "write.py", writing)


def replicated_loop(folder: Path) -> None:
    """Runs the loop before and the loop after."""
    (opening,) = parts("docs/your-loop.md", "")
    before, after, *_ = blocks(opening, "python")
    (launch,) = blocks(opening, "bash")
    definitions = before.partition("\nmesh = ")[0]
    for name, text in (("before.py", before), ("after.py", f"{definitions}\n{after}")):
        (folder / name).write_text(text)
        run(folder, [name if word.endswith(".py") else word for word in shlex.split(launch)])


def script(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    run(folder, ["python", name])


def run(folder: Path, words: list[str]) -> None:
    """Runs one command line of a page; shows what it wrote where it fails."""
    if not words:
        return
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, *PROGRAMS.get(words[0], []), *words[1:]]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{shlex.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


TASKS = {
    "a": Task(
        "README: which scheme do I take?",
        {"README.md": ("", "What is not shown yet", "Try it", "In your own loop", "Which scheme?")},
        nothing,
    ),
    "b": Task(
        "a model of my own text", {"docs/quickstart.md": ("", "Install", "Your own text")}, own_text
    ),
    "c": Task("my FSDP2 loop, replicated", {"docs/your-loop.md": ("",)}, replicated_loop),
}


if __name__ == "__main__":
    main()
