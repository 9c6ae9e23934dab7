"""docs/extending.md runs as it stands: its module, its recipe by the command line, and its test of the laws."""

import json
import re
import sys
from pathlib import Path

import pytest

from detonation.cli.command import run_command
from detonation.core.codec.aggregate import AGGREGATIONS
from detonation.core.codec.precision import PRECISIONS
from detonation.core.schemes.registry import SCHEMES

PAGE = (Path(__file__).parents[2] / "docs/extending.md").read_text()
FILES = dict(re.findall(r"```(?:python|toml)\n# (\S+\.(?:py|toml))\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """A directory with the files of the page, as a user has them; its registrations are undone."""
    for name in ("mine.py", "mine.toml", "test_mine.py"):
        (tmp_path / name).write_text(FILES[name])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("mine", None)
    for table, names in ((SCHEMES, ("largest", "haar")), (PRECISIONS, ("3bit",)), (AGGREGATIONS, ("median",))):
        for name in names:
            table.pop(name, None)


def test_the_recipe_of_the_page_trains(beside, capsys):
    assert run_command(["train", "mine.toml", "--replicas", "2", "--shards", "1", "--out", "run", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["replicas_equal"] is True and summary["scheme"] == "mine:haar"
    assert summary["scheme_arguments"] == {"topk": 8, "chunk": 64, "decay": 0.99}


def test_the_test_of_the_page_holds(beside):
    scope: dict[str, object] = {}
    exec(FILES["test_mine.py"], scope)
    scope["test_my_schemes_obey_the_laws"]()


def test_a_registered_scheme_is_offered_by_name(beside, capsys):
    import mine  # noqa: F401

    with pytest.raises(SystemExit):
        run_command(["compare", "--help"])
    assert "largest" in re.sub(r"\W+", " ", capsys.readouterr().out)
