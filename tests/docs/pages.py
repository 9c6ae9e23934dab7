"""The pages of the documentation, their blocks of code, and the command lines in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOLD = {"docs/recipe-reference.md"}
"""A page without blocks for readers to run, because a program has written it."""
PAGES = sorted({path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")} - TOLD)
_BLOCK = re.compile(
    r"^(?:<!-- (not run|lab|lab file|lab meanwhile|lab stays|lab until \".+?\"): (.+?) -->\n)?"
    r"```(\S*)\n(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
IN_THE_LAB = "tests/machines runs it"


@dataclass(frozen=True)
class Block:
    """A block of code of a page. not_run: the reason why it is not run as it stands; "" for the others.

    how, lab: Of a block that tests/machines runs: see `lab.py` there.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str
    how: str = ""
    lab: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> Iterator[list[str]]:
        """The words of each command line of a block for the shell."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The blocks of a page, all or those in one language."""
    text = (ROOT / page).read_text()
    found = [
        _block(page, text.count("\n", 0, match.start(3)) + 1, *match.groups(default=""))
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def _block(page: str, line: int, how: str, about: str, language: str, text: str) -> Block:
    if how.startswith("lab"):
        return Block(page, line, language, text, IN_THE_LAB, how, about)
    return Block(page, line, language, text, about)


def all_blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in these languages."""
    return [block for page in PAGES for language in languages for block in blocks(page, language)]
