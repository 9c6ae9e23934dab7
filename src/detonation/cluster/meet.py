"""Where processes meet, and the network interface that their sockets keep to."""

import errno
import os
import socket
import sys
from collections.abc import MutableMapping
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import FileStore, TCPStore
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where torch's network libraries look for the interface that they listen on."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_MEETING_S = 300.0


def meet(rank: int, world_size: int, folder: Path | None = None) -> Store:
    """The store at which all ranks meet: a file in `folder`, else at MASTER_ADDR:MASTER_PORT of the environment.

    torchrun's agent keeps that one, on all interfaces of its machine. Otherwise rank 0 does, on MASTER_ADDR alone.
    """
    if folder is not None:
        return FileStore(str(folder / "rendezvous"), world_size)
    if rank or _agent_keeps(os.environ):
        store: Store = next(iter(rendezvous("env://", rank, world_size)))[0]
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = _listen(address, port)
    timeout = timedelta(seconds=_MEETING_S)
    return TCPStore(
        address, port, world_size, is_master=True, timeout=timeout, master_listen_fd=listener.detach(), use_libuv=True
    )


def store_keeper(env: MutableMapping[str, str]) -> str:
    """Who keeps the store of a launched world, in words."""
    where = f"{env.get('MASTER_ADDR', '?')}:{env.get('MASTER_PORT', '?')}"
    return f"the launcher at {where}" if _agent_keeps(env) else f"rank 0 at {where}"


def keep_to_one_interface(env: MutableMapping[str, str], one_machine: bool, interface: str = "") -> None:
    """Sets the interface for torch's network libraries: `interface`, else what `env` says, else loopback if possible.

    Raises `ValueError` for an interface that this machine does not have.
    """
    known = [name for _, name in socket.if_nameindex()]
    if interface and interface not in known:
        raise ValueError(f"--interface is {interface!r}, but this machine has {', '.join(known)}")
    for name in INTERFACES:
        if interface:
            env[name] = interface
        elif one_machine:
            env.setdefault(name, LOOPBACK)


def _agent_keeps(env: MutableMapping[str, str]) -> bool:
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listen(address: str, port: int) -> socket.socket:
    """A socket that listens on `address`; on all interfaces where the address is not this machine's own."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(where[:2], family=family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port))  # behind a service's or a router's address
