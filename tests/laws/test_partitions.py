"""The law of partitions: nobody waits without a bound, and of two that cannot reach each other one
is left out."""

import itertools
import json
import threading
import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

import detonation as dt
from detonation.cluster.processes import refusal
from detonation.cluster.processes.refusal import (
    Preparation,
    RefusedStart,
    note_refusal,
    refusals,
)
from detonation.cluster.processes.waiting import Standing
from detonation.cluster.survive import partition
from detonation.cluster.survive.agreement import (
    RankReport,
    axis_key,
    beat_of,
    pairs_apart,
    parse_agreement,
    those_that_go_on,
)
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.partition import PartitionWatch, who_waits_for_whom
from detonation.cluster.survive.port import Port
from detonation.core.runtime import PROGRESS
from limits import LIMIT_S, until
from steps import together


def graphs(most):
    """All ways in which up to `most` replicas can be out of each other's reach."""
    for replicas in range(1, most + 1):
        pairs = list(itertools.combinations(range(replicas), 2))
        for chosen in itertools.product([False, True], repeat=len(pairs)):
            yield replicas, [list(pair) for pair, cut in zip(pairs, chosen, strict=True) if cut]


def test_those_that_go_on_reach_each_other_and_nobody_else_could_join_them():
    for replicas, cut in graphs(5):
        left = those_that_go_on(range(replicas), cut, [])
        assert left and not [pair for pair in cut if {*pair} <= {*left}]
        assert left == those_that_go_on(range(replicas), cut[::-1], [])
        if not cut:
            assert left == list(range(replicas))


@pytest.mark.parametrize(
    "replicas, cut, left",
    [
        (2, [[0, 1]], [0]),
        (3, [[0, 1]], [0, 2]),
        (3, [[0, 1], [1, 2]], [0, 2]),
        (3, [[0, 1], [0, 2]], [1, 2]),
        (4, [[0, 2], [0, 3], [1, 2], [1, 3]], [0, 1]),
        (5, [[a, b] for a in (0, 1) for b in (2, 3, 4)], [2, 3, 4]),
    ],
    ids=["two", "a link", "1 against the rest", "0 against the rest", "halves", "two of five"],
)  # fmt: skip
def test_the_larger_side_goes_on_and_of_equal_sides_that_with_the_lower_numbers(
    replicas, cut, left
):
    assert those_that_go_on(range(replicas), cut, []) == left


def test_who_is_late_is_left_out_also_where_all_reach_each_other():
    assert those_that_go_on([0, 1, 2], [], [0]) == [1, 2]


def test_one_report_is_enough_for_a_pair_to_be_apart():
    assert pairs_apart([(0, []), (1, [0])]) == pairs_apart([(0, [1]), (1, [0])]) == [[0, 1]]


def test_all_that_report_go_on_with_the_same_replicas_and_the_others_hear_why():
    store = HashStore()

    def run(replica):
        membership = Membership(store, replica, 3, 0, 1, 30.0, 1, print, confirm_s=30.0)
        membership.apart = {0: [1], 1: [0, 2], 2: [1]}[replica]
        with membership.changed:
            membership.changed.wait_for(lambda: membership.called)
        try:
            return membership.agree(RankReport(0, [], {}, 7)).members
        except dt.errors.ReplicaLost as error:
            return str(error)
        finally:
            membership.stop()

    why = "replica 1 and replicas 0, 2 cannot reach each other; replicas 0, 2 go on without it"
    assert together(*(lambda r=r: run(r) for r in range(3))) == [
        [0, 2], f"{why} after step 7", [0, 2],
    ]  # fmt: skip


class Silent:
    """A store that answers until `cut`, and then never, as where packets are dropped."""

    def __init__(self, store, cut, over):
        self._store, self._cut, self._over = store, cut, over

    def clone(self):
        return Silent(self._store.clone(), self._cut, self._over)

    def __getattr__(self, name):
        if self._cut.is_set():
            assert self._over.wait(LIMIT_S)
        return getattr(self._store, name)


@pytest.fixture
def cut():
    """A store and what makes it silent; after the test it answers, so that all threads end."""
    silent, over = threading.Event(), threading.Event()
    yield Silent(HashStore(), silent, over), silent
    over.set()


@pytest.mark.parametrize("hears", [True, False], ids=["its loop hears of it", "it waits elsewhere"])
def test_a_replica_without_answers_of_the_store_ends_by_its_own_clock(cut, monkeypatch, hears):
    monkeypatch.setattr(partition, "LEAVE_S", 0.0)
    (store, silent), ended, said = cut, threading.Event(), []
    membership = Membership(
        store, 0, 1, 0, 1, 0.3, 1, lambda why: (said.append(why), ended.set()), confirm_s=30.0
    )
    membership.under_way = True
    membership.told = hears  # as where it has raised it: then nobody ends the process
    silent.set()
    with membership.changed:
        assert membership.changed.wait_for(lambda: membership.failure, LIMIT_S)
    with pytest.raises(dt.errors.ReplicaLost, match=r"lost the store .*: no answer for \d+\.\d s"):
        membership._require()
    if not hears:
        assert ended.wait(LIMIT_S) and "has lost the store" in str(said[0])
    membership.leave(LIMIT_S)  # waits for nobody
    assert bool(said) != hears


def test_a_guest_without_answers_of_the_store_ends_too(cut):
    store, silent = cut
    membership = Membership(store, 3, 2, 0, 1, 0.3, 1, print, is_guest=True)
    membership.under_way = True
    silent.set()
    with membership.changed:
        assert membership.changed.wait_for(lambda: membership.failure, LIMIT_S)


class Clocked:
    """The watch of rank 0, in exchange 5, on a clock of its own, without a thread."""

    def __init__(self, monkeypatch, started=5, replicas=2):
        self.now, self.answers = 1000.0, True
        monkeypatch.setattr(PROGRESS, "steps", 0)  # other tests took steps in this process
        store = HashStore()
        for rank in range(1, replicas):
            store.set(axis_key("beat", rank), beat_of(1, 0.1, started, Standing(21, "inside")))
        self.membership = Membership(store, 0, replicas, 0, 1, 15.0, 1, print)
        self.membership.stop()
        for rank in range(1, replicas):
            self.membership._seen[rank] = store.get(axis_key("beat", rank)), 0.0
            self.membership.ports[rank] = f"10.0.0.{rank + 1} 4000"
        self.membership.waits_in = self.membership.started = 5
        self.membership.patience_s = 1800.0
        monkeypatch.setattr(partition.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(partition, "knock", lambda name, patience_s: self.answers)
        monkeypatch.setattr(partition.threading, "Thread", Now)
        self.watch = self.membership._watch
        self.watch._stopped = threading.Event()
        self.watch._stopped.wait = lambda seconds: False

    def pass_s(self, seconds):
        for _ in range(round(seconds)):
            self.now += 1.0
            self.watch._watch_wait(self.now)


class Now:
    """A thread that is over when it has started."""

    def __init__(self, target, args=(), **_):
        self._run = lambda: target(*args)

    def start(self):
        self._run()


def test_after_thirty_seconds_a_line_says_who_waits_and_then_after_twice_the_time(
    monkeypatch, caplog
):
    clocked = Clocked(monkeypatch, started=4)
    clocked.pass_s(29)
    assert not caplog.messages
    clocked.pass_s(70)
    text = "rank 0 has waited for {} s after step 0 for other ranks: "
    text += "rank 1 is still in step 21"
    assert caplog.messages == [text.format(30), text.format(60)]
    assert not clocked.membership.apart and not clocked.membership.late


def test_a_replica_that_does_not_answer_in_an_exchange_is_reported_after_the_bound(
    monkeypatch, caplog
):
    clocked = Clocked(monkeypatch)
    clocked.pass_s(2)
    clocked.answers = None
    clocked.pass_s(36)
    assert clocked.watch.judges  # whoever calls meanwhile gets the report with the judgement
    clocked.pass_s(6)
    assert not clocked.membership.apart
    clocked.pass_s(4)
    assert clocked.membership.apart == [1] and not clocked.watch.judges
    assert "rank 0 has had no answer from rank 1 at 10.0.0.2 4000 for 15 s" in caplog.text


def test_all_that_are_silent_are_reported_also_those_that_became_so_after_the_first(monkeypatch):
    """Rank 0 is cut off from both others, whose last answers came two seconds apart."""
    clocked = Clocked(monkeypatch, replicas=3)
    clocked.pass_s(32)
    watch = clocked.watch
    clocked.answers = None
    watch._reached[2] += 2.0
    while not clocked.membership.apart:
        clocked.pass_s(1)
    assert clocked.membership.apart == watch.silent() == [1]
    assert watch.judges  # so no report is written yet
    clocked.pass_s(2)
    assert watch.silent() == [1, 2] and not watch.judges


@pytest.mark.parametrize("pause", ["slow", "mended", "never answered"])
def test_a_replica_that_answers_or_never_did_is_not_reported(monkeypatch, pause):
    clocked = Clocked(monkeypatch)
    clocked.answers = None if pause == "never answered" else True
    clocked.pass_s(2)
    clocked.answers = True if pause == "slow" else None
    clocked.pass_s(40)
    clocked.answers = None if pause == "never answered" else True
    clocked.pass_s(300)
    assert not clocked.membership.apart and clocked.membership.failure is None


def test_a_replica_that_beats_and_does_not_come_is_late_after_the_limit(monkeypatch):
    clocked = Clocked(monkeypatch, started=4)
    clocked.membership.patience_s = 100.0
    clocked.pass_s(99)
    assert not clocked.membership.late
    clocked.pass_s(5)
    assert clocked.membership.late == [1]


def test_where_all_have_come_and_answer_the_limit_ends_all(monkeypatch):
    clocked = Clocked(monkeypatch)
    clocked.membership.patience_s = 100.0
    clocked.pass_s(104)
    with pytest.raises(dt.errors.ReplicaLost, match="although all ranks have come and answer"):
        clocked.membership._require()


def test_a_wait_begins_anew_with_the_next_exchange_and_the_next_agreement(monkeypatch, caplog):
    clocked = Clocked(monkeypatch)
    for _ in range(5):
        clocked.pass_s(25)
        clocked.membership.waits_in += 1
    clocked.pass_s(25)
    clocked.membership.epoch += 1
    clocked.pass_s(25)
    assert not caplog.messages


def test_a_replica_that_beats_but_never_reports_keeps_nobody_waiting(monkeypatch):
    from detonation.cluster.survive import membership as memberships

    monkeypatch.setattr(memberships, "REPORT_S", 0.1)
    store = HashStore()

    def run(replica):
        membership = Membership(store, replica, 2, 0, 1, 30.0, 1, print, confirm_s=30.0)
        found = membership.agree(RankReport(0, [], {}, 0)).members if replica == 0 else []
        left.wait(LIMIT_S)
        membership.stop()
        return found

    left = threading.Barrier(2)
    assert together(lambda: run(0), lambda: run(1))[0] == [0]


def test_records_and_reports_of_earlier_versions_are_read():
    report = {"floor": 1, "beyond": [], "absent": {}, "begun": 3}
    record = {"members": [0], "reports": {"0": report}, "guest": -1}
    agreement = parse_agreement(1, json.dumps(record).encode())
    assert (agreement.apart, agreement.late, agreement.next_step) == ([], [], 3)
    assert who_waits_for_whom(0, 2, {0: (2, Standing(0)), 1: (2, Standing(0))}, 30.0).endswith(
        "the network between them is slow or cut off"
    )


def test_a_fault_of_set_up_is_heard_until_all_are_prepared():
    store = HashStore()
    mine, other = Preparation(store, 0, 0), Preparation(store, 1, 1)
    mine.begin()
    assert mine.refused(store, [0, 1], False) is None
    other.refuse("no token")
    assert str(mine.refused(store, [0, 1], True)) == "replica 1 did not start: no token"
    unaware = Preparation(store, 0, 0)
    assert unaware.refused(store, [0, 1], True) is None  # a loop that announces nothing
    mine.prepared()
    other.prepared()
    assert mine.refused(store, [0, 1], False) is None


def test_a_refusal_before_all_have_met_counts_once_for_each_rank_and_for_a_minute(monkeypatch):
    monkeypatch.setattr(refusal, "_LOOK_S", -1.0)
    store = HashStore()
    note_refusal(store, 1, "no data")
    with pytest.raises(RefusedStart, match="replica 1 did not start: no data"):
        refusals(store, 0, 0)()
    refusals(store, 0, 0)()  # which has started again
    with pytest.raises(RefusedStart):
        refusals(store, 2, 2)()
    now = time.time()
    monkeypatch.setattr(refusal.time, "time", lambda: now + refusal.FRESH_S + 1)
    refusals(store, 3, 3)()
    monkeypatch.undo()
    refusals(store, 1, 1)  # it comes again
    refusals(store, 4, 4)()


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_refusal_that_comes_while_a_rank_waits_counts_at_any_clock(monkeypatch, hours):
    store = HashStore()
    look = refusals(store, 0, 0)
    now = time.time()
    with monkeypatch.context() as other_machine:
        other_machine.setattr(refusal.time, "time", lambda: now + 3600 * hours)
        note_refusal(store, 1, "no data")
    with pytest.raises(RefusedStart, match="replica 1 did not start: no data"):
        look()


def test_a_refusal_that_another_rank_takes_away_meanwhile_is_not_waited_for():
    class Shared(HashStore):
        """Another rank clears the refusal between any two requests of this one."""

        def clone(self):
            return self

        def check(self, keys):
            found = super().check(keys)
            self.delete_key(keys[0])
            return found

    store = Shared()
    store.set_timeout(timedelta(seconds=1))
    note_refusal(store, 1, "no data")
    refusals(store, 1, 1)
    note_refusal(store, 1, "no data")
    with pytest.raises(RefusedStart):
        refusals(store, 0, 0)()


def test_the_watch_of_a_process_that_stood_still_begins_anew(monkeypatch):
    clocked = Clocked(monkeypatch)
    turns = iter([False, True])
    clocked.watch._stopped.wait = lambda seconds: next(turns)
    clocked.membership.answered = clocked.now
    clocked.watch._awake = clocked.now
    clocked.now += 100.0
    PartitionWatch._run(clocked.watch)
    assert clocked.membership.failure is None


@pytest.mark.parametrize("beats", [False, True], ids=["it has ended", "it beats"])
def test_a_replica_that_ended_while_a_group_was_formed_is_lost_and_not_out_of_reach(
    monkeypatch, beats
):
    """A rank that refuses and still beats may be behind a firewall: it is asked for a while."""
    monkeypatch.setattr(partition, "KNOCK_PATIENCE_S", 0.3 if beats else LIMIT_S)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = Port(store)
    store.set(axis_key("beat", 1), beat_of(1, 0.05))
    store.set(axis_key("port", 1), other.name)
    membership = Membership(store, 0, 2, 0, 1, 30.0, 1, print, confirm_s=30.0)
    until(lambda: 1 in membership._watch._reached)
    other.close()
    if beats:
        monkeypatch.setattr(membership, "has_ended", lambda rank: False)
    membership.doubt()
    assert membership.apart == [1] * beats
    assert beats or membership._is_silent(1)
    membership.stop()
