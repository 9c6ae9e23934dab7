"""A link as it is: delay, jitter, a rate, loss and other people's traffic, made by a process and not by the kernel.

    python -m benchmarks.lab.relay --listen 7000 --to 127.0.0.1:7001 --link 100mbit,20ms --jitter-ms 5 --loss 0.001

`LinkPath` decides when bytes arrive; it is arithmetic on a clock and a seed. Two transports use it. `TcpRelay` stands
between a TCP client and its server on any machine, without root; TCP hides losses, so a loss is a stall. Ranks of gloo
find each other at addresses of their own, where no relay stands: for them `relayed_cluster` of
benchmarks/lab/relayed_nodes.py makes network namespaces whose only way out is a relay of IP packets.
"""

import argparse
import contextlib
import random
import socket
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

PACKET = 1500
"""Bytes of a packet by default: of the device's largest, and of a piece that is lost or not."""
PIECE = 16 * PACKET
"""Bytes that a TCP relay takes at once."""


@dataclass(frozen=True)
class Conditions:
    """What a path does to the bytes on it, in each direction on its own.

    Args:
        rate_bits_per_s: Above 0.
        latency_s: One way.
        jitter_s: Each piece is late by up to this much more, evenly spread; the order stays.
        loss: Share of the packets that are lost, from 0 to below 1.
        stall_s: Seconds until a lost packet has come again, where a loss is a stall.
        competing: Share of the rate that bursts of others take on average, from 0 to below 1.
        burst_bytes: Of such a burst.
        queue_s: Seconds that bytes may wait for their turn; a packet beyond is dropped, and TCP is held back.
        packet_bytes: Of the largest packet.
        seed: Of jitter, losses and bursts.

    Raises:
        ValueError: A value is out of range.
    """

    rate_bits_per_s: float
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    stall_s: float = 0.2
    competing: float = 0.0
    burst_bytes: int = 64_000
    queue_s: float = 0.2
    packet_bytes: int = PACKET
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate_bits_per_s > 0:
            raise ValueError(f"rate_bits_per_s is {self.rate_bits_per_s}, must be above 0")
        for name in ("loss", "competing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be from 0 to below 1")
        for name in ("latency_s", "jitter_s", "stall_s", "queue_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 0")
        if self.burst_bytes < 1:
            raise ValueError(f"burst_bytes is {self.burst_bytes}, must be at least 1")

    @classmethod
    def of(cls, link: str, **others: Any) -> "Conditions":
        """The conditions of a link as `LinkSpeed.parse` reads it, such as "100mbit,5ms", and `others`."""
        from detonation.link_speed import (
            LinkSpeed,
        )  # imports torch, which a relay's process does without

        speed = LinkSpeed.parse(link)
        return cls(speed.rate_bits_per_s, speed.latency_s, **others)


class LinkPath:
    """One direction of a link: when do bytes arrive that are sent now? Equal seeds, sizes and times have equal answers.

    Args:
        direction: Tells the two directions of a link, and the links of nodes, apart.
        began: The time on the caller's clock from which others send.

    Example:
        >>> path = LinkPath(Conditions(8e6, 0.01))
        >>> path.arrival(1000, now=0.0), path.arrival(1000, now=0.0), path.waits(now=0.0)
        (0.011, 0.012, 0.002)
    """

    def __init__(self, conditions: Conditions, direction: int = 0, began: float = 0.0) -> None:
        self.conditions = conditions
        self._draws, self._others = (
            random.Random(f"{conditions.seed}:{direction}:{what}") for what in ("own", "others")
        )
        self._free_at, self._latest, self._burst_at = began, began, began
        self._next_burst()

    def waits(self, now: float) -> float:
        """Seconds until a byte that comes now would leave."""
        self._compete(now)
        return max(0.0, self._free_at - now)

    def arrival(self, nbytes: int, now: float, stall: bool = False) -> float:
        """When the last of `nbytes` that are sent now arrives, never before those sent earlier.

        stall: Whether some of them are lost and sent again.
        """
        self._compete(now)
        self._free_at = max(now, self._free_at) + 8 * nbytes / self.conditions.rate_bits_per_s
        late = self.conditions.latency_s + self.conditions.jitter_s * self._draws.random()
        self._latest = max(self._latest, self._free_at + late + self.conditions.stall_s * stall)
        return self._latest

    def loses(self, nbytes: int) -> bool:
        """Whether one of the packets of `nbytes` is lost."""
        packets = -(-nbytes // self.conditions.packet_bytes)
        return self._draws.random() < 1 - (1 - self.conditions.loss) ** packets

    def _compete(self, now: float) -> None:
        """Lets the bursts pass that have come until now."""
        while self.conditions.competing and self._burst_at <= now:
            taken = 8 * self.conditions.burst_bytes / self.conditions.rate_bits_per_s
            self._free_at = max(self._free_at, self._burst_at) + taken
            self._next_burst()

    def _next_burst(self) -> None:
        if self.conditions.competing:
            taken = 8 * self.conditions.burst_bytes / self.conditions.rate_bits_per_s
            self._burst_at += self._others.expovariate(self.conditions.competing / taken)


class TcpRelay:
    """A server on loopback that passes each connection on to `target`; all connections share the two paths.

    Use as a context manager; `address` is where clients connect. On leaving, open connections end.

    Raises:
        OSError: Nothing can listen at `port`.
    """

    def __init__(self, target: tuple[str, int], conditions: Conditions, port: int = 0) -> None:
        self._target, self._conditions = target, conditions
        began = time.monotonic()
        self._paths = [LinkPath(conditions, direction, began) for direction in (0, 1)]
        self._locks = [threading.Lock(), threading.Lock()]
        self._listening = socket.create_server(("127.0.0.1", port))
        self._open: set[socket.socket] = set()
        self._ending = False

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._listening.getsockname()
        return host, port

    def __enter__(self) -> "TcpRelay":
        threading.Thread(target=self._accept, daemon=True, name="relay").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        with contextlib.suppress(OSError):  # wakes `accept` up, which closing alone does not
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for each in list(self._open):
            _end(each, socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._ending:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.add(each)
            left = [2]
            for direction, (source, sink) in enumerate(((client, server), (server, client))):
                arriving: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                pair = (source, sink, arriving)
                threading.Thread(
                    target=self._take, args=(direction, source, arriving), daemon=True
                ).start()
                threading.Thread(target=self._give, args=(*pair, left), daemon=True).start()

    def _take(
        self, direction: int, source: socket.socket, arriving: "SimpleQueue[tuple[float, bytes]]"
    ) -> None:
        """Reads what a side sends, no faster than the path takes it."""
        path = self._paths[direction]
        data = b"-"
        while data:
            try:
                data = source.recv(PIECE)
            except OSError:
                data = b""
            with self._locks[direction]:
                now = time.monotonic()
                arrives = path.arrival(len(data), now, stall=bool(data) and path.loses(len(data)))
                waits = path.waits(now)
            arriving.put((arrives, data))
            _sleep_until(now + waits - self._conditions.queue_s)

    def _give(
        self,
        source: socket.socket,
        sink: socket.socket,
        arriving: "SimpleQueue[tuple[float, bytes]]",
        left: list[int],
    ) -> None:
        """Passes on what has arrived; nothing is the end of what the side sends."""
        while True:
            arrives, data = arriving.get()
            _sleep_until(arrives)
            try:
                if not data:
                    break
                sink.sendall(data)
            except OSError:
                _end(source, socket.SHUT_RD)
                break
        _end(sink, socket.SHUT_WR)
        left[0] -= 1
        if not left[0]:
            for each in (source, sink):
                self._open.discard(each)
                each.close()


def _end(one: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(how)


def _sleep_until(moment: float) -> None:
    """Waits until a moment of the monotonic clock, never less."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--listen", type=int, default=0, help="port on loopback; any free one by default"
    )
    parser.add_argument("--to", help="host and port of the server, as in 127.0.0.1:7001")
    parser.add_argument("--link", default="100mbit,20ms", help="rate and one-way latency")
    parser.add_argument("--jitter-ms", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets")
    parser.add_argument(
        "--competing", type=float, default=0.0, help="share of the rate that others take"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.to:
        parser.error(
            "--to is missing: the server that the relay stands before, as in 127.0.0.1:7001"
        )
    host, _, port = args.to.rpartition(":")
    rough = {
        "jitter_s": args.jitter_ms / 1e3,
        "loss": args.loss,
        "competing": args.competing,
        "seed": args.seed,
    }
    conditions = Conditions.of(args.link, **rough)
    with (
        TcpRelay((host, int(port)), conditions, args.listen) as relay,
        contextlib.suppress(KeyboardInterrupt),
    ):
        print(f"{':'.join(map(str, relay.address))} to {args.to}: {conditions}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
