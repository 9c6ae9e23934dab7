"""Writes the specifications into docs/algorithms.md, below the lines that name them.

python tests/specs/page.py
"""

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "algorithms.md"
BLOCK = re.compile(
    r"(<!-- not run: `(\w+)` of tests/specs/(\w+\.py) -->\n```python\n)(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
"""The head of a block, the function or class, its file, and the text."""


def source(name: str, file: str) -> str:
    """The text of a function or class of a file of specifications."""
    text = (FOLDER / file).read_text()
    (node,) = [each for each in ast.parse(text).body if getattr(each, "name", None) == name]
    segment = ast.get_source_segment(text, node)
    assert segment
    return segment + "\n"


def page() -> str:
    """The page with the text of each specification as it is now."""
    return BLOCK.sub(lambda m: m[1] + source(m[2], m[3]) + "```", PAGE.read_text())


def names() -> set[str]:
    """The functions and classes that the page shows."""
    return {match[2] for match in BLOCK.finditer(PAGE.read_text())}


if __name__ == "__main__":
    PAGE.write_text(page())
