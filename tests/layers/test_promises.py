"""Every test that the documents name is there, under that name; and the index of the laws is whole."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/**/*.md")])
FILES = {path.name: path.read_text() for path in ROOT.glob("tests/**/*.py")}
TESTS = re.findall(r"def (test_\w+)\(", "".join(FILES.values()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_document_says_of_tests_is_there(document):
    if document.name in ("log.md", "CHANGELOG.md"):  # they tell of what was
        return
    text = re.sub(
        r"```.*?```", "", document.read_text(), flags=re.DOTALL
    )  # blocks hold files of the reader's own
    for path in re.findall(r"\btests/[\w/]+\.py\b", text):
        assert (ROOT / path).is_file(), path
    for name in re.findall(r"\btest_\w+\.py\b", text):
        assert name in FILES, name
    for name in re.findall(r"\btest_\w+(?![\w.])|\btest_\w+(?=\.\.\.)", text):
        assert any(test.startswith(name) for test in TESTS) or f"{name}.py" in FILES, name


def laws() -> dict[int, list[str]]:
    """The tests that the index names for each law, as `path::function` below tests/."""
    index = (ROOT / "tests/laws/README.md").read_text()
    sections = re.findall(r"^### (\d+)\. (.*?)(?=^#)", index, re.MULTILINE | re.DOTALL)
    return {int(law): re.findall(r"`([\w/]+\.py::test_\w+)`", text) for law, text in sections}


def test_every_law_of_the_design_has_its_tests():
    stated = (ROOT / "docs/design.md").read_text().partition("## Laws\n")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", stated, re.MULTILINE)]
    assert numbers == list(range(1, 16)) == list(laws())
    assert all(laws().values())


@pytest.mark.parametrize("number", range(1, 16))
def test_a_test_of_the_index_is_where_it_says(number):
    for name in laws()[number]:
        path, _, function = name.partition("::")
        assert f"\ndef {function}(" in (ROOT / "tests" / path).read_text(), name


def test_a_test_that_names_a_law_is_in_the_index():
    for path in ROOT.glob("tests/**/*.py"):
        for function, numbers in re.findall(
            r"^def (test_laws?((?:_\d+)+)_\w+)\(", path.read_text(), re.MULTILINE
        ):
            name = f"{path.relative_to(ROOT / 'tests').as_posix()}::{function}"
            assert all(name in laws()[int(number)] for number in numbers.strip("_").split("_")), (
                name
            )
