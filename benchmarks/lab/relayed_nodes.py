"""Nodes in network namespaces whose packets pass a relay: a link as it is, between the ranks of any backend.

Like benchmarks/lab, but the links have latency, jitter, losses and other traffic
(benchmarks/lab/relay.py). A lost packet is lost, and the kernel's TCP reacts to it. Needs root and
/dev/net/tun, and no netem.

    sudo python -m benchmarks.lab.relayed_nodes --link 100mbit,20ms --jitter-ms 5 --loss 0.001 --competing 0.2

prints the step times of the schemes of benchmarks/plan/namespaces.py over such a link, with what
the bytes alone would take.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import lab
from benchmarks.lab import Counters, NamespaceCluster, NoNamespaces, require_namespaces
from benchmarks.lab.relay import Conditions
from benchmarks.plan.namespaces import RECIPE, SCHEMES, SETS, Subject, Training

from detonation.link_speed import LinkSpeed

_ETHERNET = 14


class RelayedCluster(NamespaceCluster):
    """Nodes in namespaces whose packets all pass a relay. Its conditions do not change."""

    def shape(self, speed: LinkSpeed) -> None:
        raise ValueError(
            f"a relay has its conditions from the beginning, and cannot change to {speed}"
        )

    def counters(self, node: int) -> Counters:
        """The counts of packets as those of frames: a device of packets has no header of Ethernet, and counts none."""
        found = super().counters(node)
        sent = found.sent_bytes + _ETHERNET * found.sent_frames
        received = found.received_bytes + _ETHERNET * found.received_frames
        return Counters(sent, found.sent_frames, received, found.received_frames)


@contextlib.contextmanager
def relayed_cluster(nodes: int, conditions: Conditions) -> Iterator[RelayedCluster]:
    """Makes `nodes` nodes, each with a path of its own into a network without limits. They are removed on leaving.

    Raises:
        NoNamespaces: This machine or this user cannot make them.
    """
    require_namespaces(LinkSpeed(float("inf")))
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        raise NoNamespaces("a relay of packets needs /dev/net/tun")
    lab._remove(lab._stale())
    names = tuple(f"{lab._PREFIX}-{os.getpid()}-{node}" for node in range(nodes))
    addresses = tuple(f"10.77.{n // 250}.{n % 250 + 1}/16" for n in range(nodes))
    cluster = RelayedCluster(names, "", addresses)
    relay: subprocess.Popen[str] | None = None
    with lab._signals_raise():
        try:
            for name in cluster.names:
                lab._do("ip", "netns", "add", name)
                lab._do("ip", "-n", name, "link", "set", "lo", "up")
                lab._do(
                    "ip", "netns", "exec", name, "sh", "-c", f"echo reno > {lab._CONTROL}"
                )  # as in lab.py
            nodes_of_relay = [
                (str(lab._NAMES / name), cluster.address(node))
                for node, name in enumerate(cluster.names)
            ]
            asked = json.dumps(
                {
                    "nodes": nodes_of_relay,
                    "conditions": asdict(conditions),
                    "interface": lab.INTERFACE,
                }
            )
            command = [sys.executable, str(Path(__file__).with_name("packet_relay.py")), asked]
            relay = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert relay.stdout
            if relay.stdout.readline() != "ready\n":
                raise NoNamespaces("the relay of packets did not start; its error is above")
            for node, name in enumerate(cluster.names):
                lab._do(
                    "ip",
                    "-n",
                    name,
                    "address",
                    "add",
                    f"{cluster.address(node)}/16",
                    "dev",
                    lab.INTERFACE,
                )
                lab._do(
                    "ip",
                    "-n",
                    name,
                    "link",
                    "set",
                    lab.INTERFACE,
                    "mtu",
                    str(conditions.packet_bytes),
                    "up",
                )
            yield cluster
        finally:
            if relay:
                relay.kill()
                relay.communicate()
            lab._remove(cluster.names)


def _time(
    conditions: Conditions, schemes: list[str], turns: int, cluster: RelayedCluster
) -> list[list[str]]:
    """The lines of this rank's table: each scheme's steps, which take turns."""
    import detonation as dt

    mesh = dt.init_mesh(len(cluster.names), 1, "cpu")
    speed = LinkSpeed(conditions.rate_bits_per_s, conditions.latency_s)
    subjects = [Subject(name, RECIPE, (*SETS.split(), *SCHEMES[name].split())) for name in schemes]
    trainings = [Training(each, mesh) for each in subjects]
    timed: dict[str, list[Any]] = {name: [] for name in schemes}
    for _ in range(turns):
        for each in trainings:
            timed[each.subject.name].append(each.timed(speed, cluster))
    lines = []
    for name, found in timed.items():
        seconds, sent, data, _ = zip(*found, strict=True)
        cells = (
            statistics.median(seconds),
            min(seconds),
            max(seconds),
            speed.seconds(statistics.fmean(sent), 0),
        )
        lines.append(
            [
                name,
                *(f"{each:.3f}" for each in cells),
                f"{statistics.fmean(data) / statistics.fmean(sent):.3f}",
            ]
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", default="100mbit,20ms", help="rate and one-way latency")
    parser.add_argument("--jitter-ms", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets")
    parser.add_argument(
        "--competing", type=float, default=0.0, help="share of the rate that others take"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9, help="steps of each scheme")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    args = parser.parse_args()
    import torch

    from detonation.cluster.launch import run_local

    torch.set_num_threads(1)  # before the ranks are forked
    rough = {
        "jitter_s": args.jitter_ms / 1e3,
        "loss": args.loss,
        "competing": args.competing,
        "seed": args.seed,
    }
    conditions = Conditions.of(args.link, **rough)
    with relayed_cluster(args.nodes, conditions) as cluster:
        given = [conditions, args.schemes, args.turns, cluster]
        lines = run_local(_time, args.nodes, given, enter=cluster.enter)[0]
    print(
        "| scheme | median s | min | max | its bytes alone, s | bytes by the kernel / by the link |"
    )
    print("|---|---|---|---|---|---|")
    for line in lines:
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
