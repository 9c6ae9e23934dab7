"""Nodes that are network namespaces of this machine, joined by links that the kernel slows down. Needs root."""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from detonation.cluster.processes.rendezvous import INTERFACES
from detonation.link_speed import LinkSpeed

INTERFACE = "eth0"
"""Each node's end of its link; the sockets of its ranks keep to this interface."""
FRAME_BYTES = 66
"""The headers of Ethernet (14), IPv4 (20) and TCP with time stamps (32) before the data of a frame."""

_PREFIX, _NAMES = "detonation", Path("/run/netns")
_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
_CLONE_NEWNET = 0x40000000
_QUEUE_BYTES = 16_000_000
_ENDING_S = 10.0
"""How long killed processes may take to be gone; then their namespace loses its name all the same."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NoNamespaces(ValueError):
    """This machine, or this user, cannot make network namespaces."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no namespaces here: {reason}")


@dataclass(frozen=True)
class Counters:
    """The kernel's counts at a node's end of its link, in both directions, with the headers of frames.

    A frame is as long as the kernel hands over in one piece; on a fast link that may be many frames of a real network.
    """

    sent_bytes: int
    sent_frames: int
    received_bytes: int
    received_frames: int

    @property
    def sent_data_bytes(self) -> int:
        """The bytes sent without headers: the messages, and the little that the ranks exchange beside them."""
        return self.sent_bytes - FRAME_BYTES * self.sent_frames

    def since(self, before: "Counters") -> "Counters":
        """The difference to the earlier counts `before`."""
        return Counters(
            *(getattr(self, name) - getattr(before, name) for name in Counters.__match_args__)
        )


@dataclass(frozen=True)
class NamespaceCluster:
    """Nodes in the namespaces `names`, each with one link to a switch in the namespace `switch`.

    addresses: Of the nodes on their links, as "10.77.0.1/16". interface: The name of each node's end.
    """

    names: tuple[str, ...]
    switch: str
    addresses: tuple[str, ...]
    interface: str = INTERFACE

    def address(self, node: int) -> str:
        """The address of a node on its link."""
        return self.addresses[node].partition("/")[0]

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in a node, such as torchrun with --master-addr `address(0)`."""
        return ["ip", "netns", "exec", self.names[node], *command]

    def enter(self, node: int) -> None:
        """Moves this process into a node and its network library onto the link.

        Call it before the process has sockets and threads: existing ones stay outside.
        """
        descriptor = os.open(_NAMES / self.names[node], os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self.names[node])
        finally:
            os.close(descriptor)
        os.environ.update(dict.fromkeys(INTERFACES, self.interface))

    def shape(self, speed: LinkSpeed) -> None:
        """Limits sending and receiving of each node to the rate of `speed`, from now on.

        After a pause the bytes of up to a millisecond pass unshaped: the token bucket must hold a few frames, and all
        that leaves between two wake-ups of a busy processor.
        """
        burst = max(5000, int(speed.rate_bits_per_s / 8e3))
        rule = f"root tbf rate {speed.rate_bits_per_s:.0f}bit burst {burst} limit {_QUEUE_BYTES}".split()
        for node, name in enumerate(self.names):
            _do("tc", "-n", name, "qdisc", "replace", "dev", self.interface, *rule)
            _do("tc", "-n", self.switch, "qdisc", "replace", "dev", _port(node), *rule)

    def counters(self, node: int) -> Counters:
        """The counts of a node's link so far."""
        shown = json.loads(
            _do("ip", "-n", self.names[node], "-j", "-s", "link", "show", "dev", self.interface)
        )
        tx, rx = (shown[0]["stats64"][way] for way in ("tx", "rx"))
        return Counters(tx["bytes"], tx["packets"], rx["bytes"], rx["packets"])


@contextmanager
def namespace_cluster(
    nodes: int, speed: LinkSpeed, addresses: Sequence[str] = (), interface: str = INTERFACE
) -> Iterator[NamespaceCluster]:
    """Makes `nodes` nodes whose links have `speed`. On leaving, all processes in them are ended and they are removed.

    `addresses` and `interface` are those of `NamespaceCluster`.

    Ctrl-C, SIGTERM (as `SystemExit`, unless code within handles it) and SIGHUP leave it too. The namespaces of a
    process that was killed are removed by the next use.

    Raises:
        NoNamespaces: this machine or this user cannot make them.
    """
    require_namespaces(speed)
    _remove(_stale())
    prefix = f"{_PREFIX}-{os.getpid()}"
    cluster = NamespaceCluster(
        tuple(f"{prefix}-{node}" for node in range(nodes)),
        f"{prefix}-switch",
        tuple(addresses) or tuple(f"10.77.{n // 250}.{n % 250 + 1}/16" for n in range(nodes)),
        interface,
    )
    with _signals_raise():
        try:
            _build(cluster)
            cluster.shape(speed)
            yield cluster
        finally:
            before = signal.pthread_sigmask(
                signal.SIG_BLOCK, _ENDING
            )  # the commands of `_remove` inherit it
            _remove((*cluster.names, cluster.switch))
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def require_namespaces(speed: LinkSpeed) -> None:
    """Raises `NoNamespaces` where this process cannot make namespaces with such links."""
    if sys.platform != "linux":
        raise NoNamespaces("network namespaces are Linux's")
    if os.geteuid() != 0:
        raise NoNamespaces("network namespaces need root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NoNamespaces(
            f"{' and '.join(missing)} not found (Debian's package iproute2 has them)"
        )
    if speed.latency_s:
        raise NoNamespaces(
            f"its links have a rate and no latency to set, and the link is {str(speed)!r}"
        )


def _build(cluster: NamespaceCluster) -> None:
    _do("ip", "netns", "add", cluster.switch)
    _do("ip", "-n", cluster.switch, "link", "add", "bridge", "type", "bridge")
    _do("ip", "-n", cluster.switch, "link", "set", "bridge", "up")
    for node, name in enumerate(cluster.names):
        port = _port(node)
        _do("ip", "netns", "add", name)
        _do("ip", "-n", name, "link", "set", "lo", "up")  # between the ranks of a node
        # The machine's default may measure the link and keep below its rate; reno fills any link, and is everywhere.
        _do("ip", "netns", "exec", name, "sh", "-c", f"echo reno > {_CONTROL}")
        peer = ["type", "veth", "peer", "name", cluster.interface, "netns", name]
        _do("ip", "-n", cluster.switch, "link", "add", port, *peer)
        _do("ip", "-n", cluster.switch, "link", "set", port, "master", "bridge", "up")
        address = ["address", "add", cluster.addresses[node], "dev", cluster.interface]
        _do("ip", "-n", name, *address, *["nodad"] * (":" in cluster.addresses[node]))
        _do("ip", "-n", name, "link", "set", cluster.interface, "up")


def _port(node: int) -> str:
    return f"port{node}"


def _do(*command: str) -> str:
    """Runs `command` and returns its output. Raises `NoNamespaces` with the first line of its errors."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        error = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[0]
        raise NoNamespaces(f"`{' '.join(command)}` says {error!r}")
    return ended.stdout


def _stale() -> list[str]:
    """Namespaces whose process is gone."""
    found = []
    for path in _NAMES.glob(f"{_PREFIX}-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            found.append(path.name)
    return found


def _remove(names: Sequence[str]) -> None:
    """Ends all processes in these namespaces, and removes those that exist."""
    existing = [name for name in names if (_NAMES / name).exists()]
    deadline = time.monotonic() + _ENDING_S
    while (
        pids := _pids(existing)
    ) and time.monotonic() < deadline:  # again: some may just have started others
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for name in existing:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _pids(names: Sequence[str]) -> set[int]:
    """The processes in these namespaces, except this process."""
    listed = [
        subprocess.run(["ip", "netns", "pids", name], capture_output=True, check=False).stdout
        for name in names
    ]
    return {int(pid) for pids in listed for pid in pids.split()} - {os.getpid()}


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into exceptions, like Ctrl-C: a process that a signal ends runs no `finally`.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    handled = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    try:
        before = {number: signal.signal(number, end) for number in handled}
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
