"""Joining by a newcomer of two shards, of which one loses its connection to the replica that gives the state."""

from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

import detonation as dt
import worlds
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
    ranks = [(replica, shard) for replica in (0, NEWCOMER) for shard in range(SHARDS)]

    def act(number, port):
        (tmp_path / f"{number}.end").write_text(train(*ranks[number], port, when))

    *members, first, second = worlds.forked([partial(act, each) for each in range(4)], tmp_path)
    assert members == [first, second] and first.split()[1] == second.split()[1] == "2"
