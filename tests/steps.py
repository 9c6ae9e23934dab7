"""Steps that change all that may change between them: rates, a gradient that is missing, a replica that ends."""

import queue
import threading
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch.distributed import HashStore

import detonation as dt
from detonation.cluster.network.simulated import wait_until_gone
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.exchange.two_stage import TwoStage
from detonation.extend import Communicator
from limits import LIMIT_S
from zoo import Plain, batch, built

STEPS = 8


def bases(parameters):
    """An optimizer with momentum and options that change."""
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.9))


def started(communicator, scheme):
    model = built(Plain)
    return model, dt.replicate(bases(model.parameters()), model, communicator, scheme, clip=0.5)


def advance(model, optimizer, replica, steps):
    for step in steps:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        model(batch(replica, step, 32)).mean().backward()
        if step == 3:
            next(model.parameters()).grad = None
        optimizer.step()
        optimizer.zero_grad()


def step_on(optimizer, loss, overlap=False):
    """Backward, during which gradients leave with `overlap`, and the step."""
    with optimizer.overlap() if overlap else nullcontext():
        loss.backward()
    optimizer.step()


class Passing(Communicator):
    """A communicator of somebody's own around another axis, which hears of no loss."""

    def __init__(self, inner):
        self.replica, self.inner = inner.replica, inner

    def size(self):
        return self.inner.size()

    def all_reduce(self, values):
        return self.inner.all_reduce(values)

    def all_gather(self, mine):
        return self.inner.all_gather(mine)

    def all_to_all(self, mine):
        return self.inner.all_to_all(mine)


def unsent(optimizer):
    """What this replica has still to tell of each parameter; of a mean that it owns, as if it were its own alone."""
    channel = optimizer.build()[0].channel
    flat, link = channel.memory.residual.clone(), channel.link
    if isinstance(channel.exchange, TwoStage):
        owned = [
            channel.exchange.residual * (replica == link.replica)
            for replica in range(link.replicas)
        ]
        flat += link.replicas * channel.scheme.codec.basis.inverse(
            channel.exchange.owners.collect(owned)
        )
    return channel.layout.parts(flat)


def together(*acts):
    """What each act returns, in a thread of its own; the first error of any ends the test."""
    ended = queue.Queue()

    def run(number, act):
        try:
            ended.put((number, act(), None))
        except BaseException as error:
            ended.put((number, None, error))

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(acts)]
    for thread in threads:
        thread.start()
    results = {}
    for _ in acts:
        number, result, error = ended.get(timeout=LIMIT_S)
        if error:
            raise error
        results[number] = result
    wait_until_gone(threads)
    return [results[number] for number in range(len(acts))]


class Died(BaseException):
    """The end of a replica, in the place of its process."""


class Mortal(SurvivingCommunicator):
    """A replica that ends at a collective of a step (counted from 1), before it or with it under way."""

    dies_in, countdown, under_way = 4, -1, False

    def _launch(self, each):
        last = (
            self._begun == self.dies_in
            and self.countdown == 0
            and threading.current_thread().name != "recovery"
        )
        self._closed |= last  # its other threads end, too: else they might report, and the others wait for a dead one
        if last and not self.under_way:
            raise Died
        super()._launch(each)
        if last:
            raise Died
        self.countdown -= self._begun == self.dies_in


def end_replica(axis):
    """Ends a replica that has died, as the end of its process would."""
    with axis._changed:
        axis._closed = True
        axis._changed.notify_all()
    axis._membership.leave(0)
    axis._group.abandon()


def replicas(act, number=3):
    """What `act(axis)` returns on each replica, a thread of its own; None for one that died."""
    store = HashStore()

    def run(replica):
        membership = Membership(store, replica, number, 0, 1, 30.0, 1, print, confirm_s=30.0)
        axis = Mortal(membership, 30.0)
        try:
            result = act(axis)
        except Died:
            end_replica(axis)
            return None
        if replica in membership.members:
            axis.close()
        return result

    return together(*(partial(run, replica) for replica in range(number)))


@contextmanager
def following(model, optimizer, served, token):
    """The feed of a training, and a follower that serves `served`, has connected, and reads to the end afterwards."""
    feed = dt.Feed(model, optimizer, "127.0.0.1:0", token=token)
    optimizer.record(feed)
    with dt.follow(served, feed.address, token=token, wait=False) as follower:
        while not feed.followers:
            follower.update(wait_s=0.01)
        yield feed, follower
        feed.close()
        while not follower.ended:
            follower.update(wait_s=1)
