"""The law of survival: whatever a replica was doing when it was lost, the others take every step, and stay equal."""

import copy
import itertools
import json
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import detonation as dt
from covering import covered, some
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.cluster.processes import waiting
from detonation.cluster.processes.failure import Failure
from detonation.cluster.survive import membership as memberships
from detonation.cluster.survive import partition
from detonation.cluster.survive.agreement import (
    EPOCH,
    GONE,
    RankReport,
    ReplicaLost,
    agreement_record,
    axis_key,
    axis_store,
    beat_of,
    latest_axis_store,
    next_axis_store,
    note_gone,
    serve_one_axis,
)
from detonation.cluster.survive.elastic_axis import MeetingPoint, Survival
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.partition import PartitionWatch
from detonation.cluster.survive.port import Port, Presence, refuses
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.flat.tensors import digest
from detonation.core.integrity.fault_counts import BadPeer, Desync
from detonation.core.optimizer.trained import TrainedParameters
from detonation.log.records import whole_records
from limits import LIMIT_S, until
from steps import Died, Mortal, Passing, replicas, step_on, together, unsent
from zoo import KINDS, TALKING, Plain, batch, built

REPLICAS, STEPS = 4, 8
MODEL = built(Plain)  # the threads share a random generator


def die(communicator):
    with communicator._changed:
        communicator._closed = True
        communicator._changed.notify_all()
    communicator._membership.leave(0)  # the others need not wait until it is silent for long
    communicator._group.abandon()


def survivors(act, min_replicas=1, replicas=REPLICAS):
    """What `act(communicator)` returns on each replica, a thread of its own; nothing for one that died."""
    store, results = HashStore(), {}

    def run(replica):
        membership = Membership(
            store, replica, replicas, 0, 1, 30.0, min_replicas, print, confirm_s=30.0
        )
        communicator = Mortal(membership, 30.0)
        try:
            results[replica] = act(communicator)
        except Died:
            die(communicator)
        else:
            communicator.close()

    together(*(partial(run, replica) for replica in range(replicas)))
    return results


def started(communicator, scheme, base):
    model = copy.deepcopy(MODEL)
    safety = dt.Safety(verify_every=1)
    return model, dt.replicate(base(model.parameters()), model, communicator, scheme, safety=safety)


def trained(communicator, scheme, base, overlap=False, log=None):
    model, optimizer = started(communicator, scheme, base)
    optimizer.record(log)
    for step in range(STEPS):
        loss = model(batch(communicator.replica, step, 32)).mean()
        step_on(optimizer, loss, overlap)
        optimizer.zero_grad()
    optimizer.synchronize()
    return optimizer, digest(model.parameters()), communicator


@some("name", TALKING, keep=[*KINDS])
def test_law_2_the_others_take_every_step_and_stay_equal(name, tmp_path):
    scheme, point = TALKING[name], sum(name.encode())

    def act(communicator):
        if communicator.replica == point // 8 % REPLICAS:
            communicator.countdown, communicator.under_way = point % 2, bool(point & 4)
        return trained(
            communicator,
            scheme,
            torch.optim.AdamW,
            overlap="demo" in name,
            log=dt.UpdateLog(tmp_path),
        )

    ends = survivors(act)
    assert len(ends) == REPLICAS - 1
    assert {optimizer.step_count for optimizer, _, _ in ends.values()} == {STEPS}
    assert len({weights for _, weights, _ in ends.values()}) == 1
    assert [(ends[r][2].replica, ends[r][2].size()) for r in sorted(ends)] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    assert not any(optimizer.stats.refused for optimizer, _, _ in ends.values())
    model, optimizer = started(LoopbackCommunicator(REPLICAS), scheme, torch.optim.AdamW)
    assert dt.replay(tmp_path, optimizer) == STEPS
    assert digest(model.parameters()) == next(iter(ends.values()))[1]
    starts = [next(whole_records(path)).table() for path in tmp_path.iterdir()]
    assert len({start["run"] for start in starts}) == 1  # also where another replica took over


def trained_two(communicator, scheme, every, overlap):
    """Two optimizers over one axis, the second of which steps every `every` steps; all replicas see the same."""
    model = copy.deepcopy(MODEL)
    first, second = (
        dt.replicate(torch.optim.SGD(layer.parameters(), lr=0.1), model, communicator, scheme)
        for layer in model.layers
    )
    for step in range(2 * STEPS):
        with ExitStack() as stack:
            for optimizer in (first, second) if overlap else ():
                stack.enter_context(optimizer.overlap())
            model(batch(0, step, 32)).mean().backward()
        for optimizer in (first, second)[: 1 if step % every else 2]:
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in (first, second):
        optimizer.synchronize()
        assert {each.link.replicas for each in optimizer.build()} == {communicator.size()}
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@covered("name, way", ["full", "loco", "demo", "diloco"], [(1, False), (3, False), (1, True)])
def test_two_optimizers_on_one_axis_both_go_on_with_the_replicas_that_are_left(name, way):
    every, overlap = way
    """Where all replicas see the same, the loss of one changes nothing but the rounding of means."""
    scheme = dt.loco(link="all-gather") if name == "loco" else TALKING[name]

    def act(communicator, dies):
        if dies and communicator.replica == 1:
            rounds = (
                name == "diloco"
            )  # which end with steps 2 and 5; the others send in every step of an optimizer
            communicator.dies_in, communicator.countdown = (6, 0) if rounds else (4, 1)
            communicator.under_way = overlap
        return trained_two(communicator, scheme, every, overlap)

    whole = survivors(partial(act, dies=False), replicas=2)[0]
    left = survivors(partial(act, dies=True), replicas=3)
    assert left.keys() == {0, 2} and torch.equal(left[0], left[2])
    torch.testing.assert_close(left[0], whole, rtol=1e-4, atol=1e-6)


def told_through_owners(communicator):
    """For each of two optimizers: what all were given and is neither in the weights nor waits here, and the owners."""
    model = copy.deepcopy(MODEL)
    scheme = dt.demo(topk=4, chunk=16, decay=1.0, link="owner")
    optimizers = [
        dt.replicate(torch.optim.SGD(layer.parameters(), lr=1.0), layer, communicator, scheme)
        for layer in model.layers
    ]
    missing = [
        [-parameter.detach().clone() for parameter in layer.parameters()] for layer in model.layers
    ]
    for step in range(STEPS):
        for optimizer, layer, totals in zip(optimizers, model.layers, missing, strict=True):
            for number, (parameter, total) in enumerate(
                zip(layer.parameters(), totals, strict=True)
            ):
                made = torch.Generator().manual_seed(10 * step + number)
                parameter.grad = torch.randn(parameter.shape, generator=made)
                total += parameter.grad
            optimizer.step()
        if step == 0:
            owners = [each.build()[0].channel.exchange.owners for each in optimizers]
    for optimizer, layer, totals in zip(optimizers, model.layers, missing, strict=True):
        for total, parameter, held in zip(
            totals, layer.parameters(), unsent(optimizer), strict=True
        ):
            total += parameter.detach() - held
    channels = [optimizer.build()[0].channel for optimizer in optimizers]
    flats = [
        each.layout.flatten(totals, totals[0].device)
        for each, totals in zip(channels, missing, strict=True)
    ]
    return [
        each.scheme.codec.basis.forward(flat) for each, flat in zip(channels, flats, strict=True)
    ], owners


@pytest.mark.parametrize(("countdown", "under_way"), [(0, False), (1, True), (2, True)])
def test_law_1_a_lost_owner_takes_along_what_is_in_its_rows_alone(countdown, under_way):
    """What was sent to it and its server residual, of each optimizer on the axis."""

    def act(communicator):
        if communicator.replica == 1:
            communicator.countdown, communicator.under_way = countdown, under_way
        return told_through_owners(communicator)

    ends = survivors(act, replicas=3)
    assert ends.keys() == {0, 2}
    for of_each, owners in zip(
        zip(*(found for found, _ in ends.values()), strict=True), ends[0][1], strict=True
    ):
        missing = torch.stack(of_each).mean(0)  # [rows, chunk]
        numbers = torch.arange(len(missing)).unsqueeze(1)
        of_lost = owners.deal(numbers, torch.zeros(1, dtype=numbers.dtype))[1].flatten().unique()
        others = torch.ones(len(missing), dtype=torch.bool).index_fill(0, of_lost, False)
        assert missing[others].abs().max() < 1e-4 < 1e-2 < missing[of_lost].abs().max()


@pytest.mark.parametrize("name", ["full", "demo", "demo-owner", "diloco"])
def test_an_optimizer_that_hears_of_no_loss_ends_with_an_error(name):
    """Else it would divide the sums of two replicas by three."""

    def act(communicator):
        model = copy.deepcopy(MODEL)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = dt.replicate(sgd, model, Passing(communicator), TALKING[name])
        for step in range(2 * STEPS):
            if (communicator.replica, step) == (1, 3):
                raise Died
            model(batch(communicator.replica, step, 32)).mean().backward()
            try:
                optimizer.step()
            except (BadPeer, Desync) as error:
                return str(error)
            optimizer.zero_grad()
        return ""

    told = survivors(act, replicas=3)
    assert told.keys() == {0, 2} and all(
        "of replica 1 were refused" in e or "replica 1 added" in e for e in told.values()
    )


@pytest.mark.parametrize(("countdown", "under_way"), [(0, True), (1, False), (1, True)])
def test_uneven_rounds_go_on_and_the_counts_are_those_of_the_replicas_that_are_left(
    countdown, under_way
):
    """It is lost in the exchange of a round, or while the replicas agree on local steps."""

    def act(communicator):
        if communicator.replica == 1:
            communicator.countdown, communicator.under_way = countdown, under_way
        model = copy.deepcopy(MODEL)
        adam = torch.optim.AdamW(model.parameters())
        optimizer = dt.replicate(adam, model, communicator, dt.diloco(every=2), balance=True)
        for step in range(STEPS):
            if not optimizer.idle:
                model(batch(communicator.replica, step, 32)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.stats.local_steps, digest(model.parameters())

    ends = survivors(act)
    assert len(ends) == REPLICAS - 1 and len({weights for _, weights in ends.values()}) == 1
    counts = [found for found, _ in ends.values()]
    assert (
        len(counts[0]) == REPLICAS - 1
        and max(counts[0]) == 2
        and all(found == counts[0] for found in counts)
    )


def test_the_interrupted_mean_is_that_of_the_replicas_that_are_left():
    def act(communicator):
        if communicator.replica == 1:
            communicator.countdown = 0
        return trained(
            communicator, dt.full(), lambda parameters: torch.optim.SGD(parameters, lr=0.1)
        )

    model, numbers = copy.deepcopy(MODEL), [0, 1, 2, 3]
    for step in range(STEPS):
        if step == 3:
            numbers = [0, 2, 3]  # it died before it sent anything
        gradients = []
        for number, replica in enumerate(numbers):
            data = replica if step <= 4 else number  # step 4 renumbers, after its backward
            gradients.append(
                torch.autograd.grad(model(batch(data, step, 32)).mean(), list(model.parameters()))
            )
        with torch.no_grad():
            for parameter, *each in zip(model.parameters(), *gradients, strict=True):
                parameter -= 0.1 * torch.stack(each).mean(0)
    for optimizer, *_ in survivors(act).values():
        for parameter, expected in zip(
            optimizer.param_groups[0]["params"], model.parameters(), strict=True
        ):
            torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize("scheme", ["full", "demo", "demo-owner"])
def test_a_collective_that_only_some_finished_is_finished_by_all_with_the_same_bytes(scheme):
    def act(communicator):
        take, torn = communicator._take, []

        def torn_once(each):
            if (
                communicator.replica == 2
                and communicator._begun == 4
                and not torn
                and each.flight.ended
            ):
                torn.append(each.number)
                each.flight.good = False
            return take(each)

        communicator._take = torn_once
        ends = trained(communicator, TALKING[scheme], torch.optim.AdamW)
        assert torn or communicator.replica != 2
        return ends

    ends = survivors(act)
    assert len({weights for _, weights, _ in ends.values()}) == 1
    assert [loss.replicas for _, _, c in ends.values() for loss in c.losses] == [
        ()
    ] * REPLICAS  # nobody was lost
    undisturbed = survivors(lambda c: trained(c, TALKING[scheme], torch.optim.AdamW))
    assert {weights for _, weights, _ in ends.values()} == {
        weights for _, weights, _ in undisturbed.values()
    }


STREAMING = dt.schemes.streaming_diloco(every=6, fragments=3, delay=1)
LOST = "a replica was lost meanwhile; the remaining replicas save the next"


@pytest.mark.parametrize("scheme", [dt.demo(topk=4, chunk=16), STREAMING], ids=["demo", "delay"])
def test_a_checkpoint_is_of_the_replicas_that_are_left_or_fails_on_all(scheme, tmp_path):
    def act(communicator):
        model, optimizer = started(communicator, scheme, torch.optim.AdamW)
        for step in range(4):
            if step == 2 and communicator.replica == 0:
                raise Died
            if step == 2:
                with pytest.raises(dt.errors.NotSaved, match=LOST):
                    dt.save_checkpoint(tmp_path, model, optimizer)
            step_on(optimizer, model(batch(communicator.replica, step, 32)).mean())
            optimizer.zero_grad()
        return dt.save_checkpoint(tmp_path, model, optimizer)

    assert set(survivors(act).values()) == {tmp_path / "step-000004"}
    names = {path.name for path in (tmp_path / "step-000004").iterdir()}
    assert names == {
        "manifest.json",
        *(f"replica{replica}-shard0.safetensors" for replica in range(3)),
    }
    assert not [*tmp_path.glob(".step*")]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("scheme", [dt.demo(topk=4, chunk=16), STREAMING], ids=["demo", "delay"])
def test_a_save_in_the_background_that_meets_a_loss_says_so_and_can_be_repeated(scheme, tmp_path):
    def act(communicator):
        model, optimizer = started(communicator, scheme, torch.optim.AdamW)
        step_on(optimizer, model(batch(communicator.replica, 0, 32)).mean())
        if communicator.replica == 0:
            raise Died
        with dt.Checkpoints(tmp_path, model, optimizer) as checkpoints:
            checkpoints.save()
            with pytest.raises(dt.errors.NotSaved, match=LOST) as failed:
                checkpoints.wait()
            assert failed.value.lost
            optimizer.synchronize()
            checkpoints.save()
            return checkpoints.wait()

    assert set(survivors(act, replicas=3).values()) == {tmp_path / "step-000001"}


def test_texts_have_a_name_of_their_own_also_where_the_same_replicas_come_together_again():
    def named(communicator):
        found = [communicator.texts()._channel]
        for step in (3, 7):  # a replica came in and was lost
            communicator._pending = [(step, [0, 1])]
            communicator.adopt(step)
            found.append(communicator.texts()._channel)
        return found

    names = survivors(named, replicas=2)
    assert names[0] == names[1] and len(set(names[0])) == 3


def test_a_start_that_was_not_complete_spoils_no_later_one():
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    for rank in (1, 0):
        away = "ranks 1, 2" if rank == 0 else "rank 0"
        with pytest.raises(TimeoutError, match=f"rank {rank} has not met {away} within 0.2 s"):
            next_axis_store(store, rank, 3)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    threads = [
        threading.Thread(target=lambda r=r: next_axis_store(store, r, 3).set(f"here/{r}", ""))
        for r in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert latest_axis_store(store).check([f"here/{rank}" for rank in range(3)])


def test_who_waits_for_others_before_the_start_names_them_once_they_are_late(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "MEET_LINE_S", 0.02)
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    store.set(axis_key("beat", 2), beat_of(0, 1.0))
    with pytest.raises(TimeoutError, match=r"rank 0 has not met rank 1 within 0\.3 s"):
        Membership(store, 0, 3, 0, 1, 30.0, 1, print)
    assert "rank 0 has waited for 0 s, at most 0.3, for rank 1" in caplog.text


@pytest.mark.parametrize("lost", [0, 2])
def test_a_replica_that_its_launcher_saw_end_before_all_had_met_ends_nobody_else(lost):
    store, scheme = HashStore(), dt.random_sign()
    serve_one_axis(store)

    def run(replica):
        if replica == lost:
            note_gone(axis_store(store, 0), replica)
            return None
        communicator = dt.elastic(replica=replica, replicas=3, store=store, min_replicas=2)
        optimizer, end, _ = trained(communicator, scheme, dt.SignSGD)
        communicator.close()
        return end, optimizer.step_count, communicator.size(), communicator.losses[0].replicas

    ends = {*together(*(partial(run, replica) for replica in range(3)))} - {None}
    assert {end[1:] for end in ends} == {(STEPS, 2, (lost,))} and len(ends) == 1


def test_a_guest_that_gave_up_keeps_nobody_out():
    store = HashStore()
    axis = dt.elastic(replica=0, replicas=1, store=store, silence_s=1.1)
    gone = dt.Guest(store, silence_s=1.1)
    gone.membership.stop()
    guest = dt.Guest(store, silence_s=1.1)
    until(lambda: axis.host.guest == guest.number)
    guest.membership.stop()
    axis.close()


def test_replicas_renumber_in_fp32_wherever_synchronize_is_called(monkeypatch):
    model = torch.nn.Linear(4, 4)
    optimizer = dt.replicate(
        dt.SignSGD(model.parameters()), model, LoopbackCommunicator(2), dt.demo(topk=1, chunk=4)
    )
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    seen = []
    monkeypatch.setattr(
        optimizer, "renumber", lambda: seen.append(torch.is_autocast_enabled("cpu"))
    )
    with torch.autocast("cpu", torch.bfloat16):
        optimizer.synchronize()
    assert seen == [False]


@pytest.fixture
def now(monkeypatch):
    """The time of memberships, which stands still: these tests tell fractions of a second apart."""
    monkeypatch.setattr(memberships, "time", SimpleNamespace(monotonic=lambda: 100.0))
    return 100.0


def test_a_replica_that_stood_still_itself_takes_nobody_for_lost(now):
    membership = Membership(HashStore(), 0, 1, 0, 1, 30.0, 1, print)
    membership.stop()
    membership._pace = 0.05
    membership._seen[1] = b"7", now - 5  # an old beat, all that it knew when it was stopped
    membership._awake = now - 5
    assert not membership._lost(1, 0.6)
    membership._awake = now
    assert membership._lost(1, 0.6)


def test_a_rank_has_its_time_to_report_from_the_notice_on(now):
    store = HashStore()
    store.set(axis_key("beat", 1), "1")
    membership = Membership(store, 0, 2, 0, 1, 30.0, 1, print)
    membership.stop()
    membership._awake, membership._pace = now, 0.05
    membership._seen[1] = b"1", now - 4
    membership.noticed_at = now - 2.9
    assert not membership._is_silent(1)
    membership.noticed_at = now - 3.1
    assert membership._is_silent(1)
    membership._seen[1] = b"1", now - 2  # a busy machine, or a long call under the lock
    assert not membership._is_silent(1)
    # its silence is what was noticed
    membership.noticed_at, membership._seen[1] = now, (b"1", now - 31)
    assert membership._is_silent(1)


def test_a_host_refuses_the_port_of_a_process_that_has_ended_and_of_no_other():
    """For a process that stands still its kernel answers. For one that has ended, its forks do not."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here, there = os.pipe()
    if not (pid := os.fork()):
        port = Port(dist.PrefixStore("axis", store))
        if worker := os.fork():
            os.write(there, f"{port.name} {worker}".encode())
        while True:
            signal.pause()
    name, _, worker = os.read(here, 100).decode().rpartition(" ")
    try:
        assert not refuses(name)
        os.kill(pid, signal.SIGSTOP)
        assert not refuses(name)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(here), os.close(there)
        ended = refuses(name)
        os.kill(int(worker), signal.SIGKILL)  # which lived until now
    assert ended
    assert not refuses("") and not Port(HashStore()).name


def test_a_rank_whose_port_answered_and_refuses_now_is_lost_at_once():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = {rank: Port(store) for rank in (1, 2)}
    ports[2].close()  # as behind a firewall: it never answered
    for rank, port in ports.items():
        store.set(axis_key("beat", rank), "1")
        store.set(axis_key("port", rank), port.name)
    membership = Membership(store, 0, 3, 0, 1, 30.0, 1, print, confirm_s=30.0)
    membership.stop()
    membership._pace = 0.05
    membership._knock([1, 2])
    now = membership.noticed_at = membership._awake = time.monotonic()
    membership._seen |= {1: (b"1", now - 1), 2: (b"1", now - 1)}
    assert not membership._is_silent(1) and not membership._is_silent(2)
    membership._beat(2)
    assert not membership.called
    ports[1].close()
    assert membership._is_silent(1) and not membership._is_silent(2)
    for count in (2, 3):  # both are late, and take turns
        membership._beat(count)
    assert membership.called and store.check(["1/call"])
    membership._seen[1] = b"2", time.monotonic() + 1  # it beats
    assert not membership._is_silent(1)


def test_a_replica_that_is_lost_while_all_connect_ends_nobody_else():
    """Its process has met the others at the store, and ends before the first collective has a network."""
    store, scheme = HashStore(), dt.random_sign()

    class Incomplete(SurvivingCommunicator):
        def _formed(self):
            if not self._membership.epoch:
                raise RuntimeError(
                    "wait timeout, keys: /0/shard0/0/1"
                )  # of gloo, which waits for a replica in vain
            return super()._formed()

    def run(replica):
        membership = Membership(store, replica, 3, 0, 1, 30.0, 2, print, confirm_s=30.0)
        if replica == 1:
            membership.leave(0)
            return None
        communicator = Incomplete(membership, 30.0)
        optimizer, end, _ = trained(communicator, scheme, dt.SignSGD)
        communicator.close()
        return end, optimizer.step_count, communicator.size(), communicator.losses[0].replicas

    first, _, last = together(*(partial(run, replica) for replica in range(3)))
    assert first == last and first[1:] == (STEPS, 2, (1,))


def test_where_nobody_can_connect_the_error_says_why():
    """As where a firewall lets the store through, and no other port."""
    store = HashStore()

    class Unconnected(SurvivingCommunicator):
        def _formed(self):
            raise RuntimeError(
                "connect to 10.0.0.2: No route to host\nException raised from connect"
            )

    def run(replica):
        membership = Membership(store, replica, 2, 0, 1, 30.0, 1, print, confirm_s=30.0)
        communicator = Unconnected(membership, 30.0)
        with pytest.raises(
            dt.errors.ReplicaLost, match=r"process group: connect to 10.0.0.2: No route to host$"
        ):
            communicator.all_reduce(torch.zeros(1))
        membership.leave(LIMIT_S)
        return True

    assert together(*(partial(run, replica) for replica in range(2))) == [True, True]


def test_too_few_replicas_stop_and_say_how_many_are_left():
    def act(communicator):
        if communicator.replica == 1:
            communicator.countdown = 0
        with pytest.raises(
            dt.errors.ReplicaLost,
            match=r"lost replica 1 after step 4: 3 replicas are left, but .* is 4",
        ):
            trained(communicator, dt.demo(), torch.optim.AdamW)

    assert len(survivors(act, min_replicas=4)) == 3


def test_a_second_replica_is_lost_while_the_others_renumber_after_the_first():
    def act(communicator):
        if communicator.replica in (1, 2):
            communicator.countdown, communicator.dies_in = 0, 3 + communicator.replica
        return trained(communicator, dt.demo(topk=4, chunk=16), torch.optim.AdamW)

    ends = survivors(act)
    assert sorted(ends) == [0, 3]
    assert len({weights for _, weights, _ in ends.values()}) == 1
    assert {c.size() for _, _, c in ends.values()} == {2}


class Reported(SurvivingCommunicator):
    """A replica that dies after it has reported, so that the others count on it for their group."""

    def _formed(self):
        if not self._membership.epoch:
            return super()._formed()
        self._membership.stop()
        self._closed = True
        raise Died


def test_a_replica_that_dies_once_all_have_agreed_on_it_keeps_nobody_waiting(monkeypatch):
    """As where machines are taken together. The others must not wait until the group has failed to form."""
    monkeypatch.setattr("detonation.cluster.survive.groups.FORM_S", 10 * LIMIT_S)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    store, ready = HashStore(), threading.Barrier(REPLICAS)

    def run(replica):
        membership = Membership(store, replica, REPLICAS, 0, 1, 30.0, 1, print)
        communicator = (Reported if replica == 3 else SurvivingCommunicator)(membership, 30.0)
        ready.wait(LIMIT_S)
        if replica == 2:
            die(communicator)
        if replica > 1:
            return None
        with communicator._changed:
            membership.under_way = True
        sums = communicator.all_reduce(torch.ones(3))()
        communicator.close()
        return membership.members, sums.tolist()

    ended = together(*(partial(run, replica) for replica in range(REPLICAS)))
    assert ended == [([0, 1], [2.0] * 3)] * 2 + [None, None]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"min_replicas": 3}, "min_replicas is 3, must be from 1 to the number of replicas, 2"),
        ({"silence_s": 0.5}, "silence_s is 0.5, must be above 1"),
        ({"replica": 2}, "replica is 2, replicas is 2: pass both"),
        ({"replica": None}, "or only a mesh of all replicas"),
        ({"store": None}, "need a store"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        dt.elastic(**{"replica": 0, "replicas": 2, "store": HashStore()} | arguments)


def test_the_frozen_parameters_are_found_while_another_thread_makes_an_optimizer(monkeypatch):
    _known = TrainedParameters(MODEL, torch.optim.SGD(MODEL.parameters(), lr=0.1))
    mine = TrainedParameters(MODEL, torch.optim.SGD(MODEL.parameters(), lr=0.1))
    everyone, others = TrainedParameters.everyone, []

    def interrupted(each):  # by a thread that makes one in just that moment
        if not others:
            others.append(each)
            others[0] = TrainedParameters(MODEL, each._base)
        return everyone.fget(each)

    monkeypatch.setattr(TrainedParameters, "everyone", property(interrupted))
    assert not mine.frozen and others[0] is not mine


def test_nobody_writes_to_a_sum_of_which_another_replica_may_need_a_copy():
    """Else the others copy what the first one has scaled already, and go on apart."""
    found = []

    def act(communicator):
        if communicator.replica == 1:
            communicator.countdown = 0
        start = communicator.start

        def watched(kind, values, user):
            wait = start(kind, values, user)

            def waited():
                total = wait()
                found.append((total, total.clone(), bool(user.absent)))
                return total

            return waited if kind == "all_reduce" else wait

        communicator.start = watched
        return trained(communicator, TALKING["full"], torch.optim.AdamW)[1]

    assert len(set(survivors(act).values())) == 1
    assert sum(absent for *_, absent in found) == REPLICAS - 1
    assert all(torch.equal(total, before) for total, before, _ in found)


def test_a_loss_that_all_have_agreed_on_meanwhile_calls_nobody_again():
    """The thread of a rank had seen the loss; before it said so the others had called, and all had agreed."""
    store = HashStore()
    store.set(axis_key("beat", 1), "1")
    membership = Membership(store, 0, 2, 0, 1, 30.0, 1, print)
    membership.stop()
    store.set(axis_key("beat", 1), GONE)

    class Between:
        """A store: when the thread has read the beats the agreement is over."""

        def __getattr__(self, name):
            return getattr(store, name)

        def multi_get(self, keys):
            membership.members, membership.epoch = [0], 1
            return store.multi_get(keys)

    class Once:
        turns = 0

        def wait(self, seconds):
            self.turns += 1
            return self.turns > 1

        def set(self):
            pass

    membership._beats, membership._stopped = Between(), Once()
    membership._run()
    assert not store.check(["2/call"]) and not membership.called


def test_nobody_waits_for_the_record_of_an_agreement_that_nobody_needs():
    """The thread of a rank saw the record of an agreement; before it read it, all had agreed. It then beat no more."""
    store = HashStore()
    membership = Membership(store, 0, 1, 0, 1, 30.0, 1, print)
    membership.stop()
    store.set("1/record", json.dumps({"members": [0], "reports": {}, "guest": -1}))
    membership.called = True

    class Meanwhile:
        """A store: when the thread has seen the record the agreement is over."""

        def check(self, keys):
            membership.epoch = 1
            return keys == ["1/record"]

        def get(self, key):
            assert key == "1/record"  # any other would come when the next replica is lost, or never
            return store.get(key)

    membership._beats = Meanwhile()
    membership._watch_record()


class Hooked:
    """A store that calls `before[name](*arguments)` before its method `name`."""

    def __init__(self, store, **before):
        self._store, self._before = store, before

    def __getattr__(self, name):
        method = getattr(self._store, name)
        return lambda *given: (self._before.get(name, lambda *_: None)(*given), method(*given))[1]


def stopped(store):
    """The membership of replica 0 of two, whose thread has ended."""
    store.set(axis_key("beat", 1), "1")
    membership = Membership(store, 0, 2, 0, 1, 30.0, 1, print)
    membership.stop()
    membership._stopped.clear()
    return membership


def left_out(membership):
    """Writes that the others go on without this membership's replica 0."""
    record = agreement_record([1], 1, {1: vars(RankReport(0, [], {}, 3))}, -1, False)
    membership.store.set("1/record", json.dumps(record))


@pytest.mark.parametrize("hears", [True, False], ids=["its loop hears of it", "it waits elsewhere"])
def test_a_replica_that_the_others_left_out_ends_once_unless_its_loop_hears_of_it(
    monkeypatch, caplog, hears
):
    """An `end` that raises is logged, and changes nothing."""
    monkeypatch.setattr(partition, "LEAVE_S", 0.0)
    membership, ends = stopped(HashStore()), []

    def end(error):
        ends.append(error)
        raise ValueError("a fault of end")

    membership.end = end
    membership.called = True
    membership._watch_record()  # nobody has agreed yet
    assert membership.failure is None
    left_out(membership)
    membership.told = hears
    watch = PartitionWatch(membership)
    for _ in range(3):
        membership._watch_record()
    if not hears:
        watch._thread.join(LIMIT_S)
    watch.stop()
    assert len(ends) == (not hears) and ("a fault of end" in caplog.text) != hears
    assert str(membership.failure).startswith("replica 0 did not answer")


def test_a_loop_that_raises_the_error_of_a_recovery_has_heard_of_it():
    membership = Membership(HashStore(), 0, 1, 0, 1, 30.0, 1, print)
    axis = SurvivingCommunicator(membership, 30.0)
    axis.error = dt.errors.ReplicaLost("left out")
    with axis._changed, pytest.raises(dt.errors.ReplicaLost, match="left out"):
        axis.settle()
    assert membership.told
    axis.close()


@pytest.mark.parametrize(
    "error", [RuntimeError(), KeyError(7), ConnectionError("reset\nat line 9")], ids=repr
)
def test_a_rank_whose_thread_fails_hears_of_it(error):
    """It beats no more, so the others drop it."""

    def fail(*_):
        raise error

    membership = stopped(HashStore())
    membership._beats = Hooked(membership._beats, multi_get=fail)
    membership._run()
    assert membership.called
    with pytest.raises(
        dt.errors.ReplicaLost,
        match=rf"rank 0 has lost the store .*: {type(error).__name__}: [^\n]*$",
    ):
        membership.require_store()


@pytest.mark.parametrize("asked", ["check", "set"])
def test_who_leaves_does_not_fail_where_the_process_of_the_store_ended_first(asked):
    """Replica 0 keeps the store, saw that all had left and ended while this one was about to look once more; or it had
    waited for this one as long as it waits."""

    def ended(*_):
        raise dist.DistNetworkError("Connection reset by peer")

    membership = stopped(HashStore())
    membership.store = Hooked(membership.store, **{asked: ended})
    membership.leave(LIMIT_S)
    assert membership._stopped.is_set() and membership._beats.check([axis_key("left", 0)]) == (
        asked == "check"
    )


def test_a_replica_leaves_once_its_recovery_from_a_loss_is_over():
    """Otherwise its thread makes another group, which the end of the interpreter meets."""
    membership = Membership(HashStore(), 0, 1, 0, 1, 30.0, 1, print)
    begun, goes_on, found, leave = threading.Event(), threading.Event(), [], membership.leave

    class Slow(SurvivingCommunicator):
        def _recover(self):
            begun.set()
            assert goes_on.wait(LIMIT_S)

    communicator = Slow(membership, 30.0)

    def wait_for(*given):
        goes_on.set()
        return threading.Condition.wait_for(communicator._changed, *given)

    membership.leave = lambda limit_s: found.append(communicator._recovering) or leave(limit_s)
    membership.call()
    assert begun.wait(LIMIT_S)
    communicator._changed.wait_for = wait_for
    communicator.close()
    goes_on.set()
    assert found == [False]


def test_all_replicas_end_in_words_where_the_process_of_the_store_is_killed():
    listener = socket.create_server(("127.0.0.1", 0))
    port, trained = listener.getsockname()[1], threading.Barrier(2, timeout=LIMIT_S)
    if not (keeper := os.fork()):
        kept = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.fileno(),
        )
        while kept is not None:
            signal.pause()
    listener.close()

    def replica(number):
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S)
        )
        axis, model = dt.elastic(replica=number, replicas=2, store=store), copy.deepcopy(MODEL)
        optimizer = dt.replicate(torch.optim.AdamW(model.parameters()), model, axis, dt.loco())
        with pytest.raises(
            dt.errors.ReplicaLost, match=f"rank {number} has lost the store .ended or out of reach"
        ):
            for step in itertools.count():
                model(batch(number, step, 32)).mean().backward()
                optimizer.step()
                if step == 1 and trained.wait() == 0:
                    os.kill(keeper, signal.SIGKILL)
        return True

    assert together(partial(replica, 0), partial(replica, 1)) == [True, True]
    os.waitpid(keeper, 0)


def test_nobody_waits_for_beats_of_a_replica_that_did_not_ask_to_come_in():
    """The thread of a rank read that guest 2 asks; before it noted so, all had agreed on it, and look for guest 3."""
    store, membership = HashStore(), None

    def agreed(keys):
        if keys == [axis_key("ask", 2)]:
            with membership.changed:
                membership.guest, membership.guest_asks = 3, False

    membership = stopped(store)
    store.set(axis_key("ask", 2), "1")
    membership._beats = Hooked(membership._beats, check=agreed)
    membership._look_for_guest()
    assert (membership.guest, membership.guest_asks) == (3, False)


def test_ranks_come_in_while_nobody_reads_which_there_are():
    """The thread that beats and the one that agrees share what was seen of each rank."""
    membership, free = stopped(HashStore()), []

    class Seen(dict):
        def items(self):
            other = threading.Thread(
                target=lambda: free.append(membership.changed.acquire(blocking=False))
            )
            other.start()
            other.join()
            return super().items()

    membership._seen, membership._awake, membership._pace = (
        Seen(membership._seen),
        0.0,
        0.05,
    )  # it stood still
    membership._beat(2)
    assert free == [False]


class Far:
    """A store that is `seconds` away."""

    def __init__(self, store, seconds):
        self._store, self._seconds = store, seconds

    def clone(self):
        return Far(self._store.clone(), self._seconds)

    def __getattr__(self, name):
        time.sleep(self._seconds)
        return getattr(self._store, name)


@pytest.mark.parametrize(
    "away", [(0.12, 0.12, 0.12), (0.0, 0.3, 0.0)], ids=["all are far", "one is far"]
)
def test_a_store_that_is_far_away_hides_no_loss_and_makes_none(away):
    """A period of beats takes several requests: each rank tells how long, and none judges faster than that."""
    store, found = HashStore(), {}
    report = RankReport(0, [], {}, 0)

    def run(replica):
        membership = Membership(Far(store, away[replica]), replica, 3, 0, 1, 1.0, 1, print)
        membership.under_way = True
        time.sleep(2)
        if replica == 2 and min(away):
            membership.stop()
            return
        if not min(away):
            membership.call()
            time.sleep(away[replica] * 4)
        with membership.changed:
            membership.changed.wait_for(lambda: membership.called)
        found[replica] = membership.agree(report).members
        membership.stop()

    together(*(partial(run, replica) for replica in range(3)))
    assert found == (
        {0: [0, 1], 1: [0, 1]} if min(away) else {replica: [0, 1, 2] for replica in range(3)}
    )


def test_a_run_that_goes_on_in_its_middle_has_the_time_of_first_steps_too():
    def act(communicator):
        found = []
        for step in range(100, 104):
            communicator.enter_step(step)
            found.append(communicator._membership.under_way)
        return found

    assert set(map(tuple, survivors(act).values())) == {(False, False, True, True)}


def test_a_launcher_counts_the_replicas_that_came_in():
    point = MeetingPoint(Survival(1, 2), 4)
    point.serve()
    store = axis_store(point._store, 0)
    try:
        assert [bool(point.survives(Failure(rank, 0.0, "X", ""))) for rank in (0, 1)] == [
            True,
            True,
        ]
        store.set("2/record", json.dumps({"members": [2, 3, 4, 5], "reports": {}, "guest": -1}))
        store.set(EPOCH, "2")
        assert point.survives(Failure(2, 0.0, "X", "")) and point.survives(Failure(3, 0.0, "X", ""))
        assert not point.survives(Failure(4, 0.0, "X", ""))
    finally:
        point.close()


def test_a_replica_that_its_launcher_saw_ending_is_gone_at_once():
    """For a newcomer, too, which would else wait until it is silent for long."""
    point = MeetingPoint(Survival(1, 0), 2)
    point.serve()
    store = axis_store(point._store, 0)
    try:
        for rank in range(2):
            store.set(axis_key("beat", rank), "1")
            Presence(store, 2, 1, silence_s=1e9).require()
            assert point.survives(Failure(rank, 0.0, "X", ""))
        with pytest.raises(ReplicaLost, match="has ended"):
            Presence(store, 2, 1, silence_s=1e9).require()
    finally:
        point.close()


def averaged(axis, countdown, under_way):
    """The statistics after `synchronize()`, at a collective of which the last replica is lost."""
    model = torch.nn.BatchNorm1d(4, affine=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = dt.replicate(sgd, model, axis, dt.full())
    numbers = torch.Generator().manual_seed(axis.replica)
    model(torch.randn(8, 4, generator=numbers)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        model.running_mean.fill_(10.0 * (axis.replica + 1))
        model.running_var.fill_(axis.replica + 1.0)
    if axis.replica == 2:
        axis.dies_in, axis.countdown, axis.under_way = axis._begun + 1, countdown, under_way
    optimizer.synchronize()
    return model.running_mean[0].item(), model.running_var[0].item()


@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("countdown", range(6))
def test_law_2_statistics_are_the_mean_of_whole_replicas_if_one_is_lost_meanwhile(
    countdown, under_way
):
    first, second, _ = replicas(lambda axis: averaged(axis, countdown, under_way))
    assert first == second
    assert first[0] in (15.0, 20.0) and first[1] in (1.5, 2.0)
