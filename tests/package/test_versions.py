"""The version, which four files and one command say; and the versions of actions."""

import re
import tomllib
from pathlib import Path

import pytest

from detonation.version import __version__

ROOT = Path(__file__).parents[2]


def test_package_changelog_and_citation_have_the_version_that_the_command_prints():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert {package, newest.group(1), cited.group(1)} == {
        __version__
    }  # test_recipes.py runs the command


def test_each_action_is_one_commit_because_a_tag_may_move():
    workflows = (ROOT / ".github" / "workflows").glob("*.yml")
    used = [line for path in workflows for line in re.findall(r"uses: (.*)", path.read_text())]
    assert used and all(re.fullmatch(r"\S+@[0-9a-f]{40}  # v[\d.]+", each) for each in used)


def test_a_release_is_published_without_a_stored_secret_and_on_the_owners_word_alone():
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text
    publish = jobs.pop("publish")
    assert "vars.PUBLISH == 'yes'" in publish["if"] and publish["environment"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"} and publish["needs"] == "build"
    assert publish["steps"][-1]["with"] == {"attestations": True}
    assert all("permissions" not in job for job in jobs.values())
    built = " ".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert 'make release-check RELEASE="--keep dist"' in built  # what is published was checked
