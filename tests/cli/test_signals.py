"""A preempted run saves the same step on all ranks and ends well; one that is told twice ends at once, undamaged."""

import os
import signal
import threading

import pytest

from commands import Command, outliving, write_recipe
from covering import covered, some
from detonation import interrupts
from detonation.checkpoint.files import manifest, retention
from detonation.cluster import launch
from detonation.cluster.processes.signals import Stop, die_with_parent, end_now, stoppable
from detonation.cluster.survive.elastic_axis import serve_meeting
from detonation.train.output import metrics

LONG = ("--set", "train.steps=100000")


@pytest.fixture
def start(tmp_path):
    """Starts `detonation train` on the tiny recipe into tmp_path / "run"; ends what still runs afterwards."""
    started = []

    def started_with(*arguments, enter=lambda: None):
        recipe = write_recipe(tmp_path / "tiny.toml")
        words = ("train", recipe, "--out", tmp_path / "run", *arguments)
        started.append(Command(tmp_path, *words, enter=enter))
        return started[-1]

    yield started_with
    for command in started:
        command.kill()


def test_the_end_of_a_child_after_the_request_is_no_second_request(monkeypatch):
    def ended(code):
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", ended)
    monkeypatch.setattr("detonation.interrupts._ending", threading.RLock())
    monkeypatch.setattr("detonation.cluster.processes.signals.SAME_REQUEST_S", 0)
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
        stop.receive(number)
    assert stop.number == signal.SIGTERM
    with pytest.raises(SystemExit):
        stop.receive(signal.SIGUSR1)


def test_timeout_sends_one_request_to_the_command_twice(monkeypatch):
    """To its child and to the process group of both: the run still saves."""
    with launch._signals_pass_on({}) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.number == signal.SIGTERM
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGUSR1)
        monkeypatch.setattr("detonation.cluster.processes.signals.SAME_REQUEST_S", 0)
        with pytest.raises(SystemExit):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("first", ["end", "let_kernel_end", "end_now"])
def test_one_thread_alone_has_the_last_word(first):
    """Otherwise a command that is over tells of a signal, and ends with code 0."""
    receiver, sender = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(sender, 2)
        interrupts._speaks = True
        taken, go = threading.Event(), threading.Event()

        def hold():
            taken.set()
            go.wait(1)

        if first == "end":
            interrupts.call_before_end(hold)
            threading.Thread(target=interrupts.end, args=(signal.SIGTERM,)).start()
            taken.wait()
            interrupts.let_kernel_end()
        elif first == "let_kernel_end":
            interrupts.let_kernel_end()
        else:
            os._exit = lambda code: (hold(), os.kill(os.getpid(), signal.SIGKILL))
            threading.Thread(target=end_now, args=(0,)).start()
            taken.wait()
        threading.Thread(target=interrupts.end, args=(signal.SIGINT,)).start()
        go.wait(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(sender)
    with os.fdopen(receiver) as said:
        text = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    expected = ("error: ended by SIGTERM\n", 143) if first == "end" else ("", -signal.SIGKILL)
    assert (text, code) == expected


def test_a_store_where_replicas_meet_is_served_until_a_signal_ends_it(monkeypatch):
    """A handler that returns is not the end: another thread tells of the signal, and ends it."""
    child = os.fork()
    if not child:
        signals = iter(range(3))

        def pause():
            if next(signals, None) is None:
                os._exit(7)

        signal.pause = pause
        serve_meeting("127.0.0.1:0", lambda where: None)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_signal_to_a_fork_is_its_own():
    """As of a pool that ends its workers: else it asks the run to stop, and the worker stays."""
    receiver, sender = os.pipe()
    workers = []
    with stoppable() as stop:
        for _ in range(2):
            workers.append(os.fork())
            if not workers[-1]:
                os.write(sender, b"1")
                while True:
                    signal.pause()
            os.read(receiver, 1)
        os.kill(workers[0], signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(workers[0], 0)[1]) == -signal.SIGTERM
    assert not stop  # and all that had come was read, although a worker still has what it inherited
    os.kill(workers[1], signal.SIGKILL)
    os.waitpid(workers[1], 0)
    os.close(receiver), os.close(sender)


@covered("to, name", ["the launcher", "one rank", "everyone"], ["SIGTERM", "SIGUSR1", "SIGHUP"])
def test_a_run_asked_to_stop_saves_one_step_and_ends_well(start, tmp_path, name, to):
    command = start(*LONG)
    command.wait_for_step(2)
    ranks = command.ranks
    number = signal.Signals[name]
    if to == "everyone":
        os.killpg(command.pid, number)
    else:
        os.kill(command.pid if to == "the launcher" else ranks[1], number)
    assert (command.wait(), command.stderr) == (0, "")
    saved = manifest.read_manifest(retention.saved_checkpoints(tmp_path / "run" / "checkpoints")[0])
    last = metrics.read_metrics(tmp_path / "run" / "metrics.jsonl")[-1].step
    assert saved.step == last >= 2
    says = f"stopped by {name} after step {last}; continue with --out {tmp_path / 'run'} --resume"
    assert command.stdout.splitlines()[-1] == says
    assert outliving(ranks, 0) == []


@some("how", ["twice", "ctrl-c"], keep=["twice"])
def test_told_twice_or_interrupted_it_ends_at_once_and_another_can_go_on(start, tmp_path, how):
    first = start("--set", "train.steps=3", "--stop-after", 2)
    assert first.wait() == 0
    command = start("--resume", *LONG)
    command.wait_for_step(1)
    ranks = command.ranks
    os.kill(ranks[1], signal.SIGSTOP)  # no step can end now
    if how == "twice":
        os.kill(command.pid, signal.SIGTERM)
        os.kill(command.pid, signal.SIGUSR1)
        assert command.wait() - 128 in (
            signal.SIGTERM,
            signal.SIGUSR1,
        )  # whichever was delivered second
    else:
        os.killpg(command.pid, signal.SIGINT)
        says = f"error: interrupted; continue with --out {tmp_path / 'run'} --resume\n"
        assert (command.wait(), command.stderr) == (130, says)
    assert outliving(ranks, 0) == []
    assert (
        manifest.read_manifest(
            retention.saved_checkpoints(tmp_path / "run" / "checkpoints")[0]
        ).step
        == 2
    )
    assert start("--resume", "--set", "train.steps=3").wait() == 0


def test_a_launcher_that_passes_a_signal_on_late_sends_no_second_request(monkeypatch):
    """It is busy, and all processes of its group have the signal already; a third one ends them."""
    monkeypatch.setattr("detonation.cluster.processes.signals.SAME_REQUEST_S", 0)
    receiver, sender = os.pipe()
    parent, child = os.getpid(), os.fork()
    if not child:
        die_with_parent(parent)
        with stoppable() as stop:
            for _ in range(3):
                stop.receive(signal.SIGHUP)
                os.write(sender, b"1")
        os._exit(0)
    os.close(sender)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGHUP
    assert os.read(receiver, 3) == b"11"
    os.close(receiver)


def test_a_terminal_that_closes_does_not_end_a_run_under_nohup(start):
    """Neither the command nor its ranks."""
    command = start(*LONG, enter=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    command.wait_for_step(1)
    for pid in (command.pid, *command.ranks):
        os.kill(pid, signal.SIGHUP)
    command.wait_for_step(command.stdout.count("\nstep ") + 3)
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 0 and "stopped by SIGTERM" in command.stdout
