"""`plan` against runs that others have published: the share of time that computes, and the bytes.

    python -m benchmarks.plan.published_runs

Sizes, steps and links are as published. Nothing is fitted: a row that is off says why.
"""

import argparse
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from detonation.core.schemes.scheme import Scheme, scheme
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import BACKWARD, Cost, Network, Work, cost

NEAR, NEAR_BYTES = 0.05, 0.10
"""Goals: the distance of a utilisation, and the relative distance of bytes."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run.

    Args:
        paper: Its number on arXiv.
        step_s: Seconds of a step without the network.
        reported: The share of time that computes.
        fewer: How many times fewer bytes it sends than full synchronisation in `than`; 0 where it
            does not say.
        why: Why the prediction is off, in words.
    """

    name: str
    paper: str
    parameters: float
    layers: int
    replicas: int
    step_s: float
    scheme: str
    arguments: dict[str, Any]
    link: str
    reported: float
    fewer: float = 0.0
    than: str = "fp32"
    why: str = ""

    @property
    def predicted(self) -> Cost:
        return self._cost(scheme(self.scheme, self.arguments))

    @property
    def utilisation(self) -> float:
        return computing(self.predicted)

    @property
    def hidden(self) -> float:
        """The utilisation if each message were also sent behind the backward pass of one step."""
        found = self.predicted
        every = found.scheme.round.every / found.scheme.fragments
        exposed = max(0.0, found.exposed_s - BACKWARD * self.step_s / every)
        return found.compute_s / (found.compute_s + exposed)

    @property
    def fewer_bytes(self) -> float:
        """How many times fewer bytes than full synchronisation the scheme sends."""
        full = self._cost(scheme("full", {"precision": self.than}))
        return full.bytes_sent / self.predicted.bytes_sent

    @property
    def round_s(self) -> float:
        """Seconds for which a round waits."""
        found = self.predicted
        return found.exposed_s * found.scheme.round.every

    def _cost(self, chosen: Scheme) -> Cost:
        work = of_layers(self.parameters, self.layers, self.step_s)
        return cost(chosen, work, of_link(LinkSpeed.parse(self.link), self.replicas))


def of_layers(parameters: float, layers: int, step_s: float) -> Work:
    """A model of equal layers."""
    each = round(parameters / layers)
    shapes = {f"layers.{number}.weight": (each,) for number in range(layers)}
    return Work([shapes], step_s)


def of_link(speed: LinkSpeed, replicas: int) -> Network:
    """Nodes of one rank with equal links."""
    return Network.of_link_speed(speed, replicas, 1)


def computing(found: Cost) -> float:
    """The share of a step that computes."""
    return found.compute_s / found.total_s


HIDES = "the paper hides a message behind a backward pass, too; `streaming_diloco` does not"
BUCKETS = "the paper hides all gradients behind backward; here the last bucket leaves after it"
INTELLECT = Run(
    "INTELLECT-1: `diloco`, 14 nodes, three continents",
    paper="2412.01152",
    parameters=10e9,
    layers=42,
    replicas=14,
    step_s=38 * 60 / 100,
    scheme="diloco",
    arguments={"every": 100, "precision": "int8"},
    link="500mbit,0ms",
    reported=0.830,
    fewer=400,
    why="500 Mbit/s is the slowest link that it states; its exchanges took 469 s in the median",
)
"""38 minutes of computing per round. Rates were between 500 Mbit/s and 4 Gbit/s, and a ring is as
fast as its slowest link."""
FASTEST = dataclasses.replace(
    INTELLECT,
    name="INTELLECT-1 in the USA alone",
    link="4gbit,0ms",
    reported=0.957,
    fewer=0.0,
    why="4 Gbit/s is the fastest link that it states, so this is an upper bound",
)
COVENANT = Run(
    "Covenant-72B: `sparseloco`, one copy to a store",
    paper="2603.08163",
    parameters=72.7e9,
    layers=80,
    replicas=2,
    step_s=40.0,
    scheme="sparseloco",
    arguments={"every": 30},
    link="110mbit,0ms",
    reported=0.945,
    fewer=146 * 30,
    why="a message needs 145 s at the 110 Mbit/s that it states; it reports 70",
)
"""A peer sends its message once, to a store, as one of two replicas does. 20 minutes per round, 64
of 4,096 coordinates in 2 bits: 146 times fewer bytes in each round than fp32."""
STREAMING = "2501.18512"
TARGETS = 0.50, 0.80, 0.90, 0.95, 0.99
SIMULATED = {
    (1e9, 24, 0.1): {
        "full": (86.8, 152.6, 184.2, 222.3, 569.0),
        "diloco": (1.4, 6.2, 13.3, 23.3, 86.8),
        "streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
        "overlapped": (1.4, 4.3, 6.2, 9.1, 11.0),
        "overlapped, 4bit": (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    (10e9, 48, 0.8): {
        "full": (104.8, 222.3, 222.3, 268.3, 471.5),
        "diloco": (1.7, 7.5, 16.0, 33.9, 104.8),
        "streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
        "overlapped": (1.7, 3.6, 5.2, 6.2, 7.5),
        "overlapped, 4bit": (0.4, 0.9, 1.4, 1.4, 1.7),
    },
    (100e9, 108, 4.9): {
        "full": (184.2, 323.8, 390.7, 390.7, 471.5),
        "diloco": (3.0, 11.0, 23.3, 49.4, 184.2),
        "streaming": (2.4, 6.2, 9.1, 11.0, 19.3),
        "overlapped": (1.7, 3.6, 4.3, 5.2, 5.2),
        "overlapped, 4bit": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}
"""Table 4 of Streaming DiLoCo, a simulation of two sites: by parameters, layers and seconds of a
step, the Gbit/s at which a method first computes for each share of `TARGETS`. Its rates are a grid,
each 1.2 times the one before it."""
DECOUPLED = 104 / 1.7, 198 / 0.84
"""Decoupled DiLoCo (arXiv 2604.21428): how many times lower a rate is sufficient than with full
synchronisation: 1.7 Gbit/s for 104, and among eight sites 0.84 for 198. The summaries that
we have read do not say in which precision and for which share of time, so this is no test."""


def methods(layers: int) -> dict[str, tuple[str, dict[str, Any], str]]:
    """By name, a scheme with its arguments, and why rows are off. A fragment has three layers."""
    rounds = {"every": 100, "precision": "bf16"}
    parts = {**rounds, "fragments": layers // 3}
    return {
        "full": ("full", {"precision": "bf16"}, BUCKETS),
        "diloco": ("diloco", rounds, ""),
        "streaming": ("streaming_diloco", {**parts, "delay": 0}, HIDES),
        "overlapped": ("streaming_diloco", {**parts, "delay": 1}, HIDES),
        "overlapped, 4bit": ("streaming_diloco", {**parts, "delay": 1, "precision": "4bit"}, HIDES),
    }


def simulated() -> Iterator[Run]:
    """The rows of `SIMULATED`: of several shares at one rate the highest."""
    for (parameters, layers, step_s), rates in SIMULATED.items():
        for name, (chosen, arguments, why) in methods(layers).items():
            for rate, target in dict(zip(rates[name], TARGETS, strict=True)).items():
                yield Run(
                    f"Streaming DiLoCo, {parameters / 1e9:.0f}B: {name}",
                    paper=STREAMING,
                    parameters=parameters,
                    layers=layers,
                    replicas=2,
                    step_s=step_s,
                    scheme=chosen,
                    arguments=arguments,
                    link=f"{rate}gbit,0ms",
                    reported=target,
                    than="bf16",
                    why=why,
                )


def over_tokens() -> Iterator[Run]:
    """Table 1 of the same paper: hours of a model of 1B at 1 Gbit/s, and terabytes sent."""
    settings = methods(24)
    for name, hours, fewer in ("full", 109, 0.0), ("overlapped, 4bit", 0.88, 441 / 1.10):
        chosen, arguments, why = settings[name]
        yield Run(
            f"Streaming DiLoCo, 1B at 1 Gbit/s: {name}",
            paper=STREAMING,
            parameters=1e9,
            layers=24,
            replicas=2,
            step_s=0.1,
            scheme=chosen,
            arguments=arguments,
            link="1gbit,0ms",
            reported=0.67 / hours,
            fewer=fewer,
            than="bf16",
            why=why,
        )


def sufficient_rate(share: float, chosen: Scheme, replicas: int) -> float:
    """Bits per second at which a step of 1 s and 1e9 parameters computes for `share` of its time.

    Without latency, the ratio of two such rates is the same for each size and duration of a step.
    """
    work = of_layers(1e9, 48, 1.0)
    low, high = 1e6, 1e14
    while high / low > 1.0001:
        rate = math.sqrt(low * high)
        if computing(cost(chosen, work, of_link(LinkSpeed(rate, 0.0), replicas))) < share:
            low = rate
        else:
            high = rate
    return high


def lower_rate(precision: str, share: float, replicas: int = 8) -> float:
    """How many times lower a rate is sufficient for the 24 fragments of Decoupled DiLoCo.

    A fragment is sent in each step, and arrives two steps later.
    """
    full = scheme("full", {"precision": "bf16"})
    parts = {"every": 24, "fragments": 24, "delay": 2, "precision": precision}
    rates = sufficient_rate(share, full, replicas)
    return rates / sufficient_rate(share, scheme("streaming_diloco", parts), replicas)


def table() -> str:
    """One line per run; of the simulation those that compute for 95 % of the time, and counts."""
    header = (
        "run | arXiv | link | computing, reported | predicted | fewer bytes, reported | predicted"
    )
    lines = [f"| {header} | |", "|---" * 8 + "|"]
    shown = [INTELLECT, FASTEST, COVENANT, *over_tokens()]
    shown += [run for run in simulated() if run.reported == 0.95]
    for run in shown:
        fewer = (f"{run.fewer:,.0f}", f"{run.fewer_bytes:,.0f}") if run.fewer else ("", "")
        shares = f"{run.reported:.1%}", f"{run.utilisation:.1%}"
        link = run.link.split(",")[0]
        cells = [run.name, run.paper, link, *shares, *fewer, _explained(run)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_counts(), "", *_others()])


def is_near(share: float, run: Run) -> bool:
    """True if a share of time is as near to the reported one as the goal says."""
    return abs(share - run.reported) <= NEAR


def _explained(run: Run) -> str:
    if run.why == HIDES and not is_near(run.utilisation, run):
        return f"{run.why}: {run.hidden:.1%} if it did"
    return "" if run.why in (HIDES, BUCKETS) and is_near(run.utilisation, run) else run.why


def _counts() -> Iterator[str]:
    """How many rows of the simulation are near, by method."""
    every = list(simulated())
    for name, (_, _, why) in methods(24).items():
        own = [run for run in every if run.name.endswith(f": {name}")]
        near = sum(is_near(run.utilisation, run) for run in own)
        hidden = sum(is_near(run.hidden, run) for run in own)
        more = f", {hidden} if messages also hid behind a backward pass" if why == HIDES else ""
        yield f"{name}: {near} of {len(own)} within {100 * NEAR:.0f} points{more}"


def _others() -> Iterator[str]:
    """What has no published share of time to compare with."""
    peers = dataclasses.replace(COVENANT, replicas=17)
    yield (
        f"Covenant-72B by an all-gather among {peers.replicas} peers, without a store: "
        f"{peers.utilisation:.0%} computing"
    )
    for precision in ("bf16", "4bit"):
        times = ", ".join(f"{lower_rate(precision, share):,.0f}" for share in TARGETS[2:])
        shares = "for 90, 95 and 99 %"
        yield f"Decoupled DiLoCo in {precision}: {times} times lower rates suffice {shares}"
    reported = " and ".join(f"{times:,.0f}" for times in DECOUPLED)
    yield f"Decoupled DiLoCo reports {reported}, for a share of time that is not known to us"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(table())


if __name__ == "__main__":
    main()
