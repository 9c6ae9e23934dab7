"""The process of benchmarks/lab/relayed_nodes.py that passes packets on: no torch, so that it starts at once."""

import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import socket
import struct
import sys
import time

from relay import Conditions, LinkPath

_CLONE_NEWNET, _SET_INTERFACE, _TUN_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1001


def relay_packets(nodes: list[tuple[str, str]], conditions: Conditions, interface: str) -> None:
    """Passes IP packets on between nodes until standard input ends, as it does when the parent is gone.

    nodes: The file of each one's namespace, and its address. interface: The name of the device in each.
    """
    devices = [_device(namespace, interface) for namespace, _ in nodes]
    print("ready", flush=True)
    began = time.monotonic()
    paths = [LinkPath(conditions, node, began) for node in range(len(nodes))]
    addresses = {socket.inet_aton(address): node for node, (_, address) in enumerate(nodes)}
    arriving: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        timeout = max(0.0, arriving[0][0] - time.monotonic()) if arriving else None
        readable, _, _ = select.select([*devices, sys.stdin], [], [], timeout)
        if sys.stdin in readable:
            return
        for node, device in enumerate(devices):
            if device in readable:
                packet, now = os.read(device, 65536), time.monotonic()
                to = addresses.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if to is None or paths[node].waits(now) > conditions.queue_s:
                    continue
                arrives, count = paths[node].arrival(len(packet), now), count + 1
                if not paths[node].loses(len(packet)):
                    heapq.heappush(arriving, (arrives, count, to, packet))
        while arriving and arriving[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(arriving)
            with contextlib.suppress(OSError):  # the device is not up yet, or full
                os.write(devices[to], packet)


def _device(namespace: str, interface: str) -> int:
    """Makes an interface in a namespace; the packets that it sends can be read from the descriptor."""
    in_namespace, before = (
        os.open(namespace, os.O_RDONLY),
        os.open("/proc/self/ns/net", os.O_RDONLY),
    )
    system = ctypes.CDLL(None, use_errno=True)

    def enter(descriptor: int) -> None:
        if system.setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)

    enter(in_namespace)
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(
        device, _SET_INTERFACE, struct.pack("16sH22x", interface.encode(), _TUN_WITHOUT_HEADER)
    )
    enter(before)
    os.close(in_namespace)
    os.close(before)
    return device


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    relay_packets(given["nodes"], Conditions(**given["conditions"]), given["interface"])
