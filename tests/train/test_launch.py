"""Local worlds: results come back, and one rank's end is everyone's, told once."""

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from commands import outliving
from detonation.cluster import launch
from detonation.cluster.exits import RankExits
from detonation.cluster.init import LaunchPosition, launch_position
from detonation.cluster.launch import run_local
from detonation.cluster.processes import heartbeat
from detonation.cluster.processes.failure import WorldError
from detonation.cluster.processes.heartbeat import Reason
from detonation.cluster.processes.signals import die_with_agent
from detonation.train.recipe.resolve import Request
from limits import LIMIT_S, Clock


def test_results_come_back_by_rank():
    def work(offset):
        total = torch.full((3,), float(dist.get_rank()))
        dist.all_reduce(total)
        return {"rank": dist.get_rank(), "nested": [offset, {"total": total.tolist()}]}

    results = run_local(work, 3, [1.5], timeout_s=LIMIT_S)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert results[2]["nested"][0] == 1.5
    assert results[0]["nested"][1]["total"] == [3.0, 3.0, 3.0]


def test_children_compute_with_one_thread_and_know_their_place():
    def work():
        return [
            torch.get_num_threads(),
            os.environ["RANK"],
            os.environ["LOCAL_RANK"],
            os.environ["WORLD_SIZE"],
        ]

    expected = int(os.environ.get("OMP_NUM_THREADS", "1"))
    assert run_local(work, 2, timeout_s=LIMIT_S) == [
        [expected, "0", "0", "2"],
        [expected, "1", "1", "2"],
    ]


def test_the_cause_is_told_not_its_echo():
    def work():
        if dist.get_rank() == 2:
            raise KeyError("layer.7")
        dist.barrier()

    with pytest.raises(WorldError, match=r"rank 2: KeyError: 'layer\.7'") as caught:
        run_local(work, 4, timeout_s=LIMIT_S)
    assert "in work" in caught.value.failure.trace
    assert not caught.value.failure.bad_input


def test_bad_input_found_by_all_is_told_as_it_is():
    def work():
        raise ValueError("topk is 99")

    with pytest.raises(WorldError, match=r"^topk is 99$") as caught:
        run_local(work, 2, timeout_s=LIMIT_S)
    assert caught.value.failure.bad_input


def test_a_killed_rank_brings_the_others_down():
    def work():
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(WorldError, match=r"rank 1: ended by SIGKILL"):
        run_local(work, 3, timeout_s=LIMIT_S)


def test_a_signal_without_a_name_is_told_by_its_number():
    with pytest.raises(WorldError, match=r"ended by signal 40$"):
        run_local(lambda: os.kill(os.getpid(), 40), 1, timeout_s=LIMIT_S)


def test_what_a_full_disk_takes_no_file_of_is_told_on_standard_error(capfd, monkeypatch):
    def full(path, value):
        raise OSError(28, "No space left on device")

    def fails():
        raise KeyError("layer.7")

    monkeypatch.setattr(launch, "write_result", full)
    with pytest.raises(WorldError, match="ended with code 1 and no message"):
        run_local(fails, 1, timeout_s=LIMIT_S)
    assert "KeyError: 'layer.7'" in capfd.readouterr().err


@pytest.fixture
def ignoring_children():
    """As a supervisor starts a process that ignores SIGCHLD."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    assert signal.signal(signal.SIGCHLD, before) == signal.SIG_IGN


@pytest.mark.usefixtures("ignoring_children")
def test_a_launcher_that_was_told_to_ignore_its_children_waits_for_its_ranks():
    assert run_local(lambda: 1, 2, timeout_s=LIMIT_S) == [1, 1]


def test_ranks_for_which_somebody_else_has_waited_end_nothing():
    os.waitpid(pid := os.posix_spawn("/bin/true", ["true"], {}), 0)
    launch._kill(pids := {0: pid})
    assert not pids


def test_a_world_that_hangs_is_ended():
    with pytest.raises(WorldError, match=r"ranks \[0, 1\] did not finish in time"):
        run_local(signal.pause, 2, timeout_s=1)


def test_ranks_that_have_ended_when_the_time_is_over_are_in_time(tmp_path):
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert RankExits({0: pid}, tmp_path, deadline=0.0, meeting=None).wait() is None


def test_a_rank_ends_where_the_board_is_lost_while_it_looks_who_is_silent(monkeypatch):
    """Its neighbour was lost, and then the process of the store: its thread reports, so nobody else here does."""
    clock, ended = Clock(), []

    class Board:
        where = "the store"

        def write_count(self, rank, count):
            pass

        def read_counts(self, ranks):
            raise dist.DistNetworkError("Connection reset by peer")

    class Turns:
        """The thread that beats has an answer in each turn."""

        def wait(self, seconds):
            clock.sleep(seconds)
            beats._answered = clock.now
            return False

    def end(*told):
        ended.append(told)
        sys.exit()

    beats = heartbeat.Heartbeat(Board(), 0, 2, end)
    beats.set_limit(1.0, 1)
    beats.stop()
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=clock, sleep=clock.sleep))
    beats._stopped = Turns()
    with pytest.raises(SystemExit):
        beats._watch()
    assert ended == [(Reason("rank 0 has lost the store: Connection reset by peer", 0),)]


def test_a_reason_that_another_rank_with_another_token_writes_over_is_told_all_the_same():
    store = HashStore()
    mine, other = (
        heartbeat.StoreBoard(store, rank, "rank 0", False, f"{rank}" * 16) for rank in (0, 1)
    )

    class Written:
        where = mine.where

        def post_notice(self, notice):
            mine.post_notice(notice)
            other.post_notice("1 0 its own")
            return mine.read_notice()

    beats = heartbeat.Heartbeat(mine, 0, 2, print)
    beats.stop()
    beats._board = Written()
    assert beats.report("no token", bad_input=True) == Reason("no token", 0, bad_input=True)


def test_no_process_outlives_the_call(tmp_path):
    def work():
        (tmp_path / str(os.getpid())).touch()
        dist.barrier()
        if dist.get_rank() == 0:
            raise RuntimeError("over")
        signal.pause()

    with pytest.raises(WorldError, match="rank 0: over"):
        run_local(work, 3, timeout_s=LIMIT_S)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 3
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_place_that_launchers_give():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert launch_position(torchrun) == LaunchPosition(5, 8, 1, 4)
    slurm = {
        "SLURM_PROCID": "5",
        "SLURM_NTASKS": "8",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "123456",
    }
    step = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    }
    assert launch_position({**slurm, **step}) == LaunchPosition(5, 8, 1, 4, "gpu07", 23456)
    assert launch_position(slurm) is None, "a batch script without srun stands alone"
    assert launch_position({}) is None
    with pytest.raises(ValueError, match="WORLD_SIZE='eight'"):
        launch_position({"RANK": "0", "WORLD_SIZE": "eight"})


def test_a_launcher_decides_on_the_world_unless_flags_do():
    place = LaunchPosition(0, 8, 0, 4)
    recipe = Path(__file__).parents[2] / "recipes" / "quick-lm.toml"

    def mesh(**flags):
        chosen = Request(recipe, **flags).layers(place).config().mesh
        return chosen.replicas, chosen.shards

    assert mesh() == (2, 4)
    assert mesh(replicas=8) == (8, 1)
    assert mesh(shards=2) == (4, 2)
    assert mesh(overrides=("mesh.shards=8",)) == (1, 8)
    with pytest.raises(
        ValueError, match="2 replicas x 2 shards are 4 processes, but the launcher started 8"
    ):
        mesh(replicas=2, shards=2)
    for name in ("replicas", "shards"):
        with pytest.raises(ValueError, match=f"9 {name} need one process each, but"):
            mesh(**{name: 9})


def test_processes_that_are_not_forked_find_the_function_by_name(monkeypatch):
    monkeypatch.setattr(launch, "gpus_for", lambda local_world_size: True)
    pids = run_local(os.getpid, 2, timeout_s=LIMIT_S)
    assert len({*pids, os.getpid()}) == 3


def test_a_rank_of_torchrun_ends_with_its_agent():
    receiver, sender = os.pipe()
    agent = os.fork()
    if agent == 0:
        if os.fork() == 0:
            die_with_agent({"TORCHELASTIC_RUN_ID": "1"})
            os.write(sender, str(os.getpid()).encode())
        signal.pause()
    rank = int(os.read(receiver, 20))
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    left = outliving([rank])
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
