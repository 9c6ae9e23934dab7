"""The table of words: each noun once, few of them, and each file that it names is there."""

import re
from pathlib import Path

import detonation

SOURCE = Path(detonation.__file__).parent
WORDS = Path(__file__).parents[2] / "docs" / "words.md"
ROWS = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^|`]+)` \|$", WORDS.read_text(), re.MULTILINE)


def test_every_row_of_the_table_is_seen():
    # those of three columns: words of the field, in the table before it, have no place in the source
    lines = [
        line
        for line in WORDS.read_text().splitlines()
        if line.startswith("|") and line.count("|") == 4
    ]
    assert len(ROWS) == len(lines) - 2 > 0  # but for the head and the rule under it


def test_the_words_are_few_and_each_stands_once():
    words = [word for word, _ in ROWS]
    assert len(words) <= 30
    assert len(set(words)) == len(words)


def test_every_file_that_the_words_name_is_there():
    assert [path for _, path in ROWS if not (SOURCE / path).is_file()] == []
