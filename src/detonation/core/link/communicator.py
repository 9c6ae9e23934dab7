"""Communicators send bytes between the replicas of one axis, over a process group or an emulated
network.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from detonation.choices import make
from detonation.core.runtime import recorded
from detonation.core.schemes import Scheme, is_sent_at_once
from detonation.plugins import plugin

AxisPart = tuple[int, "Axis", Mapping[str, Tensor]]
"""A part of the parameters that is exchanged separately: its number, its axis of replicas, and its
tensors by name."""


class HostStaging:
    """Copies messages from a device to host memory and back, on the current stream. Gloo needs
    these copies, because gloo reads only host memory.

    On an accelerator, copies from and to pinned memory are asynchronous. torch reuses a freed
    pinned block only after its copies have ended, so this class keeps no reference to buffers.
    """

    @staticmethod
    def has_devices() -> bool:
        """True if this process may have tensors outside of host memory."""
        return torch.accelerator.is_available()

    def needed(self, tensor: Tensor) -> bool:
        """True if `tensor` is on a device, so that gloo needs a copy of it in host memory."""
        return tensor.device.type != "cpu"

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Allocates a host buffer for a message with the dtype of `like`. The buffer is pinned if
        `like` is on an accelerator.

        Shapes: -> `shape`.
        """
        return torch.empty(
            shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type != "cpu"
        )

    def to_host(self, message: Tensor) -> tuple[Tensor, Any]:
        """Starts to copy `message` to host memory. Returns the copy, and an event after which the
        copy is complete. If `message` is already in host memory, returns `message` and None.
        """
        if not self.needed(message):
            return message, None
        host = self.empty(tuple(message.shape), message)
        return host.copy_(message, non_blocking=True), recorded(message.device)

    def start(
        self, collective: Callable[[], Any], copied: Any, later: bool
    ) -> Callable[[], object]:
        """Starts `collective` after the event `copied`. Returns a function that waits for the
        collective.

        Args:
            later: True if another thread starts the collectives, in the order of the calls.
                Backward can then queue more work on the device.
        """
        if later:
            started = self._thread.submit(self.start, collective, copied, False)
            return lambda: started.result()()
        if copied:
            copied.synchronize()
        return collective().wait  # type: ignore[no-any-return]

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "sends from host memory")

    def to_device(self, host: Tensor, like: Tensor) -> Tensor:
        """Copies the buffer `host` to the device of `like`, asynchronously on the current
        stream."""
        if not self.needed(like):
            return host
        message = torch.empty(host.shape, dtype=host.dtype, device=like.device)
        return message.copy_(host, non_blocking=True)


# newer versions of torch call this function all_gather_single, and warn about the old name
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AxisRules:
    """Properties of an axis of replicas other than its collectives. The methods of this class
    return the defaults, which are right for an axis of a device mesh.

    absent: Replicas that did not contribute to the last completed collective.
    """

    absent: Collection[int] = ()

    @property
    def shared(self) -> bool:
        """True if several optimizers share the axis. Gradients may then be sent only inside `step`,
        not during backward, because all ranks must send in the same order.
        """
        return False

    def refuse(
        self,
        levels: Sequence[tuple[Axis, Scheme]],
        base: Optimizer,
        intra_node: DeviceMesh | None,
        balance: bool,
    ) -> None:
        """Raises `ValueError` if the axis does not support the arguments of `replicate`."""

    def refuse_log(self) -> None:
        """Raises `ValueError` if no rank can write a log of the messages on this axis, because no
        rank receives the messages of all replicas.
        """

    def divide(self, parameters: Mapping[str, Tensor]) -> Sequence[AxisPart] | None:
        """Divides `parameters` into parts that are exchanged separately. All ranks exchange the
        parts in the returned order. Returns None if there is only one part. Collective.
        """
        return None

    def norms(
        self, parameters: Mapping[str, Tensor]
    ) -> list[tuple[list[Communicator], dict[str, Tensor]]] | None:
        """Returns what clipping needs to compute the global norm: the tensors that together form
        the whole model, and the axes over which these tensors are split. Returns None if the device
        mesh of each parameter already defines these axes.
        """
        return None

    def explain(self, error: BaseException) -> None:
        """If this axis knows why a step ended with `error`, raises an error that states why."""

    def recycle(self, received: Tensor) -> None:
        """Takes back `received`, a buffer that a collective returned, for reuse. The caller must no
        longer read this buffer.

        Shapes: `[replicas, bytes]` uint8.
        """


class Communicator(AxisRules, ABC):
    """The connection of one replica to all replicas of an axis, with three collectives. All
    replicas must start their collectives in the same order.

    Each collective returns a function that waits for the result. The caller must not use a tensor
    any more after passing it to a collective. Tensors must have equal sizes on all replicas.

    Attributes:
        replica: Index of this replica on the axis.
    """

    replica: int

    @abstractmethod
    def size(self) -> int:
        """The number of replicas on the axis."""

    @abstractmethod
    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:
        """Starts to add `values` over all replicas. The sum is bitwise equal on all replicas."""

    @abstractmethod
    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        """Starts to send `mine` to all replicas, and to receive the bytes of every replica, in
        replica order.

        Shapes: `[bytes]` -> `[replicas, bytes]` uint8.
        """

    @abstractmethod
    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        """Starts to send slice number r of `mine` to replica r, for all r, and to receive the slice
        that each replica has for this replica.

        Shapes: `[replicas * bytes]` -> `[replicas, bytes]` uint8.
        """


Axis = DeviceMesh | Communicator
"""An axis of replicas: a device mesh or a communicator."""
_OF_A_MESH = AxisRules()


def rules_of(axis: Axis) -> AxisRules:
    """Returns the `AxisRules` of `axis`. An axis of a device mesh has the default rules."""
    return _OF_A_MESH if isinstance(axis, DeviceMesh) else axis


def axis_named(name: str, arguments: Mapping[str, Any] | None = None) -> Communicator:
    """Creates an axis of replicas by the function that an installed package registered as the entry
    point `name` in the group `detonation.axes`.

    Args:
        name: Name of the entry point.
        arguments: Arguments of the function.

    Raises:
        ValueError: A name or an argument does not exist; the message lists the valid names.
        TypeError: The function returned no `Communicator`.
    """
    made = make("axis", {name: plugin("axes", name)}, name, arguments or {})
    if not isinstance(made, Communicator):
        raise TypeError(f"axis {name} is {made!r}, must be a detonation.extend.Communicator")
    return made


def divided(axis: Axis, parameters: Mapping[str, Tensor]) -> Sequence[AxisPart]:
    """Returns the parts of `parameters` that are exchanged separately along `axis`. An axis of a
    device mesh has one part, with all parameters."""
    parts = rules_of(axis).divide(parameters)
    return [(0, axis, parameters)] if parts is None else parts


def carries(group: dist.ProcessGroup, device: torch.device) -> bool:
    """True if `group` can send tensors of `device`."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def require_device(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises `ValueError` if `group` cannot send tensors of `device`, for example CPU tensors over
    NCCL.
    """
    if not carries(group, device):
        raise ValueError(
            f"the model is on {device.type}, but the process group carries no such tensors (its"
            f" backend is {dist.get_backend(group)}): initialise torch.distributed with"
            " 'cpu:gloo,cuda:nccl', or move the model"
        )


MOST_FREE = 16
"""The largest number of receive buffers that a communicator keeps for reuse."""


class ProcessGroupCommunicator(Communicator):
    """A communicator over the process group of one mesh axis.

    Args:
        own: True if this communicator gets a process group of its own, so that other code may use
            the axis in another order. The first collective creates this group, on all ranks of the
            axis.
    """

    def __init__(self, axis: DeviceMesh, own: bool = False) -> None:
        if axis.ndim != 1:
            raise ValueError(
                f"the axis has {axis.ndim} dimensions {axis.mesh_dim_names}, must have one: pass"
                ' mesh["replicate"]'
            )
        self._of_axis = axis.get_group()
        self._size = axis.size()
        self.replica = axis.get_local_rank()
        self._own = own and self._size > 1
        self._is_gloo = dist.get_backend(self._of_axis) == "gloo"
        self._staging: HostStaging | None = None
        if self._is_gloo and HostStaging.has_devices():  # gloo can read only host memory
            self._staging = HostStaging()
        self._free: list[Tensor] = []  # receive buffers that are free for reuse

    def size(self) -> int:
        return self._size

    def require_device(self, device: torch.device) -> None:
        """Raises `ValueError` if the group cannot send tensors of `device`."""
        if self._staging:
            device = torch.device("cpu")
        require_device(self._of_axis, device)

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        if not self._own:
            return self._of_axis
        group = _group_beside(self._of_axis)
        if self._is_gloo:
            # A gloo group is destroyed together with this object, except at exit.
            # An NCCL group is kept, because all its ranks must destroy it at the same time.
            weakref.finalize(self, _end, group).atexit = False
        return group

    def all_reduce(self, values: Tensor) -> Callable[[], Tensor]:  # [any] -> [any]
        buffer = values
        copied = None
        if self._staging:
            buffer, copied = self._staging.to_host(values)
        start = partial(dist.all_reduce, buffer, group=self._group, async_op=True)
        if self._staging:
            arrived = self._staging.start(start, copied, self._own)
        else:
            arrived = start().wait

        def wait() -> Tensor:
            arrived()
            if self._staging:
                return self._staging.to_device(buffer, values)
            return buffer

        return wait

    def all_gather(self, mine: Tensor) -> Callable[[], Tensor]:
        # shapes: [bytes] -> [replicas, bytes] uint8
        if self._is_gloo and self._size > 2 and is_sent_at_once(len(mine), self._size):
            return self.all_to_all(mine.repeat(self._size))
        return self._received(_all_gather, (self._size, len(mine)), mine)

    def all_to_all(self, mine: Tensor) -> Callable[[], Tensor]:
        # shapes: [replicas * bytes] -> [replicas, bytes] uint8
        return self._received(dist.all_to_all_single, (self._size, len(mine) // self._size), mine)

    def _received(
        self, collective: Any, shape: tuple[int, int], mine: Tensor
    ) -> Callable[[], Tensor]:
        """Starts `collective` with the message `mine` and a receive buffer of `shape`. Returns a
        function that waits for the received tensor."""
        sent = mine
        copied = None
        if self._staging:
            sent, copied = self._staging.to_host(mine)
        for index, free in enumerate(self._free):
            if free.shape == shape:
                received = self._free.pop(index)
                break
        else:
            if self._staging:
                received = self._staging.empty(shape, mine)
            else:
                received = mine.new_empty(shape)
        start = partial(collective, received.view(-1), sent, group=self._group, async_op=True)
        if self._staging:
            arrived = self._staging.start(start, copied, self._own)
        else:
            arrived = start().wait

        def wait() -> Tensor:
            arrived()
            if self._staging:
                return self._staging.to_device(received, mine)
            return received

        return wait

    def recycle(self, received: Tensor) -> None:
        """Keeps the buffer `received` for a later collective with a result of the same size.

        On a CPU, one buffer is kept: allocating memory for a large message would take longer than
        sending the message.

        Shapes: `[replicas, bytes]` uint8.
        """
        if received.device.type == "cpu":
            self._free.clear()
        if received.device.type == "cpu" or self._staging is None:
            self._free.append(received)
            del self._free[:-MOST_FREE]


def communicator_of(axis: Axis, own: bool = False) -> Communicator:
    """Returns `axis` itself if it is a communicator, or a new `ProcessGroupCommunicator` for an
    axis of a device mesh."""
    if isinstance(axis, DeviceMesh):
        return ProcessGroupCommunicator(axis, own)
    return axis


def _group_beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Creates a new process group with the ranks and the backend of `group`. Collective over these
    ranks only, unlike `dist.new_group`, which all ranks of the world must call.

    With `use_local_synchronization`, `dist.new_group` also needs only these ranks. But its name for
    the group contains a count of all groups that a rank has created, and this count may differ
    between ranks. This function counts only the groups that it created for `group`, so all ranks
    use the same name.
    """
    world = distributed_c10d._world
    everyone = distributed_c10d._get_default_group()
    backend, store = world.pg_map[group]
    ranks = dist.get_process_group_ranks(group)
    assert store is not None
    name = f"{group.group_name}/detonation/{store.add(f'detonation/groups/{group.rank()}', 1)}"
    backends: list[Any] = [group._get_backend(device) for device in group._device_types]
    options = None
    if dist.is_nccl_available():
        for each in backends:
            if isinstance(each, dist.ProcessGroupNCCL):
                options = dist.ProcessGroupNCCL.Options(
                    is_high_priority_stream=each.options.is_high_priority_stream
                )
    timeout = max(each.options._timeout for each in backends)
    if options is not None:
        options._timeout = timeout
    bound = everyone.bound_device_id
    # with a bound device torch would split the world's NCCL communicator, which needs all ranks
    everyone.bound_device_id = None
    try:
        make: Any = distributed_c10d._new_process_group_helper
        # the new group's ranks meet in the store of the default group, as in torch's own groups
        meeting = world.pg_map[everyone][1]
        of_group = group.size(), group.rank(), ranks, backend, meeting, name
        made: dist.ProcessGroup = make(*of_group, backend_options=options, timeout=timeout)[0]
    finally:
        everyone.bound_device_id = bound
    world.pg_group_ranks[made] = {rank: number for number, rank in enumerate(ranks)}
    return made


def _end(group: dist.ProcessGroup) -> None:
    """Destroys a process group that is no longer used, unless torch has destroyed all groups
    already."""
    if group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
