"""Trackers get every step; a missing package is said before training, and one that fails does not end it."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import write_recipe
from detonation.cli.command import run_command
from detonation.train.output import metrics, trackers
from detonation.train.output.metrics import MetricsFile, Record
from detonation.train.recipe.schema import LOGGERS
from detonation.train.verbs.simulate import Simulation, simulate
from limits import LIMIT_S

RECORD = Record(3, 2.5, 1e-3, 0.5, 900, 0.1, 0.2, {"rack": 800, "site": 100}, val_loss=2.4)


class Fake:
    """Keeps what it is given; raises where it is told to."""

    def __init__(self, fails_at=None, fails_to_close=False):
        self.records, self.closed, self._fails_at, self._fails_to_close = (
            [],
            0,
            fails_at,
            fails_to_close,
        )

    def write(self, record):
        self.records.append(record)
        if record.step == self._fails_at:
            raise OSError("no more disk\nand more")

    def close(self):
        self.closed += 1
        if self._fails_to_close:
            raise RuntimeError


@pytest.fixture
def trained(tmp_path, monkeypatch, capsys):
    """Simulates the tiny recipe with `opener` in the place of a tracker; the lines shown, and the records written."""

    def run(opener):
        monkeypatch.setitem(trackers.OPENERS, "wandb", opener)
        monkeypatch.setattr(trackers, "check_trackers", lambda names: None)
        recipe = write_recipe(tmp_path / "tiny.toml")
        simulate(Simulation(recipe, ('train.loggers=["wandb"]',), out=tmp_path / "run"))
        return capsys.readouterr().out.splitlines(), metrics.read_metrics(
            tmp_path / "run" / "metrics.jsonl"
        )

    return run


def test_a_logger_gets_what_the_metrics_file_gets(trained, tmp_path):
    fake, opened = Fake(), []
    _, written = trained(
        lambda path, config, done: opened.append((path, config.train.loggers, done)) or fake
    )
    assert opened == [(tmp_path / "run", ("wandb",), 0)]
    assert [json.loads(record.line()) for record in fake.records] == [
        json.loads(record.line()) for record in written
    ]
    assert len(written) == 6 and fake.closed == 1


OPENED = []


def mine(path, config, done):
    OPENED.append((path, Fake()))
    return OPENED[-1][1]


def test_your_own_logger_is_named_by_module_and_function(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mine", sys.modules[__name__])
    recipe = write_recipe(tmp_path / "tiny.toml")
    simulate(Simulation(recipe, ('train.loggers=["mine:mine"]',), out=tmp_path / "run"))
    [(path, fake)] = OPENED
    assert path == tmp_path / "run" and len(fake.records) == 6 and fake.closed == 1
    assert all(record.memory > 1e7 for record in fake.records if record.step % 2 == 0)
    capsys.readouterr()
    assert (
        run_command(
            ["train", str(recipe), "--logger", "mine:nothing", "--out", str(tmp_path / "other")]
        )
        == 2
    )
    assert (
        "module mine has no function 'nothing'" in capsys.readouterr().err
        and not (tmp_path / "other").exists()
    )


@pytest.mark.parametrize("when", ["opening", "writing", "closing", "ending"])
def test_one_that_fails_is_told_of_once_and_training_goes_on(trained, when):
    fake = Fake(fails_at=3 if when == "writing" else None, fails_to_close=when == "closing")

    def opener(path, config, done):
        if when == "opening":
            raise ValueError("not today")
        if when == "ending":
            sys.exit(3)
        return fake

    shown, written = trained(opener)
    reasons = {
        "opening": "ValueError: not today",
        "writing": "OSError: no more disk",
        "closing": "RuntimeError",
    }
    reason = {**reasons, "ending": "SystemExit: 3"}[when]
    line = (
        f"warning: logger wandb failed and gets no more records ({reason}); metrics.jsonl has every"
        " step; training goes on"
    )
    assert [text for text in shown if "warning" in text] == [line]
    assert len(written) == 6
    assert len(fake.records) == {"opening": 0, "writing": 3, "closing": 6, "ending": 0}[when]
    assert fake.closed == (when == "closing")


def test_the_names_are_those_of_a_recipe_and_the_metrics_file_is_a_logger_too(tmp_path):
    assert sorted(trackers.OPENERS) == sorted(LOGGERS)
    file: trackers.Logger = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(RECORD)
    file.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["levels"] == {
        "rack": 800,
        "site": 100,
    }
    told = trackers.values(RECORD)
    assert told == {
        "loss": 2.5,
        "lr": 1e-3,
        "seconds": 0.5,
        "bytes_sent": 900,
        "waited_s": 0.1,
        "step_s": 0.2,
        "bytes_sent/rack": 800,
        "bytes_sent/site": 100,
        "val_loss": 2.4,
    }


def test_what_cannot_log_is_said_in_one_line_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    recipe = str(write_recipe(tmp_path / "tiny.toml"))
    for arguments, line in {
        (
            "train",
            "--logger",
            "trackio",
        ): "logger trackio needs the package trackio: pip install trackio",
        (
            "simulate",
            "--set",
            'train.loggers=["wandb"]',
        ): "logger wandb needs the package wandb: pip install wandb",
        (
            "train",
            "--set",
            'train.loggers=["wandbb"]',
        ): "unknown logger 'wandbb', did you mean 'wandb'? Valid: tens",
        (
            "train",
            "--set",
            "train.loggers=wandb",
        ): "train.loggers is 'wandb', but must be a list of texts",
    }.items():
        assert run_command([arguments[0], recipe, *arguments[1:]]) == 2
        printed = capsys.readouterr()
        assert (
            printed.err.startswith(f"error: {line}")
            and len(printed.err.splitlines()) == 1
            and printed.out == ""
        )
    assert list(tmp_path.iterdir()) == [Path(recipe)]


SCRIPT = """
import sys
from pathlib import Path
from detonation.train.output import trackers
from detonation.train.output.metrics import Record
from detonation.train.recipe.tables import from_table
name, path = sys.argv[1], Path(sys.argv[2])
table = {"model": {"name": "olmo2"}, "data": {"task": "text"}, "scheme": {"name": "demo"}}
table |= {"optimizer": {"name": "AdamW", "lr": 0.003}, "train": {"steps": 6, "batch_size": 4}}
logger = trackers.OPENERS[name](path, from_table(table), 0)
for step in range(1, 4):
    logger.write(Record(step, 2.0 + step, 1e-3, 0.5, 900))
logger.close()
"""


@pytest.mark.parametrize("name", LOGGERS)
def test_the_real_trackers_keep_the_steps_on_this_machine(tmp_path, name):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    clean = {
        key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "TRACKIO"))
    }
    env = {**clean, "TRACKIO_DIR": str(tmp_path / "trackio")}
    command = [sys.executable, "-c", SCRIPT, name, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=env, cwd=root
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert kept(name, tmp_path) == [3.0, 4.0, 5.0]


def kept(name, path):
    """The losses that tracker `name` has kept in `path`."""
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(path / "tensorboard"))
        events.Reload()
        return [event.value for event in events.Scalars("loss")]
    if name == "trackio":
        import sqlite3

        with sqlite3.connect(path / "trackio" / "detonation.db") as database:
            rows = database.execute("select metrics from metrics order by step").fetchall()
        return [json.loads(row)["loss"] for (row,) in rows]
    (run,) = path.glob("wandb/offline-run-*/*.wandb")
    told = re.findall(
        rb"\x04loss\x82\x01.([0-9.]+)", run.read_bytes(), re.DOTALL
    )  # a key and its value
    return sorted({float(loss) for loss in told})  # each is in the history and in the summary
