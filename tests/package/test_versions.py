"""The version, which four files and one command say."""

import re
import tomllib
from pathlib import Path

from detonation.version import __version__

ROOT = Path(__file__).parents[2]


def test_package_changelog_and_citation_have_the_version_that_the_command_prints():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert {package, newest.group(1), cited.group(1)} == {
        __version__
    }  # test_recipes.py runs the command
