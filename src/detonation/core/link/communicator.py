"""Wire: what carries bytes between the replicas of one axis, a process group or something that plays one."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

# all_gather_into_tensor was renamed; the old name warns where the new one exists
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Wire(Protocol):
    """One replica's end of an axis: three collectives, which all replicas start in the same order.

    What they are given belongs to them from there on; each returns a waiter. Sizes are the same on all replicas.
    """

    @property
    def replica(self) -> int: ...

    def size(self) -> int:
        """How many replicas the axis has."""
        ...

    def reduce(self, values: Tensor) -> Callable[[], Tensor]:
        """The sum over all replicas, bitwise the same on each."""
        ...

    def gather(self, mine: Tensor) -> Callable[[], Tensor]:
        """Everyone's bytes, in replica order."""  # [bytes] -> [replicas, bytes]
        ...

    def swap(self, mine: Tensor) -> Callable[[], Tensor]:
        """What each replica has for this one; `mine` is what this one has for each."""  # [n * bytes] -> [n, bytes]
        ...


Axis = DeviceMesh | Wire
"""What replicas can be joined along."""


class Group:
    """The process group of one mesh axis."""

    def __init__(self, axis: DeviceMesh) -> None:
        if axis.ndim != 1:
            raise ValueError(f'the axis has {axis.ndim} dimensions {axis.mesh_dim_names}: pass one, mesh["replicate"]')
        self._group = axis.get_group()
        self._size, self.replica = axis.size(), axis.get_local_rank()
        # a gloo group reads host memory only: a message from an accelerator takes a detour
        self._transport = torch.device("cpu") if dist.get_backend(self._group) == "gloo" else None
        self._room: Tensor | None = None

    def size(self) -> int:
        return self._size

    def reduce(self, values: Tensor) -> Callable[[], Tensor]:
        buffer = values.to(self._transport or values.device)
        return _waiter(dist.all_reduce(buffer, group=self._group, async_op=True), buffer, values)

    def gather(self, mine: Tensor) -> Callable[[], Tensor]:
        given = mine.to(self._transport or mine.device)
        everyones, self._room = self._room, None
        if everyones is None or everyones.shape != (self._size, len(given)):
            everyones = given.new_empty(self._size, len(given))
        work = _all_gather(everyones.view(-1), given, group=self._group, async_op=True)
        return _waiter(work, everyones, mine)

    def take_back(self, arrived: Tensor) -> None:
        """Room that `gather` returned on a CPU, for its next call: the pages of a large message cost more than it."""
        if arrived.device.type == "cpu":
            self._room = arrived

    def swap(self, mine: Tensor) -> Callable[[], Tensor]:
        given = mine.to(self._transport or mine.device)
        theirs = torch.empty_like(given)
        work = dist.all_to_all_single(theirs, given, group=self._group, async_op=True)
        return _waiter(work, theirs.view(self._size, -1), mine)


def _waiter(work: dist.Work, result: Tensor, like: Tensor) -> Callable[[], Tensor]:
    """Waits for `work` and returns its `result` on the device of `like`."""

    def wait() -> Tensor:
        work.wait()
        return result.to(like.device)

    return wait
