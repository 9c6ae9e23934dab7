"""Keeps free file descriptors: raises their limit, and drops strangers' connections to gloo."""

import ctypes
import os
import resource
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

LEAST_OPEN = 64
"""Number of open files that a rank needs to meet the others and to save."""
OPEN_PER_RANK = 3
"""Number of open files needed per other rank: connections of the default group, of saving and of
the axis.
"""
_SAFE_OPEN = 4096
_MOST_OPEN = 1 << 20
"""Higher limits are useless, and slow down programs that visit each number up to the limit."""
_SO_ATTACH_FILTER = 26  # Python has no name for it
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)
"""A program for Linux's packet filter (BPF): "return 0", which keeps no byte of a packet."""


def allow_open_files(ranks: int = 1) -> None:
    """Raises the soft limit of open files to the hard limit.

    gloo aborts if it accepts a connection without a free descriptor, and it never closes
    connections of other programs. Raises `ValueError` if the hard limit is too low for a run of
    `ranks` ranks.
    """
    least = LEAST_OPEN + OPEN_PER_RANK * (ranks - 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN
    if hard != resource.RLIM_INFINITY:
        most = min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a sandbox may refuse to change the limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft != resource.RLIM_INFINITY and soft < least:
        among = ""
        if ranks > 1:
            among = f" among {ranks} ranks"
        raise ValueError(
            f"a process may open {soft} files here, a rank needs at least {least}{among}: raise the"
            f" limit with ulimit -n {least * 16}"
        )


def few_open_files() -> str:
    """A warning to append to a log line, if a few foreign connections to gloo's ports can end this
    process; "" if the process may open enough files, or if the kernel drops such connections.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if not 0 <= soft < _SAFE_OPEN:
        return ""
    try:
        with socket.socket() as held:
            _drop_all(held)
    except OSError:
        return (
            f"; a port scan may end the run, because a process may open {soft} files here: raise"
            f" the hard limit (ulimit -Hn) to {_SAFE_OPEN}"
        )
    return ""


class GlooPorts:
    """The ports of the gloo groups that torch has registered.

    store: The store of the default group, on a connection that no other thread uses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._done: set[str] = set()

    def drop_strangers(self) -> None:
        """Calls `drop_strangers` for each group once.

        A group whose store does not answer is tried again at the next call.
        """
        for group in [*distributed_c10d._world.pg_map]:
            if group.group_name not in self._done:
                store = self._store
                if group is not dist.group.WORLD:
                    store = PrefixStore(f"{group.group_name}/", store)
                with suppress(RuntimeError, OSError):
                    _drop_for_backends(group, store)
                    self._done.add(group.group_name)


def _drop_for_backends(group: dist.ProcessGroup, store: Store) -> None:
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if isinstance(backend, ProcessGroupGloo):
            # torch stores addresses under the first device type of a backend
            drop_strangers(backend, PrefixStore(f"{device.type}/", store))


def drop_strangers(group: Any, store: Store) -> None:
    """Makes the kernel drop all new connections to the port of `group`, which met in `store`.

    gloo keeps the descriptor of each connection that it accepts, even after it was closed. The
    constructor of a group returns when all connections of this rank are made, so after it the port
    is of no use. A group with `TORCH_GLOO_LAZY_INIT` connects later; its port stays as it is.
    Forked processes share the port, and so the filter.

    Does nothing if the system has no such filter. Raises `RuntimeError` or `OSError` if the store
    does not answer.
    """
    keys = [f"{device}/{group.rank()}" for device in range(len(group.options._devices))]
    if "TORCH_GLOO_LAZY_INIT" in os.environ or not store.check(keys):
        return
    for key in keys:
        entry = store.get(key)
        with suppress(OSError, ValueError):  # another system, or another format of gloo
            _drop_at(_address_in(entry))


def _address_in(entry: bytes) -> tuple[str, int]:
    """Host and port in the entry of a rank of gloo.

    The entry has the length of a host name, the name, the length of the address, and the address as
    the system stores it. Raises `ValueError` or `OSError` for other entries.
    """
    address = entry[16 + int.from_bytes(entry[:8], sys.byteorder) :]
    family = int.from_bytes(address[:2], sys.byteorder)
    host = address[4:8]
    if family == socket.AF_INET6:
        host = address[8:24]
    return socket.inet_ntop(family, host), int.from_bytes(address[2:4], "big")


def _drop_at(address: tuple[str, int]) -> None:
    """Drops new connections to the socket of gloo that listens at `address`.

    gloo's sockets are inheritable and Python's are not, so a forged entry of the store cannot name
    a server of this process.
    """
    for descriptor in Path("/proc/self/fd").iterdir():
        number = int(descriptor.name)
        with suppress(OSError):
            if os.get_inheritable(number):
                _drop_if_at(address, number)


def _drop_if_at(address: tuple[str, int], number: int) -> None:
    with _own_socket(number) as held:
        listens = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and held.getsockname()[:2] == address:
            _drop_all(held)


def _own_socket(number: int) -> socket.socket:
    """The socket of a descriptor, by another descriptor. Raises `OSError` if it is no socket."""
    copy = os.dup(number)
    blocks = os.get_blocking(copy)
    try:
        held = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    os.set_blocking(copy, blocks)  # socket.setdefaulttimeout changes it, for all copies
    return held


def _drop_all(held: socket.socket) -> None:
    """Makes the kernel drop all packets for `held`. Raises `OSError` if it refuses."""
    if sys.platform != "linux":
        raise OSError("no packet filter")
    program = ctypes.create_string_buffer(_DROP_ALL)
    one = struct.pack("@HP", 1, ctypes.addressof(program))
    held.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, one)
