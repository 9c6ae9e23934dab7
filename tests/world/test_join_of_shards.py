"""Joining by a newcomer of two shards, of which one loses its connection to the replica that gives the state."""

import contextlib
import faulthandler
import gc
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import detonation as dt
from detonation.cluster.survive.elastic_axis import MeetingPoint, Survival
from detonation.core.flat.tensors import digest
from detonation.feed import admission
from limits import LIMIT_S
from zoo import Plain, batch, built

TOKEN = b"0123456789abcdef"
SHARDS, AFTER = 2, 4
NEWCOMER = 1


def lose_connection(arrival):
    for stream in arrival._follower._streams:
        stream._hang_up()


class Unlucky(admission._Arrival):
    """Loses its connection once: after it has received its first copy, after it has told that it may join, or after
    it has read for which step all wait."""

    when = ""
    lost = False

    def _loses(self, when):
        if when == self.when and not self.lost:
            Unlucky.lost = True
            lose_connection(self)

    def _keep_pace(self):
        super()._keep_pace()
        if self._follower.step >= 0:
            self._loses("copy")

    def _announces_change(self):
        has_changed = super()._announces_change()
        if self._is_ready:
            self._loses("ready")
        return has_changed

    def reaches(self, entry):
        self._loses("entry")
        return super().reaches(entry)


def train(replica, shard, port, when):
    """Both replicas: until the newcomer is in, and some steps more. Returns what all ranks of a shard must share."""
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=LIMIT_S))
    own = dist.PrefixStore(f"replica{replica}", store)
    dist.init_process_group("gloo", store=own, rank=shard, world_size=SHARDS)
    mesh, model = dt.init_mesh(1, SHARDS, "cpu"), built(Plain)
    dt.shard(model, mesh)
    safety = dt.Safety(verify_every=1)
    if replica == NEWCOMER:
        store.wait(["trains"])
        if shard == 1:
            Unlucky.when, admission._Arrival = when, Unlucky
        guest = dt.Guest(store, mesh)
        optimizer, axis = dt.admitted(model, guest, token=TOKEN, safety=safety, timeout_s=LIMIT_S)
        assert Unlucky.lost == (shard == 1)
    else:
        axis = dt.elastic(mesh, replica=0, replicas=1, store=store)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = dt.replicate(adam, model, axis, dt.full(), clip=0.5, safety=safety)
    door, last = dt.Admission(model, optimizer, token=TOKEN), None
    while last is None or optimizer.step_count < last:
        model(batch(replica * SHARDS + shard, optimizer.step_count, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        door.after_step()
        store.set("trains", "")
        if last is None and axis._membership.guest > NEWCOMER:  # all know at the same step
            last = optimizer.step_count + AFTER
    shared = [tensor for each in optimizer.build() for tensor in each.shared_weights()]
    axis.close()
    return f"{optimizer.step_count} {axis.size()} {digest(shared)}"


@pytest.mark.parametrize("when", ["copy", "ready", "entry"])
def test_a_newcomer_joins_although_one_of_its_shards_loses_its_connection(when, tmp_path):
    point, children = MeetingPoint(Survival(1, 1), 0), []
    for replica in (0, NEWCOMER):
        for shard in range(SHARDS):
            if not (child := os.fork()):
                faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=2)
                gc.freeze()  # groups of other tests have their threads in the parent alone
                told = tmp_path / f"{replica}.{shard}"
                with contextlib.suppress(BaseException):
                    try:
                        told.write_text(train(replica, shard, point.port, when))
                    except BaseException as error:
                        told.write_text(repr(error))
                os._exit(0)
            children.append(child)
    point.serve()
    for child in children:
        os.waitpid(child, 0)
    point.close()
    for shard in range(SHARDS):
        member, newcomer = ((tmp_path / f"{each}.{shard}").read_text() for each in (0, NEWCOMER))
        assert member == newcomer and member.split()[1] == "2"
