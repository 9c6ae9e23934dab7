"""`elastic`: the axis between replicas, of which some may be lost while the others train on, and who uses it."""

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store

from detonation.cluster.init import GROUP_TIMEOUT_S
from detonation.cluster.processes.signals import end_now
from detonation.cluster.survive.agreement import Agreement, coming_key, copy_key, feed_key, next_axis_store
from detonation.cluster.survive.meeting import StoreTexts
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.core.link.elastic_communicator import ElasticCommunicator

_log = logging.getLogger("detonation")


def elastic(
    mesh: DeviceMesh | None = None,
    *,
    replica: int | None = None,
    replicas: int | None = None,
    store: Store | None = None,
    min_replicas: int = 1,
    silence_s: float = 15.0,
    timeout_s: float = GROUP_TIMEOUT_S,
    end: Callable[[str], object] | None = None,
) -> SurvivingCommunicator:
    """The axis between replicas for `replicate`: training goes on when some of them are lost. Collective.

    A replica is lost with any of its ranks: killed, stopped, or cut off from the store. The others notice, agree on who
    is left, complete the interrupted exchange among themselves and go on in the same process, bitwise equal. From the
    next step on, means, votes and owners are those of the replicas that are left. A replica that comes to life after it
    was left out raises `ReplicaLost`.

    Args:
        mesh: ("replicate", "shard"), as of `init_mesh`; or the mesh of this replica alone, with `replica` and
            `replicas`; None for a replica of one rank.
        replica: The number of this replica, from 0 to below `replicas`, where each replica is a world of its own.
        replicas: How many there are then.
        store: Where all ranks meet; by default the store of the default process group. Without it nobody can agree, so
            the process that keeps it must not be lost: under torchrun the agent of the first node, otherwise rank 0.
        min_replicas: From 1 to the number of replicas; with fewer left all raise `ReplicaLost`.
        silence_s: A rank that is silent for this long is lost, above 1. A killed rank is noticed at once, because its
            connections close.
        timeout_s: Seconds for which a collective waits for a rank that is alive.
        end: Called with the reason, in another thread, in a rank whose replica was left out and whose main thread waits
            for something else; by default it logs, and ends the process with code 1.

    Raises:
        ValueError: An argument is out of range, or there is neither a mesh nor a store.
        TimeoutError: Not all ranks came within the store's timeout.

    Example:
        >>> import torch.distributed as dist, detonation as dt
        >>> axis = dt.elastic(replica=0, replicas=1, store=dist.HashStore())
        >>> axis.size(), axis.losses
        (1, [])
        >>> axis.close()
    """
    shard, shards = (0, 1) if mesh is None else (mesh["shard"].get_local_rank(), mesh["shard"].size())
    if mesh is not None and replica is None and replicas is None:
        replica, replicas = mesh["replicate"].get_local_rank(), mesh["replicate"].size()
    if replica is None or replicas is None or not 0 <= replica < replicas:
        raise ValueError(f"replica is {replica} of {replicas}, must be from 0 to below replicas; or pass a whole mesh")
    if not 1 <= min_replicas <= replicas:
        raise ValueError(f"min_replicas is {min_replicas}, must be from 1 to the number of replicas, {replicas}")
    if not silence_s > 1:
        raise ValueError(f"silence_s is {silence_s}, must be above 1")
    if store is None and mesh is None:
        raise ValueError("replicas without a common process group need a store, such as torch.distributed.TCPStore")
    base = store or distributed_c10d._get_default_store()
    membership = Membership(
        next_axis_store(base, replica * shards + shard, replicas * shards),
        replica,
        replicas,
        shard,
        shards,
        silence_s,
        min_replicas,
        end or end_here,
    )
    return SurvivingCommunicator(membership, timeout_s)


def end_here(reason: str) -> None:
    """Logs the reason and ends this process."""
    _log.error("%s: this process ends", reason)
    end_now(1)


if TYPE_CHECKING:
    from detonation.cluster.survive.surviving import SurvivingCommunicator

_POLL_S = 0.005


class Host:
    """One rank's dealings with a replica that comes in, by the store."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership

    @property
    def guest(self) -> int | None:
        """A replica that asks to come in, or waits for its step; None without one."""
        return self.membership.guest if self.membership.guest_asks else None

    def offer(self, guest: int, address: str) -> None:
        """Lets a guest know where it finds the state of this shard."""
        self.membership.store.set(feed_key(guest, self.membership.shard), address)

    def copy_step(self, guest: int, step: int) -> float:
        """The step after which all shards give their guest a copy; infinity until the guests of all are there.

        The shards of a replica are in the same step, or in two that follow each other.
        """
        store, shard, shards = self.membership.store, self.membership.shard, self.membership.shards
        store.set(coming_key(guest, shard), "1")
        if shard == 0 and store.check([coming_key(guest, each) for each in range(shards)]):
            store.compare_set(copy_key(guest), "", str(step + (2 if shards > 1 else 0)))
        return int(store.get(copy_key(guest))) if store.check([copy_key(guest)]) else math.inf


class AxisUser(ElasticCommunicator):
    """One optimizer's end of an elastic axis: after a loss it takes the new numbers before a step of its own.

    Until then a lost replica is absent for it. Optimizers may be in different steps.

    layout: the replicas that have a number for it, by the numbers with which they began. begun: the steps that it
    began. pending: agreements on members that it has not adopted.

    Args:
        number: Of this user; all ranks make them in the same order.
        begun: The steps that were taken before it.
    """

    def __init__(self, axis: "SurvivingCommunicator", number: int, begun: int) -> None:
        self.axis, self.number, self.layout, self.replica = axis, number, axis.layout, axis.replica
        self.pending, self.begun, self._first = list(axis.pending), begun, float("inf")
        self._adopted, self._channels, self._membership = axis.adopted, 0, axis.host.membership

    @property
    def shared(self) -> bool:
        return self.axis.shared

    def size(self) -> int:
        return len(self.layout)

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        return self.axis.start("all_reduce", values, self)

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        return self.axis.start("all_gather", mine, self)

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        return self.axis.start("all_to_all", mine, self)

    def recycle(self, received: Tensor) -> None:
        self.axis.recycle(received)

    def enter_step(self, step: int) -> bool:
        with self._membership.changed:
            self.axis.settle()
            if self._due(step) or self.axis.expects(step):
                return True
            self._begin(step)
        return False

    def expects(self, step: int) -> bool:
        return self.axis.expects(step)

    def adopt(self, step: int) -> list[int]:
        self._await_guest(step)
        with self._membership.changed:  # at once: after another loss all ask who has begun this step, and with whom
            self.axis.settle()
            due = self._due(step)
            members = due[-1].members if due else self.layout
            kept = [number for number, member in enumerate(self.layout) if member in members]
            self.pending = [each for each in self.pending if each not in due]
            self.layout, self.replica = members, members.index(self._membership.replica)
            self._channels, self._adopted = 0, step
            self._begin(step)
            self.axis.follow(self, due, step)
        return kept

    def texts(self) -> StoreTexts:
        self._channels += 1
        channel = f"{self.layout}/{self._adopted}/user{self.number}/{self._channels}"
        return StoreTexts(self._membership, self.layout, channel)

    def _await_guest(self, step: int) -> None:
        """Waits before `step` until all have agreed whether the guest has come."""
        axis, membership = self.axis, self._membership
        while True:
            with membership.changed:
                axis.settle()
                if axis.guest is None or not axis.expects(step):
                    axis.awaits = -1
                    return
                axis.awaits = axis.guest[1]
            if membership.awaits(axis.awaits):  # and nothing is in flight anywhere
                membership.call()
                with membership.changed:
                    membership.changed.wait_for(lambda: axis.guest is None or axis.error, 1.0)
            else:
                time.sleep(_POLL_S)

    def _due(self, step: int) -> list[Agreement]:
        return [each for each in self.pending if step >= each.first_step(self.number)]

    def _begin(self, step: int) -> None:
        self.begun, self._first = max(self.begun, step + 1), min(self._first, step)
        self._membership.under_way = self._membership.under_way or self.begun > self._first + 2
