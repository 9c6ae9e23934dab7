"""Who waits for whom: said in the log while a rank waits, and in the error when the wait is over."""

import logging
import re
import signal
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import detonation as dt
import worlds
from covering import covered
from detonation.cluster import init
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.processes import waiting
from detonation.cluster.processes.failure import (
    failure_from_exception,
    failure_from_exit_code,
    root_cause,
)
from detonation.cluster.processes.waiting import Standing, partners_of, waits_in_vain, who_waits
from detonation.core.runtime import PROGRESS
from limits import LIMIT_S

INSIDE, OUTSIDE, LEFT = (Standing(21, where) for where in ("inside", "outside", "left"))
BEFORE, FIRST = Standing(20), Standing(0)


@pytest.mark.parametrize(
    ("rank", "standings", "text"),
    [
        (
            0,
            [INSIDE, BEFORE],
            "rank 0 has waited for 30 s in step 21 .*: rank 1 is between steps 20 and 21$",
        ),
        (0, [INSIDE, FIRST], "rank 1 has not begun its first step$"),
        (
            1,
            [BEFORE, INSIDE, INSIDE, Standing(20, "inside")],
            "rank 0 is between .* 21, rank 3 is still in step 20$",
        ),
        (0, [INSIDE, Standing(20, "left")], "rank 1 has left after step 20"),
        (
            0,
            [INSIDE, Standing(20, "saving")],
            "rank 1 is in save_checkpoint after step 20, which all ranks must call$",
        ),
        (0, [Standing(20, "saving"), Standing(20, "saving")], None),
        (0, [OUTSIDE, LEFT], "waited for 30 s after step 21 .*: rank 1 has left after step 21"),
        (
            0,
            [INSIDE, INSIDE],
            "in step 21, like all other ranks: the network between them is slow or cut off",
        ),
        (0, [INSIDE, *[BEFORE] * 12], "rank 8 is between steps 20 and 21 and 4 more$"),
        (1, [INSIDE, INSIDE, BEFORE], None),  # a lower rank says it
        (0, [BEFORE, INSIDE], None),  # the others wait for this one
        (0, [OUTSIDE, OUTSIDE], None),  # all evaluate or save
        # the other has received everything, so this one is at work; or the other had an error
        (0, [INSIDE, OUTSIDE], "step 21, which others have ended, perhaps by an error: rank 1$"),
        (0, [FIRST, FIRST], None),
        (0, [LEFT, BEFORE], None),
    ],
)
def test_the_line_names_those_who_have_not_come(rank, standings, text):
    said = who_waits(rank, standings, 30.0)
    assert said == "" if text is None else re.search(text, said)


@pytest.mark.parametrize(
    ("standings", "partners", "vain"),
    [
        ([INSIDE, Standing(20, "left")], {1}, True),
        ([INSIDE, Standing(20, "left"), BEFORE], {1}, True),
        ([INSIDE, Standing(20, "left"), BEFORE], {1, 2}, False),  # rank 2 may come, and leave
        (
            [INSIDE, Standing(20, "left"), BEFORE],
            {2},
            False,
        ),  # another world within the world has ended
        ([INSIDE, Standing(20, "left"), INSIDE], {1, 2}, True),
        ([INSIDE, LEFT], {1}, False),  # it has taken this step
        ([OUTSIDE, Standing(20, "left")], {1}, False),  # it may save or evaluate
        ([INSIDE, BEFORE], {1}, False),
        ([INSIDE, INSIDE], set(), False),
    ],
)
def test_a_rank_waits_in_vain_where_all_that_could_come_have_left(standings, partners, vain):
    assert waits_in_vain(0, standings, partners) == vain


def groups_of(mesh):
    """The partners of this rank in a mesh of 2 x 2, and in a world without parts."""
    parts = partners_of(dist.get_rank())
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=1, world_size=3)
    return parts, partners_of(1)


def test_partners_share_a_group_that_is_not_the_whole_world_where_there_is_one():
    found = worlds.run_alone(groups_of, 2, 2)
    assert [parts for parts, _ in found] == [{1, 2}, {0, 3}, {0, 3}, {1, 2}]
    assert all(world == {0, 2} for _, world in found)


def test_partners_are_found_while_another_thread_makes_a_group(monkeypatch):
    class Ranks(dict):
        def __contains__(self, rank):
            table[str(len(table))] = {}  # as `new_group` does at that moment
            return super().__contains__(rank)

    table = {"first": Ranks({0: 0, 1: 1}), "second": {0: 0, 2: 1}}
    monkeypatch.setattr(
        distributed_c10d, "_world", SimpleNamespace(pg_group_ranks=table, default_pg=None)
    )
    assert partners_of(0) == {1, 2} and len(table) == 3


def test_a_standing_is_read_as_it_was_written_and_nothing_else_is():
    assert Standing.parse(str(INSIDE)) == INSIDE
    for text in ("", "21", "21 inside it", "many inside", "21 home"):
        with pytest.raises(ValueError, match=r"."):
            Standing.parse(text)


NCCL = [
    dist.DistBackendError(
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLGATHER, NumelIn=64, "
        "NumelOut=128, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    ),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:1331, remote process exited or there was a network error"
    ),
    RuntimeError("NCCL communicator was aborted on rank 0."),
]


class Broken(LoopbackCommunicator):
    """Plays NCCL: where `error` is set, a collective ends with it where somebody waits for the result."""

    error = None

    def all_gather(self, mine):
        return self._fail if self.error else super().all_gather(mine)

    def _fail(self):
        raise self.error


@pytest.mark.parametrize("error", NCCL, ids=["timeout", "remote", "aborted"])
def test_an_error_of_nccl_says_who_has_not_come_and_follows_from_that_ranks_end(error, monkeypatch):
    watch = object.__new__(waiting.Watch)
    watch._text = (
        "rank 0 has waited for 30 s in step 1 for other ranks: rank 1 is between steps 0 and 1"
    )
    monkeypatch.setattr(PROGRESS, "explain", watch.explain)
    model, communicator = nn.Linear(8, 8), Broken(2)
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.1), model, communicator, dt.demo(link="all-gather")
    )
    model(torch.ones(1, 8)).sum().backward()
    optimizer.set_up()
    communicator.error = error
    with pytest.raises(
        type(error), match=r"^rank 0 has waited .* rank 1 is between steps 0 and 1: "
    ) as caught:
        optimizer.step()
    assert failure_from_exception(0, caught.value).network
    elsewhere = failure_from_exception(1, ValueError("a bad gradient"))
    assert root_cause([failure_from_exception(0, caught.value), elsewhere]) is elsewhere
    assert failure_from_exit_code(0, -signal.SIGABRT).network  # NCCL's watchdog ends the process


def alone_in_a_step(mesh, scheme, way):
    """Two steps on both ranks, and a third on rank 0 alone; what rank 0 logs and raises."""
    lines, PROGRESS.steps = [], 0  # simulated replicas of other tests have counted in this process
    handler, said = logging.Handler(), threading.Event()
    handler.emit = lambda record: lines.append(record.getMessage()) or said.set()
    logging.getLogger(waiting.__name__).addHandler(handler)
    store = distributed_c10d._get_default_store()
    model = nn.Linear(8, 8)
    optimizer = dt.replicate(
        torch.optim.SGD(model.parameters(), lr=0.1), model, mesh["replicate"], scheme
    )
    dt.same_weights(model, mesh["replicate"])
    rank, raised = dist.get_rank(), ""
    for step in range(3):
        if step == 2:
            init._watch.stop()
            init._watch, init.WAIT_LINE_S = None, 0.4
            dt.init_mesh(2, 1, "cpu", timeout_s=1.0)
            PROGRESS.explain = lambda error: (
                said.wait(LIMIT_S) and init._watch.explain(error)
            )  # its thread may be late
        if step == 2 and rank:
            break
        if step == 2 and way == "overlap":
            with optimizer.overlap():
                model(torch.ones(1, 8)).sum().backward()
        else:
            model(torch.ones(1, 8)).sum().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            raised = str(error)
    if rank == 0:
        store.set("over", "")
    store.get("over")
    init._watch.stop()
    return lines, raised


@pytest.mark.parametrize("way", ["plain", "overlap"])
def test_a_rank_that_steps_alone_says_for_whom_it_waits_and_so_does_the_error(way):
    (lines, raised), (quiet, none) = worlds.run_alone(
        alone_in_a_step, 2, 1, dt.demo(topk=2, chunk=8), way
    )
    assert lines and all(
        "in step 3 for other ranks: rank 1 is between steps 2 and 3" in line for line in lines
    )
    assert (
        raised.startswith("rank 0 has waited for ")
        and "rank 1 is between steps 2 and 3: " in raised
    )
    assert (quiet, none) == ([], "")


@contextmanager
def within_step():
    """What `Replicated.step` tells the watch."""
    PROGRESS.steps, PROGRESS.where = PROGRESS.steps + 1, "inside"
    yield
    PROGRESS.where = "outside"


def left_alone(mesh):
    """A step on both ranks, and one more on rank 0 while rank 1 leaves: the lines of rank 0, and its exit code."""
    store, ended = distributed_c10d._get_default_store(), []
    init.end_now = lambda code: store.set("ended", str(code)) or init._watch._stopped.set()
    handler = logging.Handler()
    handler.emit = lambda record: ended.append((record.levelname, record.getMessage()))
    logging.getLogger("detonation").addHandler(handler)
    init._watch.stop()
    init._watch, init.WAIT_LINE_S, PROGRESS.steps = None, 0.2, 0
    dt.init_mesh(2, 1, "cpu")
    with within_step():
        dist.barrier()
    if dist.get_rank():
        init._watch.leave()
        store.set("left", "")
        code = store.get("ended").decode()
        dist.barrier()  # which lets rank 0 go, in the place of its end
    else:
        store.get("left")  # its first line is of one that has left
        with within_step():
            dist.barrier()
        code = store.get("ended").decode()
    init._watch.stop()
    return code, ended


def test_a_rank_that_waits_for_one_that_has_left_ends_with_a_line():
    (code, ended), (same, nothing) = worlds.run_alone(left_alone, 2, 1)
    (_, line), (level, last) = ended[0], ended[-1]
    assert (code, same, nothing, level) == ("1", "1", [], "ERROR")
    why = "in step 2 for other ranks: rank 1 has left after step 1"
    assert why in line and why in last
    assert last.endswith(
        ": this rank ends, because no other rank will come; give all ranks the same number of batches"
    )


def test_a_limit_below_zero_is_refused():
    with pytest.raises(ValueError, match="timeout_s is -1, must be above 0"):
        dt.init_mesh(1, 1, "cpu", timeout_s=-1)


def with_a_hook(mesh, scheme, where):
    """Eight steps; a hook of rank 1 raises once at the third, and its loop goes on. What happens at each of them."""
    model = nn.Linear(8, 8)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = dt.replicate(base, model, mesh["replicate"], scheme)
    dt.same_weights(model, mesh["replicate"])
    outcomes, calls = [], []

    def hook(*_):
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == 3:
            raise KeyError("a user's hook")

    (base.register_step_pre_hook if where == "before" else base.register_step_post_hook)(hook)
    for step in range(8):
        if step == 3:
            init.set_group_timeouts(1.0)
        try:
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            outcomes.append("")
        except Exception as error:
            outcomes.append(str(error))
            if not isinstance(error, KeyError):
                return outcomes
    return outcomes


@pytest.mark.long_cases("after-scheme3")
@covered("where, scheme", ["before", "after"], [dt.full(), dt.demo(topk=2, chunk=8)])
def test_a_hook_that_raises_on_one_rank_does_not_leave_it_a_step_behind_the_others(scheme, where):
    others, raising = worlds.run_alone(with_a_hook, 2, 1, scheme, where)
    assert raising[:3] == ["", "", '"a user\'s hook"'] and len(raising) == 4
    why = 'step 2 of this replica sent its messages and then failed with KeyError("a user\'s hook")'
    assert (
        raising[3]
        == f"{why}; other replicas may have taken this step: load a checkpoint on all replicas"
    )
    assert others[:3] == ["", "", ""] and len(others) == 4 and others[3], (
        "no step without the other"
    )


def test_ranks_that_cannot_connect_after_they_have_met_say_so(monkeypatch):
    """As behind a firewall that lets only the port of the store in."""
    said, lines = threading.Event(), []

    def warning(text, *values):
        lines.append(text % values)
        said.set()

    monkeypatch.setattr(waiting, "_log", SimpleNamespace(warning=warning))
    monkeypatch.setattr(waiting, "MEET_LINE_S", 0.01)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: said.wait(LIMIT_S))
    monkeypatch.setattr(init, "meet", lambda *_, **__: (dist.HashStore(), torch.device("cpu")))
    monkeypatch.setattr(init, "launch_position", lambda _: init.LaunchPosition(1, 2, 0, 1))
    init.join_world()
    assert lines[0] == (
        "rank 1 of 2 has waited for 0 s for connections to the other ranks: open all ports between the "
        "machines"
    )
