"""The clock of benchmarks/door/strangers.py: it reads the pages that it names, and starts what they say."""

import sys

import pytest
from pages import ROOT

sys.path.append(str(ROOT))

from benchmarks.door import strangers


@pytest.mark.parametrize("task", strangers.TASKS)
def test_a_stranger_reads_for_less_than_five_minutes(task):
    words, seconds = strangers.reading(task)
    assert words > 100
    assert seconds < strangers.GOAL_S


@pytest.mark.parametrize("task", ["b", "c"])
def test_the_commands_are_those_of_the_pages(task, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        strangers,
        "run",
        lambda folder, words: started.append((" ".join(words), {*folder.iterdir()})),
    )
    strangers.TASKS[task].run(tmp_path)
    lines = [line for line, _ in started]
    assert all(
        (tmp_path / word) in files
        for line, files in started
        for word in line.split()
        if word.endswith(".py")
    )
    if task == "b":
        assert [line.split()[:2] for line in lines[:2]] == [
            ["detonation", "train"],
            ["detonation", "export"],
        ]
        assert lines[2:] == ["python write.py"]
        assert "my.txt" in lines[0]
    else:
        assert lines == [f"torchrun --nproc-per-node 4 {name}.py" for name in ("before", "after")]
        assert "fully_shard" in (tmp_path / "before.py").read_text()
        assert "dt.replicate" in (tmp_path / "after.py").read_text()


def test_a_command_that_fails_is_shown(tmp_path):
    with pytest.raises(SystemExit, match=r"(?s)python no.py ended with 2:.*No such file"):
        strangers.run(tmp_path, ["python", "no.py"])
