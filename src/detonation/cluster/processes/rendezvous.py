"""Opens the store through which the processes of a run meet, and chooses the network interface on
which their sockets listen.
"""

import contextlib
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from detonation.choices import first_names
from detonation.cluster.interface import (
    LOOPBACK,
    Way,
    find_way,
    is_loopback,
    listener_at,
    loopback_id,
    way_over,
    way_towards,
)
from detonation.cluster.position import LaunchPosition, joined_address, require_known_host
from detonation.cluster.processes.descriptors import few_open_files
from detonation.cluster.processes.failure import RunError
from detonation.cluster.processes.waiting import Awaited, in_thread, says_meanwhile

_S = TypeVar("_S", bound=Store)

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
INTERFACES = (GLOO_INTERFACE, "NCCL_SOCKET_IFNAME")
"""Environment variables that name the interface on which torch's network libraries listen."""
_RENDEZVOUS_TIMEOUT_S = 300.0
_CONNECT_S = 2.0
_ANSWER_S = 30.0
"""Seconds within which a program that accepts connections must answer as a store does."""
_READ_S = 10.0
_MOST_WAYS = 4
_WORLD = "detonation/world"
_OTHER_WORLD = "detonation/world/other"
_found = ""
"""Network interface that this process has chosen and written to its environment; "" if none."""


def rendezvous_store(
    position: LaunchPosition,
    folder: Path | None = None,
    timeout_s: float | None = None,
) -> Store:
    """Opens the store that all ranks share: a file in `folder`, else a server at
    MASTER_ADDR:MASTER_PORT. If the environment lacks these two variables, sets them from
    `position`.

    If torchrun's agent runs, it hosts the server, on all interfaces of its machine. Otherwise rank
    0 hosts the server on a single address (see `_listen`). In the agent's store, the keys of each
    attempt to start have their own prefix.

    timeout_s: Seconds within which the ranks must meet; None for 300.

    Raises `ValueError` if another process has the port, or if MASTER_ADDR or MASTER_PORT is missing
    or wrong. Raises `RunError` if the ranks did not meet within `timeout_s`.
    """
    rank = position.rank
    world_size = position.world_size
    if folder is not None:
        return FileStore(str(folder / "rendezvous"), world_size)
    if position.address:
        os.environ.setdefault("MASTER_ADDR", position.address)
        os.environ.setdefault("MASTER_PORT", str(position.port))
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} not set: set MASTER_ADDR to the host of rank 0, and"
            " MASTER_PORT to a free port there, on all ranks"
        )
    address = os.environ["MASTER_ADDR"]
    port = os.environ["MASTER_PORT"]
    if not port.isdigit() or int(port) > 65_535:
        raise ValueError(
            f"MASTER_PORT is {port!r}: set it to a port that is free at rank 0, at most 65535"
        )
    if timeout_s is None:
        timeout_s = _RENDEZVOUS_TIMEOUT_S
    timeout = timedelta(seconds=timeout_s)
    try:
        if rank or _agent_hosts_store(os.environ):
            store: Store = _connected(
                address,
                int(port),
                lambda limit: next(iter(rendezvous("env://", rank, world_size, timeout=limit)))[0],
                who=f"rank {rank} of {world_size}",
                whom=describe_store_host(os.environ),
                limit_s=timeout_s,
                # until rank 0 listens, a proxy may accept connections and close them again
                answer_s=timeout_s,
            )
            if not _agent_hosts_store(os.environ):
                _require_same_world(store, rank, world_size)
                store.set(_key("came", rank), "")
                return store
            # each attempt has its own keys, because the store still has addresses of ended ranks
            name = name_of_first(store, rank, world_size, secrets.token_hex(8), timeout_s)
            return PrefixStore(name, store)
        host, listener = _listen(address, int(port), position.one_machine)
        taken = listener.getsockname()[1]
        fd = listener.detach()
        hosted = TCPStore(
            *(host, taken, world_size, True, timeout),
            wait_for_workers=False,
            master_listen_fd=fd,
            use_libuv=True,
        )
        hosted.set(_WORLD, str(world_size))
        _wait_for_all(hosted, world_size, timeout_s)
        return hosted
    except socket.gaierror as error:
        raise ValueError(
            f"MASTER_ADDR is {address!r}, but no host has that name: name the host of rank 0"
        ) from error
    except (DistError, TimeoutError) as error:
        where = joined_address(address, port)
        why = ""
        if isinstance(error, _Unreached):
            why = f" ({error})"
        raise RunError(
            f"rank {rank} of {world_size} has not met the other ranks at {where} in"
            f" {timeout_s:.0f} s{why}: start all ranks with one MASTER_ADDR and MASTER_PORT, and"
            " open that port at rank 0"
        ) from error


def reached_store(host: str, port: int, limit_s: float = _RENDEZVOUS_TIMEOUT_S) -> TCPStore:
    """Connects to the store at `host` and `port`. Waits for the store up to `limit_s` seconds, and
    logs this wait.

    Raises `ValueError` if no store answers there, or if the host is unknown.
    """
    where = joined_address(host, port)
    require_known_host("the address of the store", where)
    try:
        return _connected(
            host,
            port,
            lambda limit: TCPStore(host, port, timeout=limit),
            who="this replica",
            whom=where,
            limit_s=limit_s,
            answer_s=_ANSWER_S,
        )
    except _Unreached as error:
        raise ValueError(
            f"there is no store at {where} ({error}): start detonation meet, and give the"
            " address that it prints"
        ) from error


class _Unreached(TimeoutError):
    """Raised if no store answered; the text is the reason."""


def _connected(
    host: str,
    port: int,
    connect: Callable[[timedelta], _S],
    *,
    who: str,
    whom: str,
    limit_s: float,
    answer_s: float,
) -> _S:
    """Waits until a program listens at `host` and `port`. Then calls `connect`, and returns the
    store that `connect` returns.

    `connect` passes its argument to torch, as a time limit. torch ignores this time limit if the
    program accepts the connection and never answers. So another thread calls `connect`, and this
    function itself limits its wait for that thread. The time limit for torch is twice `limit_s`,
    because a process aborts if it ends while torch raises in another thread.

    Args:
        who: Name of the waiting process in the log; `whom` is the process for which it waits.
        limit_s: Largest number of seconds for the whole call.
        answer_s: Largest number of seconds for the call of `connect`, within `limit_s`.

    Raises:
        _Unreached: Nothing listens after `limit_s`, or the program that listens does not answer as
            a store within `answer_s`.
    """
    awaited = Awaited(who, limit_s)
    began = time.monotonic()
    while why := _cannot_connect(host, port):
        try:
            awaited.wait(partial("{}: {}".format, whom, why), _CONNECT_S / 10)
        except TimeoutError as error:
            raise _Unreached(why) from error
    answer_s = min(answer_s, limit_s - (time.monotonic() - began))
    longer = timedelta(seconds=2 * limit_s)
    try:
        with says_meanwhile(who, f"an answer from {whom}"):
            store = in_thread(partial(connect, longer), "connecting").result(max(answer_s, 0))
    except (DistError, TimeoutError) as error:
        raise _Unreached("the program that listens at this address is no store") from error
    store.set_timeout(timedelta(seconds=limit_s))
    return store


def _cannot_connect(host: str, port: int) -> str:
    """Returns the reason why connections to `host` and `port` fail; "" if a connection succeeds."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _wait_for_all(store: Store, world_size: int, timeout_s: float) -> None:
    """On rank 0, waits until all other ranks have connected to the store, and logs which ranks are
    missing.

    Raises `TimeoutError` after `timeout_s` seconds.
    """

    def look() -> None:
        if store.check([_OTHER_WORLD]):
            raise ValueError(store.get(_OTHER_WORLD).decode())

    awaited = Awaited(f"rank 0 of {world_size}", timeout_s, look=look)
    while away := [r for r in range(1, world_size) if not store.check([_key("came", r)])]:
        awaited.wait(partial(list, away))


def _require_same_world(store: Store, rank: int, world_size: int) -> None:
    """Raises `ValueError` on this rank and on rank 0 if their launchers started different numbers
    of ranks.
    """
    first = int(store.get(_WORLD))
    if first == world_size:
        return
    reason = (
        f"the world has {world_size} ranks for rank {rank} and {first} for rank 0: start all"
        " machines with the same number of nodes and ranks"
    )
    store.set(_OTHER_WORLD, reason)
    raise ValueError(reason)


def name_of_first(
    store: Store,
    rank: int,
    world_size: int,
    name: str,
    timeout_s: float,
    look: Callable[[], object] = lambda: None,
) -> str:
    """Gives all ranks the `name` that rank 0 chose for this start, and returns this name. The ranks
    put the name in front of their keys in a store. Collective.

    The name cannot be the count of restarts, because launchers count restarts differently. Each
    rank writes a greeting to the store. Rank 0 answers each greeting with `name` until each rank
    has confirmed this name. No other start in this store has used `name`. A rank accepts only an
    answer to its own greeting, because the store may hold keys of ended ranks.

    Args:
        look: As in `Awaited`.

    Raises:
        TimeoutError: Not all ranks came within `timeout_s`.
    """
    awaited = Awaited(f"rank {rank}", timeout_s, look=look)
    if rank == 0:
        return _give_name(store, world_size, name, awaited)
    return _ask_for_name(store, rank, awaited)


def _give_name(store: Store, world_size: int, name: str, awaited: Awaited) -> str:
    """On rank 0, sends the `name` of this start (see `name_of_first`) to all other ranks. Answers
    their greetings with `name` until each of them has confirmed this name.
    """
    others = range(1, world_size)
    for other in others:
        _create_name_keys(store, other)
    while True:
        for other in others:
            greeting = store.get(_key("greeting", other)).decode()
            store.set(_key("answer", other), f"{greeting} {name}")
        away = [other for other in others if store.get(_key("name", other)).decode() != name]
        if not away:
            return name
        awaited.wait(partial(list, away))


def _ask_for_name(store: Store, rank: int, awaited: Awaited) -> str:
    """Returns the name that rank 0 chose for this start (see `name_of_first`). Greets rank 0 until
    rank 0 answers this greeting with the name, and confirms the name.
    """
    token = secrets.token_hex(8)
    _create_name_keys(store, rank)
    while True:
        store.set(_key("greeting", rank), token)
        answer = store.get(_key("answer", rank)).decode()
        greeting, _, given = answer.partition(" ")
        if greeting == token:
            store.set(_key("name", rank), given)
            return given
        awaited.wait(partial(list, [0]))


def _create_name_keys(store: Store, rank: int) -> None:
    """Creates the missing keys of `rank` in the store, because `get` waits for a missing key."""
    for kind in ("greeting", "answer", "name"):
        store.compare_set(_key(kind, rank), "", "-")


def _key(kind: str, rank: int) -> str:
    return f"detonation/{kind}/{rank}"


def describe_store_host(env: Mapping[str, str]) -> str:
    """Describes the process that hosts the store of a launched world."""
    where = joined_address(env.get("MASTER_ADDR", "?"), env.get("MASTER_PORT", "?"))
    if _agent_hosts_store(env):
        return f"the launcher at {where}"
    return f"rank 0 at {where}"


def hosts_store(env: Mapping[str, str], rank: int) -> bool:
    """True if the store may end together with `rank`, before ranks on other machines have read from
    it. If the agent of torchrun hosts the store, the agent ends as soon as any rank on its machine
    has failed.
    """
    if _agent_hosts_store(env):
        return env.get("GROUP_RANK") == "0" and env.get("GROUP_WORLD_SIZE") != "1"
    return rank == 0


def use_interface(env: MutableMapping[str, str], interface: str = "") -> None:
    """Sets the variables of `env` that name the network interface, to the `interface` that the user
    chose. If `interface` is "", only checks the interface that `env` names.

    Raises `ValueError` if this machine does not have the interface.
    """
    known = [name for _, name in socket.if_nameindex()]
    wanted = interface or env.get(GLOO_INTERFACE, "")
    if not {*wanted.split(",")} <= {*known, ""}:
        named = GLOO_INTERFACE
        if interface:
            named = "--interface"
        raise ValueError(
            f"{named} is {wanted!r}, but this machine has only the interfaces"
            f" {', '.join(known)}: name one of them"
        )
    if interface:
        env.update(dict.fromkeys(INTERFACES, interface))


def asked_interface(env: Mapping[str, str]) -> str:
    """Returns the interface that the user chose; "" if the interface in `env` is the choice of this
    process.
    """
    name = env.get(GLOO_INTERFACE, "").partition(",")[0]
    if name == _found:
        return ""
    return name


def keep_to_loopback(env: MutableMapping[str, str]) -> None:
    """Makes torch's network libraries listen on loopback only, unless `env` names an interface."""
    for name in INTERFACES:
        env.setdefault(name, LOOPBACK)


def keep_to_one_interface(
    env: MutableMapping[str, str], store: Store, rank: int, world_size: int
) -> str:
    """Chooses the interface on which torch's network libraries listen, and writes it to `env`.
    Collective over the ranks of `store`.

    If all ranks share a loopback interface, they use it. Otherwise gloo gets the interface that
    leads to MASTER_ADDR. By default, gloo would listen on the address of the machine's name, which
    may be loopback. NCCL never chooses loopback, and may use several interfaces. An interface that
    the user chose always takes precedence.

    Returns:
        The addresses on which the ranks listen, as text; "" for loopback.

    Raises:
        ValueError: On all ranks, if one of them has no route to the others.
    """
    global _found
    use_interface(env)
    asked = asked_interface(env)
    host = env.get("MASTER_ADDR", "")
    way, trouble = _own_way(asked, host)
    store.set(_key("way", rank), json.dumps([loopback_id(), str(way or ""), trouble]))
    found = store.multi_get([_key("way", number) for number in range(world_size)])
    loopbacks, ways, troubles = zip(*map(json.loads, found), strict=True)
    if len(set(loopbacks)) == 1:
        keep_to_loopback(env)
        return ""
    for number, text in enumerate(troubles):
        if text:
            wait_until_read(store, rank, world_size)
            raise ValueError(f"rank {number} has no route to ranks on other machines: {text}")
    if not asked and way is not None:
        env[GLOO_INTERFACE] = _found = way.interface
    return describe_ways(ways, joined_address(host, env.get("MASTER_PORT", "?")))


def wait_until_read(store: Store, rank: int, world_size: int) -> None:
    """Waits until all ranks have read the error in the store, because the store may end with the
    rank that hosts it.
    """
    store.set(_key("read", rank), "")
    with contextlib.suppress(DistError):
        store.wait(
            [_key("read", number) for number in range(world_size)],
            timedelta(seconds=_READ_S),
        )


def describe_ways(ways: Sequence[str], store: str) -> str:
    """Describes in one line the addresses on which the ranks of several machines listen."""
    machines = dict.fromkeys(way or "an interface of gloo's choice" for way in ways)
    where = first_names(machines, _MOST_WAYS)
    return f"listening on {where}, towards {store}{few_open_files()}"


def _own_way(asked: str, host: str) -> tuple[Way | None, str]:
    """Returns the route of this rank to other machines, or the reason why it has no route."""
    if asked == LOOPBACK:
        return None, (
            f"{GLOO_INTERFACE} is {asked!r}: set it to an interface that the other machines"
            " reach, or unset it"
        )
    try:
        if asked:
            return way_over(asked, host), ""
        return find_way(host), ""
    except ValueError as error:
        return None, str(error)


def _agent_hosts_store(env: Mapping[str, str]) -> bool:
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _listen(address: str, port: int, one_machine: bool) -> tuple[str, socket.socket]:
    """Listens on `address`. Returns the address for local connections, and the socket.

    `address` may belong to a service or a router instead of this machine. It may also be loopback,
    although other machines must reach it. In both cases the socket listens on gloo's interface, or
    on all interfaces if gloo has none.

    Raises `ValueError` if another process has the port.
    """
    *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    host = str(where[0])
    try:
        if one_machine or is_loopback(address) or not is_loopback(host):
            return address, _server(host, port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    asked = asked_interface(os.environ)
    if asked:
        way: Way | None = way_over(asked, address)
    else:
        way = way_towards(address)
    if way is None or not way.address:
        return address, _server("", port)
    return way.address, _server(way.address, port)


def _server(host: str, port: int) -> socket.socket:
    try:
        return listener_at(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        remedy = "give all ranks another MASTER_PORT, or end the program that listens there"
        raise ValueError(f"port {port} of {host} is in use: {remedy}") from error
