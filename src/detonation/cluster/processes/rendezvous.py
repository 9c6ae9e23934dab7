"""The store where processes meet, and the network interface that their sockets keep to."""

import errno
import os
import secrets
import socket
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from detonation.cluster.devices import device_name, require_own_devices
from detonation.cluster.position import (
    LOOPBACK,
    LaunchPosition,
    addresses_of,
    interface_towards,
    is_loopback,
)
from detonation.cluster.processes.failure import RunError
from detonation.cluster.processes.waiting import Awaited, says_meanwhile

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
INTERFACES = (GLOO_INTERFACE, "NCCL_SOCKET_IFNAME")
"""The variables from which torch's network libraries read the interface to listen on."""
_RENDEZVOUS_TIMEOUT_S = 300.0


def rendezvous_store(position: LaunchPosition, folder: Path | None = None) -> Store:
    """Opens the store where all ranks meet: a file in `folder`, else at MASTER_ADDR:MASTER_PORT of
    the environment.

    torchrun's agent hosts that store, on all interfaces of its machine. Otherwise rank 0 hosts it,
    on one address alone (see `_listen`). Keys that an earlier attempt left in a store of the agent
    are out of sight.

    Raises `ValueError` where another process has the port, or MASTER_ADDR or MASTER_PORT is missing
    or wrong, and `RunError` where the ranks did not meet within 300 s.
    """
    rank, world_size = position.rank, position.world_size
    if folder is not None:
        return FileStore(str(folder / "rendezvous"), world_size)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} not set: name the host of rank 0 and a free port there on all"
            " ranks"
        )
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdigit() or int(port) > 65_535:
        raise ValueError(
            f"MASTER_PORT is {port!r}, but must be a port that is free at rank 0: at most 65535"
        )
    timeout = timedelta(seconds=_RENDEZVOUS_TIMEOUT_S)
    try:
        if rank or _agent_hosts_store(os.environ):
            host_of_store = describe_store_host(os.environ)
            with says_meanwhile(f"rank {rank} of {world_size}", host_of_store):
                connecting = rendezvous("env://", rank, world_size, timeout=timeout)
                store: Store = next(iter(connecting))[0]
            if not _agent_hosts_store(os.environ):
                store.set(_key("came", rank), "")
                return store
            # of this attempt: after a restart the store still holds the addresses of ranks that are
            # gone
            name = name_of_first(
                store, rank, world_size, secrets.token_hex(8), _RENDEZVOUS_TIMEOUT_S
            )
            return PrefixStore(name, store)
        host, listener = _listen(address, int(port), position.one_machine)
        taken, fd = listener.getsockname()[1], listener.detach()
        hosted = TCPStore(
            *(host, taken, world_size, True, timeout),
            wait_for_workers=False,
            master_listen_fd=fd,
            use_libuv=True,
        )
        _wait_for_all(hosted, world_size)
        return hosted
    except socket.gaierror as error:
        raise ValueError(
            f"MASTER_ADDR is {address!r}, but no host has that name: name that of rank 0"
        ) from error
    except (DistError, TimeoutError) as error:
        met = (
            f"rank {rank} of {world_size} has not met the others at {address}:{port} in"
            f" {_RENDEZVOUS_TIMEOUT_S:.0f} s"
        )
        raise RunError(
            f"{met}: start all, with one MASTER_ADDR and MASTER_PORT, and open that port at rank 0"
        ) from error


def _wait_for_all(store: Store, world_size: int) -> None:
    """Waits on rank 0 until all ranks have connected; says who has not.

    `TimeoutError` after 300 s.
    """
    awaited = Awaited(f"rank 0 of {world_size}", _RENDEZVOUS_TIMEOUT_S)
    while away := [r for r in range(1, world_size) if not store.check([_key("came", r)])]:
        awaited.wait(away)


def compare_devices(store: Store, position: LaunchPosition, device: torch.device) -> None:
    """Raises `ValueError` on all ranks where two of them share a GPU, or only some have one.

    Collective.
    """
    keys = [f"detonation/device/{rank}" for rank in range(position.world_size)]
    store.set(keys[position.rank], device_name(device, socket.gethostname()))
    require_own_devices([name.decode() for name in store.multi_get(keys)])


def name_of_first(store: Store, rank: int, world_size: int, name: str, timeout_s: float) -> str:
    """The name that rank 0 has given, on all ranks that came for it. Collective; `TimeoutError`
    where not all came.

    Counts of restarts differ between launchers, so the ranks greet each other: rank 0 answers each
    greeting with its name, which no other start in this store had, until each rank has confirmed
    it; a rank believes an answer to its own greeting alone. The store may hold what ranks that are
    gone have left.
    """
    token, awaited = secrets.token_hex(8), Awaited(f"rank {rank}", timeout_s)
    others = range(1, world_size)
    for other in others if rank == 0 else [rank]:
        for kind in ("greeting", "answer", "name"):
            store.compare_set(_key(kind, other), "", "-")
    while True:
        if rank == 0:
            for other in others:
                store.set(
                    _key("answer", other), f"{store.get(_key('greeting', other)).decode()} {name}"
                )
            away = [other for other in others if store.get(_key("name", other)).decode() != name]
            if not away:
                return name
        else:
            store.set(_key("greeting", rank), token)
            greeting, _, given = store.get(_key("answer", rank)).decode().partition(" ")
            if greeting == token:
                store.set(_key("name", rank), given)
                return given
            away = [0]
        awaited.wait(away)


def _key(kind: str, rank: int) -> str:
    return f"detonation/{kind}/{rank}"


def describe_store_host(env: Mapping[str, str]) -> str:
    """The process that hosts the store of a launched world, in words."""
    where = f"{env.get('MASTER_ADDR', '?')}:{env.get('MASTER_PORT', '?')}"
    return f"the launcher at {where}" if _agent_hosts_store(env) else f"rank 0 at {where}"


def keep_to_one_interface(
    env: MutableMapping[str, str], one_machine: bool, interface: str = ""
) -> None:
    """Sets the interface of torch's network libraries in `env`; `interface` takes precedence over
    what is there.

    Between machines gloo would listen where the name of this machine leads, which may be loopback,
    so it gets the interface towards MASTER_ADDR. On `one_machine` loopback serves. NCCL never
    chooses loopback between machines, and may use several interfaces. Raises `ValueError` where
    this machine does not have the interface.
    """
    known = [name for _, name in socket.if_nameindex()]
    named, wanted = (
        ("--interface", interface) if interface else (GLOO_INTERFACE, env.get(GLOO_INTERFACE, ""))
    )
    if not {*wanted.split(",")} <= {*known, ""}:
        raise ValueError(f"{named} is {wanted!r}, but this machine has {', '.join(known)}")
    for name in INTERFACES:
        if interface:
            env[name] = interface
        elif one_machine or is_loopback(env.get("MASTER_ADDR", "")):
            env.setdefault(name, LOOPBACK)
    if GLOO_INTERFACE not in env and (towards := interface_towards(env.get("MASTER_ADDR", ""))):
        env[GLOO_INTERFACE] = towards


def _agent_hosts_store(env: Mapping[str, str]) -> bool:
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listen(address: str, port: int, one_machine: bool) -> tuple[str, socket.socket]:
    """Listens on `address`; returns the address to connect to from here, and the socket.

    `address` may not be this machine's own (behind a service or a router), or lead to loopback
    although other machines must reach it. The socket then listens on the interface that gloo keeps
    to, and only without one on all interfaces.

    Raises `ValueError` where another process has the port.
    """
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    host = str(where[0])
    try:
        if one_machine or is_loopback(address) or not is_loopback(host):
            return address, _server(host, port, family)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    own = addresses_of(os.environ.get(GLOO_INTERFACE, ""))
    if own:
        return own[0], _server(own[0], port, socket.AF_INET6 if ":" in own[0] else socket.AF_INET)
    return address, _server("", port, socket.AF_INET)


def _server(host: str, port: int, family: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        remedy = "give all ranks another MASTER_PORT, or end what listens there"
        raise ValueError(f"port {port} of {host} is in use: {remedy}") from error
