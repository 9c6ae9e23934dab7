"""Names that hold HTML, formulas, terminal escapes or no text at all: the page and the terminal show them, no more."""

import json
import os
from html.parser import HTMLParser

import pytest

from commands import Command, write_recipe
from detonation.cli.command import run_command
from made import made

HTML = "</pre></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;"
FORMULA = "$\\frac{$_^"
ESCAPES = "\x1b]0;mine\x07\x1b[2J\r\n\u202e"
NO_TEXT = os.fsdecode(b"\xff\xfe")
EVIL = HTML + FORMULA + ESCAPES


class Tags(HTMLParser):
    """The tags of a page, and the names of all attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}


def hostile(path):
    """A run whose every text is evil."""
    texts = dict.fromkeys(("scheme", "optimizer", "model", "data", "fingerprint"), EVIL)
    made(
        path,
        **texts,
        skipped={EVIL: 3},
        scheme_arguments={EVIL: EVIL},
        levels=[(EVIL, 100), ("rack", 10)],
    )
    environment = {"packages": {"torch": EVIL, EVIL: EVIL}, "platform": EVIL, "gpus": [EVIL]}
    (path / "environment.json").write_text(json.dumps(environment))
    (path / "config.toml").write_text(f"seed = 0\n[model]\nname = {json.dumps(EVIL)}\n")
    return path


def test_a_page_about_hostile_runs_has_the_tags_of_any_page(tmp_path):
    plain, other = made(tmp_path / "plain"), made(tmp_path / "other")
    first = hostile(tmp_path / EVIL.replace("/", "|"))
    second = hostile(tmp_path / NO_TEXT)
    pages = []
    for directories in ((plain, other), (first, second), (plain,), (first,), (second,)):
        page = tmp_path / "page.html"
        assert run_command(["report", *map(str, directories), "--out", str(page)]) == 0
        content = page.read_text()
        assert content.isprintable() or all(c.isprintable() or c == "\n" for c in content)
        pages.append(Tags(content))
    assert pages[1].tags <= pages[0].tags and pages[1].attributes <= pages[0].attributes
    for page in pages[3:]:
        assert page.tags <= pages[2].tags and page.attributes <= pages[2].attributes


@pytest.mark.parametrize(
    "name", ["run" + ESCAPES.replace("\n", ""), "run-" + NO_TEXT, "run" + FORMULA]
)
def test_a_run_in_a_directory_of_any_name_trains_and_shows_the_name_escaped(tmp_path, name):
    out = tmp_path / name
    train = (
        "train",
        write_recipe(tmp_path / "tiny.toml"),
        "--out",
        out,
        "--replicas",
        1,
        "--set",
        "train.steps=2",
    )
    command = Command(tmp_path / "said", *train)
    assert command.wait() == 0, command.stderr
    again = Command(tmp_path / "again", *train)
    assert again.wait() == 2
    checked = Command(tmp_path / "checked", "verify", out)
    assert checked.wait() == 0
    assert (out / "report.html").is_file()
    for text in (command.stdout, again.errors, checked.stdout):
        assert (
            "\x1b" not in text
            and "\r" not in text
            and "\u202e" not in text
            and "\ufffd" not in text
        )
        assert "run" in text
