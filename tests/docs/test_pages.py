"""Rules for every page: languages of blocks, links, the navigation, and pages that programs write."""

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml
from pages import PAGES, ROOT, all_blocks, blocks

import detonation
from detonation.train.recipe.resolve import read_recipe, shipped_recipes

LANGUAGES = {"python", "bash", "toml", "ini", "diff", "text"}
RESEARCH = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("research/*.md"))
DOCUMENTS = [*PAGES, *RESEARCH, "docs/recipe-reference.md", "README.md", "CONTRIBUTING.md"]
API = {
    page: re.findall(r"^::: (\S+)$", (ROOT / page).read_text(), re.MULTILINE)
    for page in PAGES
    if "/api/" in page
}
RETURNED = {
    "CommHook": "integrations.ddp",
    "Coordinates": "core.link.coordinates",
    "Follower": "feed.follower",
    "Loaded": "checkpoint.newest",
    "ShardWire": "wire.wire",
}
"""Modules of the classes that functions return and no user makes."""


@pytest.mark.parametrize("page", PAGES)
def test_every_block_names_its_language(page):
    assert len(re.findall(r"^```", (ROOT / page).read_text(), re.MULTILINE)) == 2 * len(
        blocks(page)
    )
    assert {block.language for block in blocks(page)} <= LANGUAGES


def test_only_programs_can_be_left_out_and_the_reason_is_given():
    assert [str(block) for block in all_blocks("ini", "diff", "text") if block.not_run] == []
    assert all(
        len(block.not_run.split()) >= 3 for block in all_blocks("python", "bash") if block.not_run
    )


def anchors(path):
    """The anchors of a page, as GitHub and mkdocs make them of its headings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_link_leads_to_a_file_and_a_heading(page):
    here = ROOT / page
    text = re.sub(r"^```.*?^```$", "", here.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)\s#]*)(?:#([^)\s]*))?\)", text):
        path = here.parent / target if target else here
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_every_page_is_in_the_navigation_once():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [
            page
            for part in (entry.values() if isinstance(entry, dict) else entry)
            for page in pages(part)
        ]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert Counter(listed) == Counter(
        path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")
    )


def test_the_reference_has_every_public_name_once():
    names = [name.removeprefix("detonation.") for page in API for name in API[page]]
    modules = {"integrations.huggingface", "integrations.lightning", "extend", "testing"}
    modules |= {f"feed.weights.{name}" for name in ("weight_feed", "weight_follower", "folders")}
    modules |= {f"errors.{name}" for name in detonation.errors.__all__} | {"extend.register"}
    modules |= {f"schemes.{name}" for name in {*detonation.schemes.__all__} - {*detonation.__all__}}
    modules |= {f"{place}.{name}" for name, place in RETURNED.items()}
    assert Counter(names) == Counter([*detonation.__all__, *modules]) - Counter(
        ["__version__", "errors", "schemes"]
    )


@pytest.fixture(scope="module")
def written():
    """The program that writes the reference of recipes."""
    spec = importlib.util.spec_from_file_location(
        "recipe_reference", ROOT / "docs/recipe_reference.py"
    )
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_recipes_is_what_the_code_reads(written):
    assert written.PAGE.read_text() == written.page(), "run: python docs/recipe_reference.py"
    unsaid = re.findall(r"^\| `(\w+)` \| .* \|  \|$", written.page(), re.MULTILINE)
    assert unsaid == [], "arguments without a meaning in the docstring"


def test_every_key_of_a_recipe_of_the_package_is_in_the_reference(written):
    known = {(key.table, key.name): key.kind for key in written.recipe_keys()}
    kinds = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "array": list}
    for name in shipped_recipes():
        for table, values in read_recipe(Path(name)).items():
            for level in (
                ()
                if table in ("seed", "tuned")
                else values
                if isinstance(values, list)
                else [values]
            ):
                for key, value in level.items():
                    if (table, key) in known:
                        assert isinstance(value, kinds[known[table, key]]), (name, table, key)
                    else:  # arguments of an optimizer, and the place of a level
                        assert table == "optimizer" or key in ("axis", "replicas"), (
                            name,
                            table,
                            key,
                        )


def test_every_message_of_troubleshooting_is_one_of_the_code():
    code = "".join(path.read_text() for path in ROOT.glob("src/**/*.py"))
    code = re.sub(r'"\n\s*f?"', "", code)  # texts that go on in the next line
    # tests/cli/test_first_errors.py makes the first mistakes
    page = (
        (ROOT / "docs/troubleshooting.md")
        .read_text()
        .partition("## At the start")[2]
        .partition("## Slow")[0]
    )
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    messages = [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]
    assert len(messages) > 15
    assert [message for message in messages if message not in code] == []
