"""Keeps file descriptors free: raises their limit, and drops foreign connections to gloo's
ports.
"""

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
"""Number of open files that a rank needs to meet the other ranks and to save."""
OPEN_PER_RANK = 3
"""Number of open files that a rank needs for each other rank: connections of the default process
group, of saving and of the mesh axis.
"""
_SAFE_OPEN = 4096
_MOST_OPEN = 1 << 20
"""Largest limit of open files that a rank sets. A higher limit would slow down programs that try to
close each number up to the limit.
"""
_SO_ATTACH_FILTER = 26  # Python has no name for this socket option
_LIBC = ctypes.CDLL(None)
_DROP_ALL = struct.pack("HBBI", 6, 0, 0, 0)
"""A program for Linux's packet filter (BPF): "return 0" keeps no byte, which drops the packet."""


def allow_open_files(ranks: int = 1) -> None:
    """Raises the soft limit of open files of this process to its hard limit, but to at most
    `_MOST_OPEN`.

    gloo aborts the process if it accepts a connection when no file descriptor is free. gloo also
    never closes connections of foreign programs. Raises `ValueError` if the hard limit is too low
    for a run of `ranks` ranks.
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
            f"a process may open {soft} files here, but a rank{among} needs at least {least}:"
            f" raise the limit with ulimit -n {least * 16}"
        )


def few_open_files() -> str:
    """Returns a warning for the end of a log line if a few foreign connections to gloo's ports can
    end this process. Returns "" if the process may open enough files, or if the kernel drops
    foreign connections.
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
    """The ports of the gloo process groups that torch has registered.

    store: The store of the default process group, on a connection that no other thread uses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._done: set[str] = set()

    def drop_strangers(self) -> None:
        """Makes the kernel drop foreign connections to the port of each gloo group, once for each
        group.

        If the store of a group does not answer, the next call of this method tries this group
        again.
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
            # torch stores the addresses of a backend under the first device type of this backend
            drop_strangers(backend, PrefixStore(f"{device.type}/", store))


def drop_strangers(group: Any, store: Store) -> None:
    """Makes the kernel drop all new connections to the port of `group`, whose ranks met in `store`.

    gloo keeps the descriptor of each connection that it accepts, even after the connection was
    closed. When the constructor of a group returns, this rank has all connections of the group, so
    gloo needs the port no longer. A group with `TORCH_GLOO_LAZY_INIT` connects later, so this
    function does not change its port. Forked processes share the port, and therefore its filter.

    Does nothing if the operating system has no such filter. Raises `RuntimeError` or `OSError` if
    the store does not answer.
    """
    keys = [f"{device}/{group.rank()}" for device in range(len(group.options._devices))]
    if "TORCH_GLOO_LAZY_INIT" in os.environ or not store.check(keys):
        return
    for key in keys:
        entry = store.get(key)
        # the system has no packet filter, or `entry` has an unknown format
        with suppress(OSError, ValueError):
            _drop_at(_address_in(entry))


def _address_in(entry: bytes) -> tuple[str, int]:
    """Returns host and port from the `entry` that gloo stores for a rank.

    An entry holds four values: the length of the host name, the host name, the length of the
    address, and the address in the format of the operating system. Raises `ValueError` or `OSError`
    for entries of another form.
    """
    address = entry[16 + int.from_bytes(entry[:8], sys.byteorder) :]
    family = int.from_bytes(address[:2], sys.byteorder)
    host = address[4:8]
    if family == socket.AF_INET6:
        host = address[8:24]
    return socket.inet_ntop(family, host), int.from_bytes(address[2:4], "big")


def _drop_at(address: tuple[str, int]) -> None:
    """Makes the kernel drop new connections to the socket of gloo that listens at `address`.

    Changes only inheritable sockets: gloo's sockets are inheritable, and Python's are not. So a
    Python server keeps working even if a forged entry of the store names its address.
    """
    for descriptor in Path("/proc/self/fd").iterdir():
        number = int(descriptor.name)
        with suppress(OSError):
            if os.get_inheritable(number) and _listens(number):
                _drop_if_at(address, number)


def _listens(number: int) -> bool:
    """True if a descriptor is a socket that listens.

    Asks the operating system without creating a Python socket. `_own_socket` would reset the
    blocking mode of the socket, and might undo a change that a thread of gloo makes at the same
    time. A connection of gloo in blocking mode stops all exchanges of its group.
    """
    listens = ctypes.c_int()
    size = ctypes.c_uint(ctypes.sizeof(listens))
    failed = _LIBC.getsockopt(
        number,
        socket.SOL_SOCKET,
        socket.SO_ACCEPTCONN,
        ctypes.byref(listens),
        ctypes.byref(size),
    )
    return not failed and bool(listens.value)


def _drop_if_at(address: tuple[str, int], number: int) -> None:
    with _own_socket(number) as held:
        if held.getsockname()[:2] == address:
            _drop_all(held)


def _own_socket(number: int) -> socket.socket:
    """Returns a socket object for a copy of a descriptor. Raises `OSError` if it is no socket."""
    copy = os.dup(number)
    blocks = os.get_blocking(copy)
    try:
        held = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    # socket() may have made all copies of the descriptor non-blocking
    os.set_blocking(copy, blocks)
    return held


def _drop_all(held: socket.socket) -> None:
    """Makes the kernel drop all packets for the socket `held`. Raises `OSError` if it cannot."""
    if sys.platform != "linux":
        raise OSError("this system has no packet filter")
    program = ctypes.create_string_buffer(_DROP_ALL)
    one = struct.pack("@HP", 1, ctypes.addressof(program))
    held.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, one)
