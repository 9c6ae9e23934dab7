"""Machines in one network: each a network namespace with a name, a file of hosts and a disk of its own.

No machine reaches another one over loopback.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from benchmarks.lab import NamespaceCluster, NoNamespaces, namespace_cluster

from detonation.cluster.processes.rendezvous import INTERFACES
from detonation.link_speed import LinkSpeed

SPEED = LinkSpeed.parse("10gbit")
_NEW_MOUNTS, _NEW_NAMES, _NEW_NET = 0x00020000, 0x04000000, 0x40000000
_RECURSIVE_PRIVATE, _BIND = 0x4000 | 1 << 18, 0x1000


@dataclass(frozen=True)
class Network:
    """Machines by name, each with its address such as "192.168.1.10/24".

    interface: The name that the network has on each machine. default_route: Whether machines have one.
    debian: The name of a machine leads to 127.0.1.1 on that machine, not to its address. names: Names
    that all machines know, each with the machine that it leads to.
    """

    machines: Mapping[str, str]
    interface: str = "eth0"
    default_route: bool = False
    debian: bool = True
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Machines:
    """The machines of a network that is up; `folder` has a disk for each, where processes start."""

    network: Network
    cluster: NamespaceCluster
    folder: Path

    def address(self, name: str) -> str:
        """The address of a machine."""
        return self.network.machines[name].partition("/")[0]

    def disk(self, name: str) -> Path:
        """The directory that processes on a machine start in."""
        return self.folder / name

    def enter(self, name: str) -> None:
        """Moves this process, which has no sockets and threads yet, onto a machine."""
        node = [*self.network.machines].index(name)
        with Path("/run/netns", self.cluster.names[node]).open() as namespace:
            _call("setns", namespace.fileno(), _NEW_NET)
        _call("unshare", _NEW_MOUNTS | _NEW_NAMES)
        socket.sethostname(name)
        _call("mount", b"none", b"/", None, _RECURSIVE_PRIVATE, None)
        _call("mount", bytes(self._hosts(name)), b"/etc/hosts", None, _BIND, None)
        os.chdir(self.disk(name))
        for variable in INTERFACES:
            os.environ.pop(variable, None)

    def _hosts(self, name: str) -> Path:
        others = self.network.names.items()
        lines = ["127.0.0.1 localhost"]
        if self.network.debian:
            lines.append(f"127.0.1.1 {name}")
        lines += [f"{self.address(where)} {known}" for known, where in others]
        if not self.network.debian:
            lines.append(f"{self.address(name)} {name}")
        path = self.folder / f"{name}.hosts"
        if not path.exists():
            path.write_text("\n".join(lines) + "\n")
        return path


@contextlib.contextmanager
def machines(network: Network, folder: Path) -> Iterator[Machines]:
    """Brings up the machines of `network`; on leaving, their processes are ended and they are gone.

    Skips the test where nobody can make machines, but never in continuous integration.
    """
    addresses = [*network.machines.values()]
    with contextlib.ExitStack() as stack:
        try:
            made = namespace_cluster(len(addresses), SPEED, addresses, network.interface)
            cluster = stack.enter_context(made)
        except NoNamespaces as error:
            if "CI" in os.environ:
                raise
            pytest.skip(str(error))
        found = Machines(network, cluster, folder)
        for node, name in enumerate(network.machines):
            found.disk(name).mkdir(parents=True)
            if network.default_route:
                route = ["route", "add", "default", "dev", network.interface]
                subprocess.run(["ip", "-n", cluster.names[node], *route], check=True)
        yield found


def _call(name: str, *arguments: object) -> None:
    """Calls a function of the C library; raises `OSError` where it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
