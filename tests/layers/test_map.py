"""The map of the house in docs/design.md names every folder of the package once, and none that is not there."""

import re
from collections import Counter
from pathlib import Path

import detonation

SOURCE = Path(detonation.__file__).parent
FOLDERS = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")} - {"."}
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"


def rows() -> list[str]:
    """The folder at the head of each bullet or table row between the two comments: its first path in backticks."""
    _, start, rest = DESIGN.read_text().partition("<!-- map -->\n")
    text, end, _ = rest.partition("<!-- /map -->")
    assert start and end, f"{DESIGN.name} has no map"
    found = re.findall(r"^ *(?:[-*]|\|) *`([\w/]+)`", text, re.MULTILINE)
    return [path.removeprefix("src/").removeprefix("detonation/").strip("/") for path in found]


def test_the_map_names_every_folder_once():
    assert Counter(rows()) == Counter(FOLDERS)
