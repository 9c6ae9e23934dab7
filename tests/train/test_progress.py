"""What a terminal shows of a run while it trains, and what is left of it when it ends, however it ends."""

import codecs
import contextlib
import dataclasses
import errno
import io
import os
import pty
import re
import select
import signal
import sys
import time
from functools import partial

import pytest
import torch

from commands import free_port, write_recipe
from covering import covered
from detonation.cli.command import run_command
from detonation.cluster.network.simulated import simulate_replicas
from detonation.train.output import directory as output
from detonation.train.output import screen as screens
from detonation.train.output import trackers
from detonation.train.output.metrics import Portion, Record, log_line, read_metrics
from detonation.train.run import recorder
from detonation.train.verbs.simulate import virtual
from limits import LIMIT_S
from terminal import Terminal


def record(step, loss=2.0, seconds=0.5, sent=1_000_000, waited=0.1, **more):
    return Record(step, loss, 1e-3, seconds, sent, waited, **more)


class Tty(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture
def screen(monkeypatch):
    """A screen on a terminal of 80 columns, its stream, and the clock that it reads."""
    stream, clock = Tty(), [0.0]
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setattr(screens.time, "monotonic", lambda: clock[0])
    return screens.Screen(silent=False, to_stderr=False), stream, clock


def shown(stream):
    terminal = Terminal()
    terminal.feed(stream.getvalue())
    return terminal


def test_the_gauges_stand_under_the_lines_and_leave_nothing_behind(screen):
    live, stream, clock = screen
    with live:
        live.line("training")
        live.start(0, 100)
        for step in range(1, 11):
            clock[0] += 0.6
            live.advance(record(step, loss=5 - 0.3 * step))
        live.line("step 10/100")
        terminal = shown(stream)
        assert terminal.lines[:2] == ["training", "step 10/100"]
        (bar,) = terminal.lines[2:]
        assert re.fullmatch("━+[╸╺]━+ 10/100 steps, 00:54 left, loss 2.0000, 20% waiting", bar)
    assert shown(stream).lines == ["training", "step 10/100"]


def test_steps_between_two_frames_cost_no_frame(screen):
    live, stream, clock = screen
    with live:
        live.start(0, 10_000)
        for step in range(1, 101):
            clock[0] += 0.001
            live.advance(record(step))
    assert stream.getvalue().count(" steps") == 2  # those of the start and of the end


def test_a_pipe_and_a_dumb_terminal_get_plain_lines(screen, monkeypatch):
    for stream, kind, forced in (
        (io.StringIO(), "xterm", ""),
        (Tty(), "dumb", ""),
        (io.StringIO(), "xterm", "1"),
    ):
        monkeypatch.setenv("TERM", kind)
        monkeypatch.setenv("FORCE_COLOR", forced)
        monkeypatch.setattr("sys.stdout", stream)
        plain = screens.Screen(silent=False, to_stderr=False)
        with plain:
            plain.start(0, 10)
            plain.advance(record(1))
            plain.line("step 1")
        screens.clear(on_stderr=False)
        assert stream.getvalue() == "step 1\n"


@pytest.mark.parametrize("width", [10, 20, 40, 79, 200])
def test_no_line_is_wider_than_the_terminal(screen, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, stream, clock = screen
    monkeypatch.setattr("sys.stdout", stream)
    with screens.Screen(silent=False, to_stderr=False) as live:
        live.start(0, 10**6)
        for step in range(1, 300):
            clock[0] += 0.6
            live.advance(record(step, loss=1e3 / step, sent=10**12))
        (line,) = shown(stream).lines
    assert 0 < len(line) <= width


def test_the_time_left_is_that_of_the_steps_after_the_first_which_sets_up(screen):
    live, stream, clock = screen
    with live:
        live.start(0, 100)
        assert shown(stream).lines[0].endswith(" 0/100 steps, --:-- left")
        for step, now in {1: 1000.0, 2: 1060.0, 3: 1120.0}.items():
            clock[0] = now
            live.advance(record(step))
        assert (
            shown(stream).lines[0].endswith(" 3/100 steps, 1:37:00 left, loss 2.0000, 20% waiting")
        )


def test_a_line_says_how_fast_how_full_and_how_long():
    latest = Record(40, 2.0, 1e-3, 0.5, 1_000_000, grad_norm=0.5, memory=31 * 10**9)
    line = log_line([record(39, seconds=1.5), latest], 100, 8_000_000, Portion(4096, "tokens"))
    assert line == (
        "step  40/100  loss 2.0000  lr 1.00e-03  grad norm 0.5  sent 1.0 MB/step (x8.0 less)"
        "  1 s/step  4,096 tokens/s  31.0 GB  60 s left"
    )


def test_the_speed_is_that_of_the_replicas_that_took_the_steps():
    """Of two replicas one sits out every second step; or one of three is lost, or a third one comes."""
    portion = Portion(2048, "tokens", replicas=2)
    for taking, speed in (
        ((2, 1), "6,144"),
        ((3, 2), "10,240"),
        ((2, 3), "10,240"),
        ((None, None), "8,192"),
    ):
        steps = [record(step, taking=taken) for step, taken in enumerate(taking, 1)]
        assert f"  {speed} tokens/s  " in log_line(steps, 100, 8_000_000, portion)


def test_waiting_for_the_losses_of_others_is_waiting(screen):
    live, stream, clock = screen
    with live:
        live.start(0, 100)
        for step, more, said in (
            (1, {"agreeing_s": 0.3}, 80),
            (2, {}, 50),
        ):  # of the second it is not known
            clock[0] += 1.0
            live.advance(record(step, seconds=0.5, waited=0.1, **more))
            assert shown(stream).lines[0].endswith(f", {said}% waiting")


class Second:
    """The world of a rank that is the second, until it is made the first."""

    rank, size = 1, 2

    def over_shards(self, count):
        return count


def recorded(config, path, done):
    """A recorder of the second rank, which knows the steps after `done`, and its session."""
    (session,) = simulate_replicas(partial(virtual, config), 1)
    session = dataclasses.replace(session, world=Second())
    return recorder.Recorder(
        session, path, screens.Screen(silent=True, to_stderr=False), done
    ), session


@covered("own, shared", [(), (21, 22)], [True, False])
def test_one_that_came_in_goes_on_with_the_records_of_those_before_it(
    tiny, tmp_path, monkeypatch, shared, own
):
    opened, started = [], []
    monkeypatch.setattr(
        trackers, "open_trackers", lambda path, config, done, warn: opened.append(done) or []
    )
    monkeypatch.setattr(screens.Screen, "start", lambda self, done, total: started.append(done))
    before = [
        record(step) for step in range(1, 22)
    ]  # the one that was lost had written one of the others' steps, too
    if shared:
        (tmp_path / "metrics.jsonl").write_text(
            "".join(each.line() for each in before) + '{"step": 2'
        )
    came, session = recorded(tiny("train.steps=100"), tmp_path, done=20)
    for step in own:
        came.add(record(step, loss=3.0))
    session.world.rank = 0
    assert came.take_over() and not came.take_over()
    last = len(own) + 20
    came.add(record(last + 1))
    came.close()
    written = read_metrics(tmp_path / "metrics.jsonl")
    assert written == came.records and [each.step for each in written] == [
        *range(1 if shared else 21, last + 2)
    ]
    assert [each.loss for each in written if each.step in own] == [3.0] * len(own)
    assert opened == [last] and started == [20, last]


def test_one_that_goes_on_for_the_first_on_a_full_disk_writes_as_soon_as_it_can(
    tiny, tmp_path, monkeypatch, capsys
):
    """The loss of the writer must not end one replica after the other."""
    full = True
    written = output.write_whole

    def write(path, content):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(path, content)

    monkeypatch.setattr(output, "write_whole", write)
    came, session = recorded(tiny("train.steps=100", "train.log_every=2"), tmp_path, done=0)
    session.world.rank = 0
    for step in range(1, 5):
        came.add(record(step))
        assert not came.take_over()
    assert capsys.readouterr().out.count("No space left on device") == 1
    with pytest.raises(output.Unwritable):
        came.close()
    full = False
    came.add(record(5))
    assert not came.take_over()
    came.add(record(6))
    assert came.take_over()
    came.close()
    assert [each.step for each in read_metrics(tmp_path / "metrics.jsonl")] == [*range(1, 7)]


class Typed:
    """`detonation arguments...` on a pseudo-terminal of its own; what a person sees there is in `terminal`."""

    def __init__(self, *arguments, **env):
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            self._run([str(argument) for argument in arguments], env)
        self.terminal, self._told = Terminal(), ""
        self._decoder = codecs.getincrementaldecoder(
            "utf-8"
        )()  # a character may come in two pieces

    def _run(self, arguments, env):
        code = 70
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.update(TERM="xterm-256color", COLUMNS="100", **env)
            for name in ("stdout", "stderr"):
                setattr(sys, name, os.fdopen(os.dup(1), "w", encoding="utf-8"))
            torch.set_num_threads(1)
            code = run_command(arguments)
            sys.stdout.flush()
        os._exit(code)

    def read_until(self, words):
        """Takes in what is written until `words` are among it, or, where they are None, to the end."""
        limit = time.monotonic() + LIMIT_S
        while words is None or words not in self._told:
            assert select.select([self._master], [], [], limit - time.monotonic())[0], self._told[
                -500:
            ]
            try:
                piece = os.read(self._master, 1 << 16)
            except OSError:  # nobody has the terminal open any more
                piece = b""
            if not piece:
                assert words is None, f"ended without {words!r}: {self._told[-500:]}"
                return
            self._told += self._decoder.decode(piece)

    def press(self, keys):
        os.write(self._master, keys)

    def end(self):
        """Its exit code, once it has ended, and what it leaves on the terminal."""
        self.read_until(None)
        os.close(self._master)
        self.terminal.feed(self._told)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.terminal


def assert_clean(terminal, last):
    assert terminal.lines[-1] == last
    assert not [
        line for line in terminal.lines if "left" in line or "tokens/s" in line or "━" in line
    ]


@pytest.mark.parametrize("launched", [False, True])
def test_ctrl_c_leaves_the_terminal_clean(tmp_path, launched):
    port = str(free_port())
    place = (
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        if launched
        else {}
    )
    train = [
        "train",
        write_recipe(tmp_path / "tiny.toml"),
        "--out",
        tmp_path / "run",
        "--set",
        "train.steps=100000",
    ]
    run = Typed(*train, "train.log_every=1000", **place)
    run.read_until("waiting")
    run.press(b"\x03")
    code, terminal = run.end()
    assert code == 130
    assert_clean(terminal, terminal.lines[-1] if launched else "error: interrupted")
    assert terminal.lines[0].startswith("demo over") and len(terminal.lines) < 4


@pytest.mark.long  # no branch of its own
def test_an_error_leaves_the_terminal_clean(tmp_path):
    train = ["train", write_recipe(tmp_path / "tiny.toml"), "--out", tmp_path / "run"]
    run = Typed(*train, "--set", "optimizer.lr=1e30", "train.log_every=1000")
    run.read_until("steps")
    code, terminal = run.end()
    assert code == 1
    assert terminal.lines[-1].startswith("error: ") and terminal.lines[0].startswith(
        "demo over 2 replicas"
    )
    assert_clean(terminal, terminal.lines[-1])
