"""Finds the interface of this machine that leads to a host, according to the kernel's routes.

Two processes reach each other over loopback only if they are in the same network namespace of one
machine. If all processes of a group share a namespace, they listen on loopback. Otherwise each
process listens on the interface that leads to the host of the group's store.
"""

import contextlib
import fcntl
import ipaddress
import platform
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "lo"
if sys.platform == "darwin":
    LOOPBACK = "lo0"
_SIOCGIFADDR = 0x8915  # Linux's code of the ioctl that reads an interface's IPv4 address
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
"""Addresses that are reserved for documentation; packets to them use the default route."""
_OF_THE_LINK = "20"
"""Scope number of link-local IPv6 addresses in Linux's table of addresses."""


@dataclass(frozen=True)
class Way:
    """The route from this machine to a host: an interface, and the address of this machine on that
    interface.
    """

    interface: str
    address: str

    def __str__(self) -> str:
        return f"{self.interface} ({self.address})"


def is_loopback(host: str) -> bool:
    """True if `host` is the name or an address of the loopback interface.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("node1")
    (True, True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def loopback_id() -> str:
    """Returns a text that identifies the loopback interface. Processes that share the interface get
    equal texts.
    """
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/net').readlink()}"
    return platform.node()


def way_towards(host: str) -> Way | None:
    """Returns the route to `host`, never over loopback; None if the kernel has no such route. Sends
    no packet.

    If `host` is the machine's own name, it may resolve to loopback, as on Debian. In this case the
    function returns the default route. Without a default route, it returns the route over the only
    interface that has an address.
    """
    if not host:
        return None
    ways = {
        address: name
        for _, name in socket.if_nameindex()
        if name != LOOPBACK
        for address in addresses_of(name)
    }
    for target in (host, *_ELSEWHERE):
        for source in source_addresses(target):
            if source in ways:
                return Way(ways[source], source)
    names = sorted(set(ways.values()))
    if len(names) == 1:
        return way_over(names[0], host)
    return None


def way_over(interface: str, host: str = "") -> Way:
    """Returns the route over `interface`, with an address of the same IP version as `host` if
    possible.
    """
    addresses = addresses_of(interface)
    sources = [*source_addresses(host)]
    if sources:
        addresses.sort(key=lambda address: (":" in address) != (":" in sources[0]))
    return Way(interface, next(iter(addresses), ""))


def find_way(host: str) -> Way | None:
    """Returns the route to `host`, as `way_towards` does. If there is no route, raises a
    `ValueError` that lists the interfaces of this machine.

    Systems other than Linux do not list addresses. On these systems the function may return None;
    the network library then chooses the interface.
    """
    way = way_towards(host)
    if way is None and sys.platform == "linux":
        found = [str(way_over(name)) for _, name in socket.if_nameindex()]
        raise ValueError(
            f"no interface of this machine leads to {host!r}, its interfaces are"
            f" {', '.join(found)}: choose one that the other machines reach, with --interface or"
            " GLOO_SOCKET_IFNAME"
        )
    return way


def listening_address(host: str) -> str:
    """Returns the address on which this machine must listen so that other machines can reach it as
    `host`.

    The machine's own name may resolve to loopback, as on Debian. So the address is loopback only if
    `host` names loopback itself. Raises `OSError` if no host has the name `host`.
    """
    *_, where = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    address = str(where[0])
    if is_loopback(address) and not is_loopback(host):
        way = way_towards(host)
        if way is not None:
            address = way.address
    return address


def listener_at(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Returns a socket that listens on the address `host`; "" means all IPv4 interfaces.

    Raises `OSError` if the socket cannot listen there.
    """
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    return socket.create_server((host, port), family=family, backlog=backlog)


def addresses_of(interface: str) -> list[str]:
    """Returns the IPv4 and IPv6 addresses of an interface, without link-local addresses. The list
    is empty on systems other than Linux.
    """
    found: list[str] = []
    if not interface or sys.platform != "linux":
        return found
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket,
    ):
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        found += [
            socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[0]))
            for line in lines
            if line[-1] == interface and line[3] != _OF_THE_LINK
        ]
    return found


def source_addresses(target: str) -> Iterator[str]:
    """Yields, for each address of the host `target`, the address of this machine from which packets
    to `target` leave.
    """
    with contextlib.suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)
                yield probe.getsockname()[0]
