"""Every test that the documents name is there, under that name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
FILES = {path.name: path.read_text() for path in ROOT.glob("tests/**/*.py")}
TESTS = re.findall(r"def (test_\w+)\(", "".join(FILES.values()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_says_of_tests_is_there(document):
    if document.name in ("log.md", "CHANGELOG.md"):  # they tell of what was
        return
    text = document.read_text()
    for path in re.findall(r"\btests/[\w/]+\.py\b", text):
        assert (ROOT / path).is_file(), path
    for name in re.findall(r"\btest_\w+\.py\b", text):
        assert name in FILES, name
    for name in re.findall(r"\btest_\w+(?![\w.])|\btest_\w+(?=\.\.\.)", text):
        assert any(test.startswith(name) for test in TESTS) or f"{name}.py" in FILES, name
