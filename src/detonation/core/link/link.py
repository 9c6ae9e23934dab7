"""A link is the connection of one replica to the other replicas on one axis: it starts collectives
and counts their bytes.

A link does not know what the bytes mean.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from detonation.core.base_error import DetonationError
from detonation.core.flat.tensors import whole_of
from detonation.core.integrity.observer import PlayedMessages, StepObserver
from detonation.core.link.communicator import (
    Axis,
    Communicator,
    ProcessGroupCommunicator,
    communicator_of,
)
from detonation.core.link.elastic_communicator import (
    AgreedCommunicator,
    ElasticCommunicator,
    RenumberedCommunicator,
    present_rows,
)
from detonation.core.link.hierarchical import HierarchicalCommunicator
from detonation.core.schemes import bytes_per_rank, ring_bytes

SAME_START = (
    "Start all replicas with the same settings, versions and weights (call"
    " detonation.same_weights(model, axis) after the last change of weights to make them equal)"
)


class Mismatch(DetonationError, ValueError):
    """Raised if replicas were started with different settings, versions or weights."""


def send_to_all(communicator: Communicator, value: Any, device: torch.device) -> list[Any]:
    """Sends `value` to all replicas as JSON, and returns the values of all replicas, in replica
    order. Collective.

    The replicas first exchange the sizes of their values, so that all can send messages of the
    largest size.
    """

    def gathered(content: bytes) -> list[bytes]:
        octets = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        rows = communicator.all_gather(octets)()
        return [bytes(row.tolist()) for row in present_rows(communicator, rows)]

    mine = json.dumps(value).encode()
    sizes = gathered(len(mine).to_bytes(8, "big"))
    longest = max(int.from_bytes(size, "big") for size in sizes)
    return [json.loads(text) for text in gathered(mine.ljust(longest))]


def require_same(
    inter_node: Communicator,
    intra_node: Communicator | None,
    description: Mapping[str, str],
    device: torch.device,
    notes: Mapping[str, str],
    remedy: str = SAME_START,
    free: tuple[str, ...] = (),
    shards: tuple[str, ...] = (),
) -> dict[str, str]:
    """Compares the `description` of all ranks. If entries differ, every rank raises a `Mismatch`
    that names the difference. Collective.

    The ranks of a node must have the same description, too. The comparison must run before the
    first message, because messages of different sizes would crash the receiver inside the network
    library.

    Args:
        description: Entries by name. Each entry is compared.
        notes: Texts that are shown with the entries of the same names; not compared.
        free: Entries whose names have one of these endings may differ, or exist on one rank only.
            The result describes how they differ.
        shards: Entries whose names have one of these endings describe shards, which differ within a
            node. They are compared between ranks with the same number in their nodes.

    Raises:
        Mismatch: Entries differ that are not in `free`.
        ValueError: A process group cannot send tensors of `device`.
    """
    for communicator in (inter_node, intra_node):
        if isinstance(communicator, ProcessGroupCommunicator):
            communicator.require_device(device)
    mine = [dict(description), dict(notes)]
    node = [mine]
    if intra_node is not None:
        node = send_to_all(intra_node, mine, device)
    ranks: list[_Rank] = []
    for replica, theirs in enumerate(send_to_all(inter_node, node, device)):
        for local, described in enumerate(theirs):
            name = f"replica {replica}"
            if intra_node is not None:
                name += f" local rank {local}"
            ranks.append((name, described))
    found = _all_differences(ranks, len(node), shards)
    if intra_node is not None:
        remedy += "; leave intra_node out if the ranks of a node hold other parameters"
    if differences := [text for key, text in found if not key.endswith(free)]:
        raise Mismatch(f"replicas differ: {_first_three(differences)}. {remedy}")
    return {key: "; ".join(text for name, text in found if name == key) for key in dict(found)}


def _first_three(differences: Sequence[str]) -> str:
    listed = "; ".join(differences[:3])
    if len(differences) > 3:
        listed += f" (and {len(differences) - 3} more)"
    return listed


_Rank = tuple[str, Sequence[Mapping[str, str]]]
"""The name of a rank, and its description and notes for `require_same`."""


def _all_differences(
    ranks: Sequence[_Rank], local_ranks: int, shards: tuple[str, ...]
) -> list[tuple[str, str]]:
    """Compares each of `ranks` with the first rank. Entries of `shards` are instead compared with
    the rank that has the same number in the first node.
    """
    found = []
    for number, other in enumerate(ranks):
        for first, is_cut in ((ranks[0], False), (ranks[number % local_ranks], True)):
            differences = _differences(first, other)
            found += [each for each in differences if each[0].endswith(shards) == is_cut]
    return found


def _differences(one: _Rank, other: _Rank) -> list[tuple[str, str]]:
    _, (mine, _) = one
    _, (theirs, _) = other
    keys = [key for key in dict.fromkeys([*mine, *theirs]) if mine.get(key) != theirs.get(key)]
    return [(key, f"{_entry(other, key)}, {_entry(one, key)}") for key in keys]


def _entry(rank: _Rank, key: str) -> str:
    name, (description, notes) = rank
    text = f"{name} has {key}={description.get(key, 'nothing')}"
    if key in notes:
        text += f" ({notes[key]})"
    return text


class Link:
    """The connection of this replica to the other replicas along one axis. It starts collectives,
    and counts bytes and waiting time.

    Attributes:
        bytes_sent: Bytes that this rank has sent to other replicas over the axis, by the formulas
            for ring collectives. Traffic inside the node is not counted.
        waited_s: Seconds for which the host was blocked by an unfinished exchange. NCCL blocks the
            device instead, which is not counted.
        recycle: Function that takes back a receive buffer, `[replicas, bytes]` uint8, for reuse.
        observer: Object whose methods are called with received messages.
        playback: The observer, if it also supplies recorded messages; otherwise None.

    Args:
        intra_node: Axis inside the node, if all ranks of the node have the same message. Each of
            these ranks then sends a part of the message.
        own: True if a mesh axis gets a process group of its own, for collectives that start while
            other code uses the axis.
        inside: Axes of the levels inside this level. Ranks along these axes stay equal.
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
        self._intra_node: Communicator | None = None
        self.local_ranks = 1
        if intra_node is not None:
            self._intra_node = communicator_of(intra_node)
            self.local_ranks = self._intra_node.size()
        renumbered: RenumberedCommunicator | None = None
        if isinstance(self._inter_node, RenumberedCommunicator):
            renumbered = self._inter_node
        self.elastic = renumbered
        equal_axes = [each for each in (*inside, intra_node) if each not in (None, axis)]
        if equal_axes and isinstance(self._inter_node, ElasticCommunicator):
            equal_ranks = [communicator_of(each) for each in equal_axes]
            self._inter_node = AgreedCommunicator(self._inter_node, equal_ranks)
        self._communicator: Communicator = self._inter_node
        if self._intra_node is not None:
            self._communicator = HierarchicalCommunicator(self._inter_node, self._intra_node)
        self.replicas = self._inter_node.size()
        self.replica = self._inter_node.replica
        self.recycle = self._communicator.recycle
        # the bytes that `send_to_all` and `require_same` send are not added to `bytes_sent`
        self.send_to_all = partial(send_to_all, self._inter_node)
        self.require_same = partial(require_same, self._inter_node, self._intra_node)
        self.bytes_sent = 0
        self.waited_s = 0.0
        self.observer: StepObserver | None = None
        self.playback: PlayedMessages | None = None

    def observe(self, observer: StepObserver | None) -> None:
        """Attaches `observer`, which sees all later messages. A `PlayedMessages` also replaces the
        collectives: it supplies the messages of a recorded run."""
        self.observer = observer
        self.playback = observer if isinstance(observer, PlayedMessages) else None

    def all_reduce(self, values: Tensor, apart: bool = False) -> Callable[[], Tensor]:
        """Starts to add `values` over all replicas. Returns a function that waits for the sum. The
        sum is bitwise equal on all replicas.

        The caller must not use `values` afterwards.

        Args:
            apart: True if the ranks of a node may have different values. Each rank then adds its
                values to those of the ranks with the same number in the other nodes.
        """
        communicator = self._communicator
        local_ranks = self.local_ranks
        if apart:
            communicator = self._inter_node
            local_ranks = 1
        nbytes = bytes_per_rank(values.nbytes, local_ranks, values.itemsize)
        self.bytes_sent += ring_bytes("all-reduce", nbytes, self.replicas)
        return communicator.all_reduce(values)

    def all_gather(self, message: Tensor) -> Callable[[], Tensor]:
        """Starts to send `message` to all replicas, and to receive the message of each replica.

        Shapes: `[nbytes]` uint8, the same on all replicas -> `[replicas, nbytes]`.
        """
        nbytes = bytes_per_rank(message.numel(), self.local_ranks)
        self.bytes_sent += ring_bytes("all-gather", nbytes, self.replicas)
        return self._communicator.all_gather(message)

    def all_to_all(self, messages: Tensor) -> Callable[[], Tensor]:
        """Starts to send message number r to replica r, for all r, and to receive the message that
        each replica has for this replica.

        Shapes: `[replicas, nbytes]` uint8, the same on all replicas -> the same.
        """
        self.bytes_sent += bytes_per_rank(messages.shape[1], self.local_ranks) * (self.replicas - 1)
        return self._communicator.all_to_all(messages.view(-1))

    def wait(self, arriving: list[Callable[[], Tensor]]) -> tuple[list[Tensor], set[int]]:
        """Waits for the collectives `arriving`. Returns the received tensors, and the replicas that
        were absent in any of these collectives.

        Empties the list `arriving`, because its functions would keep the received tensors alive.
        """
        began = time.perf_counter()
        arrived = []
        absent: set[int] = set()
        while arriving:
            arrived.append(arriving.pop(0)())
            if self.elastic:
                absent.update(self.elastic.absent)
        self.waited_s += time.perf_counter() - began
        return arrived, absent

    def renumber(self) -> None:
        """Updates `replicas` (the count of replicas) and `replica` (the index of this replica)
        after replicas left or joined.
        """
        self.replicas = self._inter_node.size()
        self.replica = self._inter_node.replica

    def collect(self, words: Tensor, apart: bool = False) -> Tensor:
        """Sends the integers `words` to all replicas, and returns the words of every replica, in
        replica order. All replicas must send equally many words. The bytes of the words are not
        added to `bytes_sent`.

        Unlike messages, words may differ between the ranks of a node. By default the result has a
        weighted sum of the words of a node's ranks, which reveals a difference between these ranks
        to all replicas. With `apart`, the result has the words of each rank, in rank order.

        Shapes: `[n]` int64 -> `[replicas, n]` int64; apart `[replicas, local ranks * n]`.
        """
        if self._intra_node is not None:
            gathered = self._intra_node.all_gather(words.contiguous().view(torch.uint8))()
            words = gathered.reshape(-1).view(words.dtype)
            if not apart:
                local = words.view(self.local_ranks, -1)
                weights = torch.arange(1, 2 * len(local), 2, dtype=torch.int64, device=words.device)
                words = (local * weights[:, None]).sum(0)
        lines = self._inter_node.all_gather(words.contiguous().view(torch.uint8))()
        if self.elastic:
            lines = present_rows(self.elastic, lines)
        return lines.reshape(-1).view(words.dtype).view(self.replicas, -1)


def links_of_shards(parameters: Iterable[Tensor]) -> tuple[Link, ...]:
    """Returns the links to the other shards of this replica: one link for each mesh axis with
    several ranks over which `parameters` are distributed."""
    sharded = [p for p in map(whole_of, parameters) if isinstance(p, DTensor)]
    axes = []
    for mesh in dict.fromkeys(p.device_mesh for p in sharded):
        if mesh.ndim == 1:
            axes.append(mesh)
        else:
            axes += [mesh[name] for name in mesh.mesh_dim_names or ()]
    return tuple(Link(axis) for axis in axes if axis.size() > 1)


@contextmanager
def mismatch_on_all(shards: Sequence[Link], device: torch.device) -> Iterator[None]:
    """Context manager that raises a `Mismatch` on all shards of this replica if its body raises
    `Mismatch` on one of them. Collective over the links `shards`.
    """
    found = ""
    try:
        yield
    except Mismatch as error:
        found = str(error)
    if found := first_text(shards, found, device):
        raise Mismatch(found)


def first_text(links: Iterable[Link], text: str, device: torch.device) -> str:
    """Returns the first nonempty text among the texts of all ranks along `links`. All these ranks
    get the same result. Collective.
    """
    for link in links:
        text = next(filter(None, link.send_to_all(text, device)), "")
    return text
