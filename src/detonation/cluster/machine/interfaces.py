"""The network interfaces of this machine: their addresses, and which of them leads to another machine."""

import contextlib
import fcntl
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_SIOCGIFADDR = 0x8915  # Linux
_ELSEWHERE = "192.0.2.1"
"""An address of documentation, which no machine has: the route towards it is the default route."""


def interface_towards(address: str) -> str:
    """The interface over which this machine reaches the host `address`; "" where that is unknown. Sends nothing.

    Where the host leads to loopback, as the machine's own name does on some systems, it is that of the default route.
    """
    for target in (address, _ELSEWHERE) if address else ():
        for source in _source_addresses(target):
            for _, name in socket.if_nameindex():
                if name != LOOPBACK and source in addresses_of(name):
                    return name
    return ""


def addresses_of(interface: str) -> list[str]:
    """The IPv4 address and the IPv6 addresses of an interface; none on a system other than Linux."""
    return list(_addresses(interface)) if interface and sys.platform == "linux" else []


def _addresses(interface: str) -> Iterator[str]:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        yield socket.inet_ntoa(found[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if name == interface:
                yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _source_addresses(target: str) -> Iterator[str]:
    """The address of this machine from which a datagram to each address of `target` would leave."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)
                yield probe.getsockname()[0]


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of "HOST:PORT"; an IPv6 address stands in brackets.

    Raises:
        ValueError: It is no such address.

    Example:
        >>> host_and_port("10.10.0.1:7000"), host_and_port("[::1]:7000")
        (('10.10.0.1', 7000), ('::1', 7000))
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"the address is {address!r}, must be HOST:PORT such as 127.0.0.1:7000")
    return host, int(port)
