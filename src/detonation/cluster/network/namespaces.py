"""Lab: nodes that are network namespaces of this machine, joined by links that the kernel slows down; needs root."""

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
from detonation.core.link.link_speed import Pace

INTERFACE = "eth0"
"""Each node's end of its link; its ranks' sockets keep to it."""
FRAME_BYTES = 66
"""What Ethernet (14), IPv4 (20) and TCP with time stamps (32) put in front of the data of a frame."""

_PREFIX, _NAMES = "detonation", Path("/run/netns")
_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
_CLONE_NEWNET = 0x40000000
_QUEUE_BYTES = 16_000_000
_ENDING_S = 10.0
"""How long a process that was killed may take to be gone, before its namespace goes nameless."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class NoLab(ValueError):
    """This machine, or this user, cannot have a lab."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no lab here: {reason}. Use --link alone: it emulates the link on any system, without root")


@dataclass(frozen=True)
class Counters:
    """What the kernel has counted at a node's end of its link, in both directions, with the headers of frames.

    A frame is what the kernel hands over in one piece, which on a fast link may be many of those on a real wire.
    """

    sent_bytes: int
    sent_frames: int
    received_bytes: int
    received_frames: int

    @property
    def sent_data_bytes(self) -> int:
        """What was sent without the headers: the messages, and what little else the ranks say to each other."""
        return self.sent_bytes - FRAME_BYTES * self.sent_frames

    def since(self, before: "Counters") -> "Counters":
        """What has been counted since `before`."""
        return Counters(*(getattr(self, name) - getattr(before, name) for name in Counters.__match_args__))


@dataclass(frozen=True)
class Lab:
    """Nodes in namespaces called `names`, each with one link to a switch in a namespace of its own, `switch`."""

    names: tuple[str, ...]
    switch: str

    def address(self, node: int) -> str:
        """The address of a node on the link."""
        return f"10.77.{node // 250}.{node % 250 + 1}"

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in a node: torchrun, say, with --master-addr `address(0)`."""
        return ["ip", "netns", "exec", self.names[node], *command]

    def enter(self, node: int) -> None:
        """Puts this process into a node, the sockets of its network library on the link.

        Before it has sockets and threads: those that it has stay outside.
        """
        descriptor = os.open(_NAMES / self.names[node], os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self.names[node])
        finally:
            os.close(descriptor)
        os.environ.update(dict.fromkeys(INTERFACES, INTERFACE))

    def shape(self, pace: Pace) -> None:
        """Lets no node send or receive faster than the rate of `pace`, from here on.

        Up to a millisecond's worth of bytes passes unshaped after a pause: a bucket of tokens cannot be smaller than a
        few frames, nor than what leaves between two looks of a busy processor.
        """
        burst = max(5000, int(pace.rate_bits_per_s / 8e3))
        rule = [
            "root",
            "tbf",
            "rate",
            f"{pace.rate_bits_per_s:.0f}bit",
            "burst",
            f"{burst}",
            "limit",
            f"{_QUEUE_BYTES}",
        ]
        for node, name in enumerate(self.names):
            _do("tc", "-n", name, "qdisc", "replace", "dev", INTERFACE, *rule)
            _do("tc", "-n", self.switch, "qdisc", "replace", "dev", _port(node), *rule)

    def counters(self, node: int) -> Counters:
        """What has been counted at a node's link so far."""
        shown = json.loads(_do("ip", "-n", self.names[node], "-j", "-s", "link", "show", "dev", INTERFACE))
        tx, rx = (shown[0]["stats64"][way] for way in ("tx", "rx"))
        return Counters(tx["bytes"], tx["packets"], rx["bytes"], rx["packets"])


@contextmanager
def lab(nodes: int, pace: Pace) -> Iterator[Lab]:
    """A lab of `nodes` nodes whose links have `pace`. When it ends, however it does, all in it ends, too.

    So it does on Ctrl-C, SIGTERM (then `SystemExit`, unless something within deals with it) and SIGHUP. What a process
    that was killed has left behind is removed when the next lab begins. Raises `NoLab` where there cannot be one.
    """
    check(pace)
    _remove(_stale())
    made = Lab(tuple(f"{_PREFIX}-{os.getpid()}-{node}" for node in range(nodes)), f"{_PREFIX}-{os.getpid()}-switch")
    with _signals_raise():
        try:
            _build(made)
            made.shape(pace)
            yield made
        finally:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # the commands of `_remove` inherit it
            _remove((*made.names, made.switch))
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def check(pace: Pace) -> None:
    """Raises `NoLab`, which says why and what to do instead, where this process cannot have a lab of such links."""
    if sys.platform != "linux":
        raise NoLab("network namespaces are Linux's")
    if os.geteuid() != 0:
        raise NoLab("network namespaces need root")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NoLab(f"{' and '.join(missing)} not found (Debian's package iproute2 has them)")
    if pace.latency_s:
        raise NoLab(f"its links have a rate and no latency to set, and the link is {str(pace)!r}")


def _build(made: Lab) -> None:
    _do("ip", "netns", "add", made.switch)
    _do("ip", "-n", made.switch, "link", "add", "bridge", "type", "bridge")
    _do("ip", "-n", made.switch, "link", "set", "bridge", "up")
    for node, name in enumerate(made.names):
        port = _port(node)
        _do("ip", "netns", "add", name)
        _do("ip", "-n", name, "link", "set", "lo", "up")  # the ranks of a node talk over it
        # A machine's own choice may be one that measures the link and keeps below it; this one fills any, everywhere.
        _do("ip", "netns", "exec", name, "sh", "-c", f"echo reno > {_CONTROL}")
        peer = ["type", "veth", "peer", "name", INTERFACE, "netns", name]
        _do("ip", "-n", made.switch, "link", "add", port, *peer)
        _do("ip", "-n", made.switch, "link", "set", port, "master", "bridge", "up")
        _do("ip", "-n", name, "address", "add", f"{made.address(node)}/16", "dev", INTERFACE)
        _do("ip", "-n", name, "link", "set", INTERFACE, "up")


def _port(node: int) -> str:
    return f"port{node}"


def _do(*command: str) -> str:
    """What `command` prints. Raises `NoLab` with its complaint."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        complaint = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise NoLab(f"`{' '.join(command)}` says {complaint!r}")
    return done.stdout


def _stale() -> list[str]:
    """Namespaces of labs whose process is gone."""
    found = []
    for path in _NAMES.glob(f"{_PREFIX}-*-*"):
        pid = path.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            found.append(path.name)
    return found


def _remove(names: Sequence[str]) -> None:
    """Ends all processes in these namespaces and removes them, those that are there."""
    there = [name for name in names if (_NAMES / name).exists()]
    limit = time.monotonic() + _ENDING_S
    while (pids := _pids(there)) and time.monotonic() < limit:  # again: some may just have started others
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for name in there:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _pids(names: Sequence[str]) -> set[int]:
    """The processes in these namespaces, but for this one."""
    listed = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, check=False).stdout for name in names]
    return {int(pid) for pids in listed for pid in pids.split()} - {os.getpid()}


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP are exceptions, as Ctrl-C is one: a process that they end runs no `finally`.

    One that is ignored, as SIGHUP is under nohup, stays so.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    try:
        before = {number: signal.signal(number, end) for number in heard}
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
