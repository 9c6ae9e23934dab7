"""The real commands: each recipe, what they print, and how they end when something is wrong."""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from commands import Command, launched, outliving, write_recipe
from covering import some
from detonation.cli.arguments import verbs
from detonation.cli.command import run_command
from detonation.cli.verbs import SHORTCUTS, assignments, requested
from detonation.train.recipe.resolve import Request, parse_sets
from limits import LIMIT_S

ROOT = Path(__file__).parents[2]
QUICK = str(ROOT / "recipes" / "quick-lm.toml")
SHORT = ("--set", "train.steps=2", "train.validation_batches=1")


def detonation(folder, *arguments, pictures=False):
    """The finished command `detonation arguments...`."""
    command = Command(folder, *arguments, pictures=pictures)
    command.wait()
    return command


def last_line(text):
    return json.loads(text.splitlines()[-1])


def test_the_command_of_the_package_is_this_one(tmp_path):
    """All others here are forks of a process that has imported what takes long."""
    recipe = str(write_recipe(tmp_path / "tiny.toml"))
    command = [
        sys.executable,
        "-m",
        "detonation",
        "train",
        recipe,
        "--scheme",
        "full",
        *SHORT,
        "--replicas",
        "1",
        "--shards",
        "1",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"run directory: {tmp_path / 'run'}"


@some(
    "recipe",
    ["quick-lm", "moe-lm", "vit-fashion", "t5-translation"],
    keep=["vit-fashion", "t5-translation"],
)
def test_every_recipe_trains_on_two_replicas_of_two_shards(recipe, tmp_path):
    short = ["train.steps=3", "train.log_every=1", "train.validation_batches=1"]
    out = tmp_path / "run"
    done = detonation(
        tmp_path,
        "train",
        ROOT / "recipes" / f"{recipe}.toml",
        "--set",
        *short,
        "--out",
        out,
        "--json",
    )
    assert done.code == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, "only the object goes to stdout"
    assert "Warning" not in done.stderr
    summary = last_line(done.stdout)
    assert (summary["replicas"], summary["shards"], summary["steps"]) == (2, 2, 3)
    assert summary["replicas_equal"] and summary["reduction"] > 8
    assert ("val_accuracy" in summary) == recipe.startswith("vit")
    steps = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert len(steps) == 3
    assert all(word in steps[0] for word in ("loss", "lr", "kB/step (x", "less)", "s/step"))
    files = {path.name for path in out.iterdir()}
    assert files >= {
        "config.toml",
        "environment.json",
        "metrics.jsonl",
        "checkpoints",
        "summary.json",
        "report.html",
    }


def test_three_tiers_of_network_train_as_one_model_and_each_says_what_it_sent(tmp_path):
    """Gradients in full in the rack, DCT coefficients across racks, parameters across sites: eight processes."""
    short = ["train.steps=6", "scheme.site.every=4", "train.validation_batches=1"]
    recipe = ROOT / "recipes" / "three-tiers.toml"
    done = detonation(tmp_path, "train", recipe, "--set", *short, "--out", tmp_path / "run")
    assert (done.code, done.errors) == (0, "")
    assert done.stdout.startswith("full+demo+diloco over 8 replicas x 1 shards: olmo2 with")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["replicas_equal"] and [level["axis"] for level in summary["levels"]] == [
        "node",
        "rack",
        "site",
    ]
    node, rack, site = (level["bytes_sent_per_step"] for level in summary["levels"])
    assert summary["bytes_sent_per_step"] == pytest.approx(node + rack + site)
    assert rack < node / 10 and site == pytest.approx(
        node * 2 / 6
    )  # a round of four steps, and one that ends early
    assert (
        "sent over site" in done.stdout
        and "sent over site" in (tmp_path / "run" / "report.html").read_text()
    )


def test_what_a_person_sees_and_the_report(tmp_path):
    out = tmp_path / "run"
    sets = ["scheme.name=diloco", "scheme.every=2", "train.steps=2", "train.validation_batches=1"]
    train = ("train", QUICK, "--set", *sets, "--replicas", 2, "--shards", 1, "--out", out)
    done = detonation(tmp_path, *train, pictures=True)
    assert (done.code, done.errors) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("diloco over 2 replicas x 1 shards: olmo2 with")
    assert lines[-1] == f"run directory: {out}"
    assert any("replicas equal" in line and "yes, bitwise" in line for line in lines)
    page = (out / "report.html").read_text()
    assert page.count("<figure") == 4 and "http-equiv" not in page and "<script" not in page
    assert "width=device-width" in page

    both = detonation(
        tmp_path, "report", out, out, "--out", tmp_path / "both.html", "--json", pictures=True
    )
    written = last_line(both.stdout)
    assert written["report"] == str(tmp_path / "both.html")
    assert "2 runs" in (tmp_path / "both.html").read_text()


@pytest.mark.long  # no branch of its own
def test_it_joins_the_world_of_a_launcher_and_an_error_is_told_once(tmp_path):
    def ended(*arguments):
        ranks = launched(tmp_path, 2, "train", QUICK, *SHORT, *arguments)
        return ranks, [rank.wait() for rank in ranks]

    (first, _), codes = ended("--shards", 1, "--json", "--out", tmp_path / "run")
    assert codes == [0, 0], first.errors
    summary = last_line(first.stdout)
    assert (summary["replicas"], summary["shards"]) == (2, 1)
    ranks, codes = ended("scheme.topk=99", "--out", tmp_path / "bad")
    assert codes == [2, 2]
    assert (
        sum(rank.errors.count("error: topk is 99, must be from 1 to chunk (64)") for rank in ranks)
        == 1
    )
    assert not (tmp_path / "bad").exists()


@pytest.mark.long_cases("ctrl-c")
@pytest.mark.parametrize(
    ("stop", "code", "says"),
    [
        (
            lambda pid: os.killpg(pid, signal.SIGINT),
            130,
            "error: interrupted\n",
        ),  # Ctrl-C reaches every process
        (lambda pid: os.kill(pid, signal.SIGKILL), -9, ""),
    ],
    ids=["ctrl-c", "killed"],
)
def test_when_the_command_ends_all_its_ranks_do(tmp_path, stop, code, says):
    env = {"TMPDIR": tmp_path}  # what a killed command cannot remove
    command = Command(
        tmp_path, "train", QUICK, "--out", tmp_path / "run", "--set", "train.log_every=1", env=env
    )
    command.wait_for_step(1)
    ranks = command.ranks
    assert len(ranks) == 4
    stop(command.pid)
    assert (command.wait(), command.errors) == (code, says)
    assert outliving(ranks) == []


def test_a_full_disk_is_one_line(tmp_path):
    out = tmp_path / "run"
    command = Command(
        tmp_path,
        "train",
        QUICK,
        "--set",
        "train.steps=1",
        "train.validation_batches=1",
        "--out",
        out,
    )
    resource.prlimit(command.pid, resource.RLIMIT_FSIZE, (600_000, 600_000))  # its ranks inherit it
    assert command.wait() == 1
    assert command.errors.startswith(f"error: cannot write {out}/checkpoints/step-000001: ")
    assert len(command.errors.splitlines()) == 1
    assert list((out / "checkpoints").iterdir()) == [], "nothing half-written"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["report", "--help"]])
def test_help_does_not_wait_for_torch(arguments):
    check = (
        "import sys; from detonation.cli.command import run_command\n"
        f"try: run_command({arguments!r})\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'numpy', 'transformers', 'matplotlib'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert "usage: detonation" in done.stdout


def test_a_plan_without_a_recipe_needs_no_torch():
    """Its import takes over a second; the plan is arithmetic. An error in one line needs torch and still comes."""
    ask = ["plan", "--parameters", "1.2b", "--link", "100mbit,20ms", "--step-time"]
    check = f"""
import sys
from detonation.cli.command import run_command
assert run_command({ask} + ["0.3"]) == 0 and "torch" not in sys.modules
assert run_command({ask} + ["0"]) == 2 and "torch" in sys.modules"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert (
        "waiting" in done.stdout
        and done.stderr
        == "error: --step-time is 0.0, but must be above 0 and at most 1,000,000 seconds\n"
    )


def test_a_command_runs_without_an_output():
    """As in `detonation train >&-`, where Python has no stdout."""
    command = f'exec "{sys.executable}" -m detonation train >&-'
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_run_trains_without_an_output(tmp_path):
    recipe = write_recipe(tmp_path / "tiny.toml", mesh={"replicas": 1, "shards": 1})
    train = f'train "{recipe}" --steps 1 --out "{tmp_path / "run"}"'
    command = f'exec "{sys.executable}" -m detonation {train} >&- <&-'
    done = subprocess.run(
        command, shell=True, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, "Error" in done.stderr) == (0, False)


def test_an_unknown_verb_is_one_line(capsys):
    assert run_command(["trian", "quick-lm"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: unknown verb 'trian', did you mean 'train'? Valid: ")


def test_an_unknown_option_suggests_those_of_its_verb(capsys):
    with pytest.raises(SystemExit):
        run_command(["train", "quick-lm", "--step", "5"])
    printed = capsys.readouterr()
    text = printed.err + printed.out
    assert "--steps" in text and "--step-time" not in text


def test_a_text_flag_is_no_number():
    given = parse_sets(
        assignments(SHORTCUTS, {"data": "2024", "scheme": "demo", "steps": 3, "link": None})
    )
    assert given == {"data": {"source": "2024"}, "scheme": {"name": "demo"}, "train": {"steps": 3}}


def test_a_comparison_has_the_flags_that_all_of_its_runs_share():
    flags = ["--schemes", "full,demo", "--steps", "7", "--data", "my.txt"]
    asked = requested(Request, tyro.cli(verbs(), args=["compare", "quick-lm", *flags]))
    assert asked.overrides == ("train.steps=7", 'data.source="my.txt"')


def test_an_interrupt_while_modules_are_imported_is_one_line():
    check = """
import detonation.__main__ as entry, detonation.cli.command as command
def interrupted(): raise KeyboardInterrupt
command.run_command = interrupted
entry.main()"""
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
