"""A number belongs to one process, all count alike, and all who wait hear of a conflict."""

import threading

import pytest
from torch.distributed import HashStore

from detonation.cluster.processes import claims, refusal
from detonation.cluster.processes.claims import Claim
from detonation.cluster.processes.refusal import RefusedStart, refusals
from detonation.cluster.survive import port
from detonation.cluster.survive.agreement import (
    EPOCH,
    SIZE,
    axis_key,
    axis_store,
    beat_of,
    next_axis_store,
)
from detonation.cluster.survive.port import Running, meet_at


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Whoever looks does so each time."""
    for module, name in ((claims, "_LOOK_S"), (refusal, "_LOOK_S"), (port, "_PRESENT_S")):
        monkeypatch.setattr(module, name, 0.0)


def test_two_processes_of_one_number_both_end_and_a_third_hears_of_it():
    store = HashStore()
    third = refusals(store, 1, 1)
    first = Claim(store, 0, 2, 1, 0)
    first.look()
    second = Claim(store, 0, 2, 1, 0)
    for claim in (first, second):
        with pytest.raises(RefusedStart, match="are both replica 0: give each replica its own"):
            claim.look()
    with pytest.raises(RefusedStart, match=r"replica 0 did not start: .* are both replica 0"):
        third()


def test_what_an_earlier_start_has_claimed_and_refused_does_not_matter():
    store = HashStore()
    Claim(store, 0, 3, 1, 0)
    refusal.note_refusal(store, 0, "another count", waiting=True)
    claim, look = Claim(store, 1, 2, 1, 1), refusals(store, 1, 1)
    again = Claim(store, 0, 2, 1, 0)
    for _ in range(3):
        claim.look()
        again.look()
        look()


def test_a_number_that_has_a_process_refuses_a_second_one_after_all_have_met():
    store, axis = HashStore(), HashStore()
    Claim(store, 1, 2, 1, 1).hold(axis)
    with pytest.raises(RefusedStart, match="are both replica 1"):
        Claim(store, 1, 2, 1, 1).hold(axis)


@pytest.mark.parametrize("second", [(3, 1), (2, 2)], ids=["replicas", "shards"])
def test_other_counts_end_all(second):
    """With three replicas the first has met all that it knows; with two shards it never would."""
    store, said = HashStore(), {}

    def meet(replica, replicas, shards):
        try:
            meet_at(store, replica, replicas, 0, shards)[1]()
            while True:  # as it does until all have sent a beat
                refused()
        except RefusedStart as error:
            said[replica] = str(error)

    refused = refusals(store, 0, 0)
    threads = [
        threading.Thread(target=meet, args=each) for each in ((0, 2, 1), (1, *second))
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = "replica 1 was started with {} replicas x {} shards, replica 0 with 2 replicas x 1 shards".format(
        *second
    )
    assert said[1].startswith(own)
    assert own in said[0]


def test_a_run_that_trains_refuses_who_starts_as_one_of_its_replicas(monkeypatch):
    monkeypatch.setattr(port, "RUNNING_S", 0.0)
    store = HashStore()
    next_axis_store(store, 0, 1)
    axis = axis_store(store, 0)
    axis.set(SIZE, "2 1")
    axis.set(EPOCH, "0")
    for rank in range(2):
        axis.set(axis_key("beat", rank), beat_of(7, 0.05))
    ended, running = Running(store), Running(store)
    for _ in range(3):
        ended.look()  # nobody beats
    running.look()
    axis.set(axis_key("beat", 1), beat_of(8, 60.0))
    for _ in range(3):  # a busy machine beats less often than one looks
        running.look()
    axis.set(axis_key("beat", 1), beat_of(9, 60.0))
    with pytest.raises(RefusedStart, match="start this replica with --join"):
        running.look()
    axis.set(port._member(), "")  # this process is a replica of it, and makes a second axis
    Running(store).look()
