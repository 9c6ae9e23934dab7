"""A link is one axis of the cluster: it starts collectives and counts their bytes.

It knows no algorithm.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from detonation.core.flat.tensors import whole_of
from detonation.core.integrity.observer import PlayedMessages, StepObserver
from detonation.core.link.communicator import Axis, Communicator, communicator_of
from detonation.core.link.elastic_communicator import (
    AgreedCommunicator,
    ElasticCommunicator,
    RenumberedCommunicator,
    present_rows,
)
from detonation.core.link.handshake import Mismatch, require_same, send_to_all
from detonation.core.link.hierarchical import HierarchicalCommunicator
from detonation.core.schemes.traffic import bytes_per_rank, ring_bytes


class Link:
    """The replicas along one mesh axis, as one of them sees it.

    bytes_sent: bytes that this rank has sent to the other replicas, by the arithmetic of ring
    collectives; over the axis itself, not inside the node. waited_s: seconds for which the host was
    blocked by an unfinished exchange. A network library that waits on the device (NCCL) does not
    block the host, and the device's waiting is not counted. recycle: Takes back a receive buffer,
    `[replicas, bytes]` uint8, that nobody reads any more. observer: Sees received messages.
    playback: The observer, if messages come from it.

    Args:
        intra_node: The axis inside the node, where all its ranks hold the same message: each then
            sends a part of it.
        own: Whether a mesh axis gets a process group of its own, for collectives that start while
            others use the axis.
        inside: The axes of the levels inside this one, whose ranks stay equal.
    """

    def __init__(
        self,
        axis: Axis,
        intra_node: Axis | None = None,
        own: bool = False,
        inside: Sequence[Axis] = (),
    ) -> None:
        self.axis = axis
        self._inter_node = communicator_of(axis, own)
        self._intra_node = None if intra_node is None else communicator_of(intra_node)
        self.elastic = (
            self._inter_node if isinstance(self._inter_node, RenumberedCommunicator) else None
        )
        beside = [
            communicator_of(each) for each in (*inside, intra_node) if each not in (None, axis)
        ]
        if beside and isinstance(self._inter_node, ElasticCommunicator):
            self._inter_node = AgreedCommunicator(self._inter_node, beside)
        self._communicator: Communicator = self._inter_node
        if self._intra_node is not None:
            self._communicator = HierarchicalCommunicator(self._inter_node, self._intra_node)
        self.replicas, self.replica = self._inter_node.size(), self._inter_node.replica
        self.recycle = self._communicator.recycle
        self.local_ranks = 1 if self._intra_node is None else self._intra_node.size()
        self.send_to_all = partial(
            send_to_all, self._inter_node
        )  # not counted as sent, like what follows
        self.require_same = partial(require_same, self._inter_node, self._intra_node)
        self.bytes_sent = 0
        self.waited_s = 0.0
        self.observer: StepObserver | None = None
        self.playback: PlayedMessages | None = None

    def observe(self, observer: StepObserver | None) -> None:
        """Shows messages to `observer` from now on, or receives them from it."""
        self.observer = observer
        self.playback = observer if isinstance(observer, PlayedMessages) else None

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        """Starts the sum of `values` over all replicas; the result is bitwise the same on each.

        `values` belongs to the link from here on.
        """
        nbytes = bytes_per_rank(values.nbytes, self.local_ranks, values.itemsize)
        self.bytes_sent += ring_bytes("all-reduce", nbytes, self.replicas)
        return self._communicator.all_reduce(values)

    def all_gather(self, message: Tensor) -> Callable[[], Tensor]:
        """Starts sending `message` to all replicas.

        Shapes: `[nbytes]` uint8, the same on all replicas -> `[replicas, nbytes]`.
        """
        self.bytes_sent += ring_bytes(
            "all-gather", bytes_per_rank(len(message), self.local_ranks), self.replicas
        )
        return self._communicator.all_gather(message)

    def all_to_all(self, messages: Tensor) -> Callable[[], Tensor]:
        """Starts sending message r to replica r; each replica's message for this one arrives.

        Shapes: `[replicas, nbytes]` uint8, the same on all replicas -> the same.
        """
        self.bytes_sent += bytes_per_rank(messages.shape[1], self.local_ranks) * (self.replicas - 1)
        return self._communicator.all_to_all(messages.view(-1))

    def wait(self, arriving: list[Callable[[], Tensor]]) -> tuple[list[Tensor], set[int]]:
        """The tensors that arrive in collectives, and the replicas that had no part in one; that
        time is waiting.

        Empties `arriving`, which would hold what has arrived.
        """
        began, arrived, absent = time.perf_counter(), list[Tensor](), set[int]()
        while arriving:
            arrived.append(arriving.pop(0)())
            if self.elastic:
                absent.update(self.elastic.absent)
        self.waited_s += time.perf_counter() - began
        return arrived, absent

    def renumber(self) -> None:
        """Takes the numbers of the replicas that are left."""
        self.replicas, self.replica = self._inter_node.size(), self._inter_node.replica

    def collect(self, words: Tensor, apart: bool = False) -> Tensor:
        """Every replica's `words`, equally many on each, in replica order. Not counted as sent.

        The ranks of a node may differ here, unlike in messages: their words are mixed into one, so
        that all ranks notice a difference; or they come `apart`, in the order of these ranks.

        Shapes: `[n]` int64 -> `[replicas, n]` int64; apart `[replicas, local ranks * n]`.
        """
        if self._intra_node is not None:
            words = (
                self._intra_node.all_gather(words.contiguous().view(torch.uint8))()
                .reshape(-1)
                .view(words.dtype)
            )
        if self._intra_node is not None and not apart:
            local = words.view(self.local_ranks, -1)
            weights = torch.arange(1, 2 * len(local), 2, dtype=torch.int64, device=words.device)
            words = (local * weights[:, None]).sum(0)
        lines = self._inter_node.all_gather(words.contiguous().view(torch.uint8))()
        if self.elastic:
            lines = present_rows(self.elastic, lines)
        return lines.reshape(-1).view(words.dtype).view(self.replicas, -1)


def links_of_shards(parameters: Iterable[Tensor]) -> tuple[Link, ...]:
    """The links to the other shards of this replica: one per mesh axis of `parameters` that has
    several ranks."""
    meshes = dict.fromkeys(
        p.device_mesh for p in map(whole_of, parameters) if isinstance(p, DTensor)
    )
    axes = [
        a
        for m in meshes
        for a in ([m] if m.ndim == 1 else [m[name] for name in m.mesh_dim_names or ()])
    ]
    return tuple(Link(axis) for axis in axes if axis.size() > 1)


@contextmanager
def mismatch_on_all(shards: Sequence[Link], device: torch.device) -> Iterator[None]:
    """Raises the `Mismatch` that one shard of a replica finds on all shards, of which each compares
    its own part.

    Collective over `shards`.
    """
    found = ""
    try:
        yield
    except Mismatch as error:
        found = str(error)
    if found := first_text(shards, found, device):
        raise Mismatch(found)


def first_text(links: Iterable[Link], text: str, device: torch.device) -> str:
    """The first text that is not empty among those of all ranks along `links`; the same on all.

    Collective.
    """
    for link in links:
        text = next(filter(None, link.send_to_all(text, device)), "")
    return text
