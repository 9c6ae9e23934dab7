"""The choice of a scheme along an elastic axis: by the replicas that are there, whoever of them is lost meanwhile."""

import copy
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import detonation as dt
import worlds
from detonation.cluster.survive.agreement import note_gone
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.flat.tensors import digest
from detonation.plan import auto
from limits import LIMIT_S
from steps import together
from zoo import Plain, batch, built

MODEL = built(Plain)  # the threads share a random generator
STEP_SECONDS = 1e6
"""Of a step that hides any wait: the choice is that of full synchronisation, however busy this machine is."""


class Died(BaseException):
    """The end of a replica, in the place of its process."""


class Mortal(SurvivingCommunicator):
    """A replica that ends at one of its first collectives."""

    countdown = -1

    def _launch(self, each):
        self.countdown -= 1
        if self.countdown == -1:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            raise Died
        super()._launch(each)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(auto, "PROBE_S", 0.05)


def chosen_and_trained(axis, model, replica, steps=3):
    adamw = torch.optim.AdamW(model.parameters())
    scheme = dt.auto(adamw, model, axis, step_seconds=STEP_SECONDS)
    optimizer = dt.replicate(adamw, model, axis, scheme)
    for step in range(steps):
        model(batch(replica, step, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return scheme.name, optimizer.coordinates.replicas


@pytest.mark.parametrize("dies_at", [-1, 0, 7, 40])
def test_replicas_without_a_process_group_choose_and_train_also_where_one_is_lost_meanwhile(
    dies_at,
):
    store, ends = HashStore(), {}

    def run(replica):
        axis = Mortal(Membership(store, replica, 3, 0, 1, 30.0, 1, print, confirm_s=30.0), 30.0)
        axis.countdown = dies_at + 1 if replica == 0 and dies_at >= 0 else -1
        model = copy.deepcopy(MODEL)
        try:
            ends[replica] = *chosen_and_trained(axis, model, replica), digest(model.parameters())
        except Died:
            axis._membership.leave(0)  # the others need not wait until it is silent for long
            axis._group.abandon()
        else:
            axis.close()

    together(*(partial(run, replica) for replica in range(3)))
    left = 2 if dies_at >= 0 else 3
    assert len(ends) == left and len({*ends.values()}) == 1
    assert next(iter(ends.values()))[:2] == ("full", left)


def sharded(mesh, dies):
    """Chooses on this rank of two sharded replicas; the last one of two others is gone before that."""
    auto.PROBE_S = 0.05
    store = dist.distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=LIMIT_S))
    axis, model = dt.elastic(mesh), dt.shard(copy.deepcopy(MODEL), mesh)
    if dies and axis.replica == 2:
        axis._membership.stop()
        note_gone(axis._membership.store, axis._membership.rank)  # as by a launcher
        axis._group.abandon()
        return None
    found = chosen_and_trained(axis, model, dist.get_rank())
    weights = [p.to_local() for p in model.parameters()]
    axis.close()
    return *found, digest(weights)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("dies", [False, True])
def test_all_shards_of_all_replicas_that_are_left_choose_the_same(dies):
    ends = worlds.run_alone(sharded, 3 if dies else 2, 2, dies)[:4]
    assert [end[:2] for end in ends] == [("full", 2)] * 4
    assert ends[:2] == ends[2:]  # the same shard of both replicas
