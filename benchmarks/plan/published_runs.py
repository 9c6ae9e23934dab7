"""`plan` against runs that others have published: the share of time that computes, and the bytes.

    python -m benchmarks.plan.published_runs

Sizes, steps and links are as published. Nothing is fitted: a row that is off says why.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

from detonation.core.schemes.scheme import scheme
from detonation.link_speed import LinkSpeed
from detonation.plan.cost import BACKWARD, Cost, Network, Work, cost

NEAR, NEAR_BYTES = 0.05, 0.10
"""Goals: the distance of a utilisation, and the relative distance of bytes."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run.

    Args:
        step_s: Seconds of a step without the network.
        reported: The share of time that computes.
        fewer: How many times fewer bytes it sends than full synchronisation in `than`; 0 where it
            does not say.
        why: Why the prediction is off, in words.
    """

    name: str
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
        found = self.predicted
        return found.compute_s / found.total_s

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

    def _cost(self, chosen: Any) -> Cost:
        each = round(self.parameters / self.layers)
        shapes = {f"layers.{number}.weight": (each,) for number in range(self.layers)}
        network = Network.of_link_speed(LinkSpeed.parse(self.link), self.replicas, 1)
        return cost(chosen, Work([shapes], self.step_s), network)


HIDES = "the paper hides a message behind a backward pass, too; `streaming_diloco` does not"
BUCKETS = "the paper hides all gradients behind backward; here the last bucket leaves after it"
INTELLECT = Run(
    "INTELLECT-1: `diloco`, 14 nodes",
    *(10e9, 42, 14, 22.8, "diloco", {"every": 100, "precision": "int8"}, "360mbit,0ms"),
    reported=36.2 / 43.3,
    fewer=400,
    why="its links are not stated; the rate is what its 7 minutes per exchange say",
)
COVENANT = Run(
    "Covenant-72B: `sparseloco`",
    *(72e9, 80, 2, 40.0, "sparseloco", {"every": 30}, "110mbit,0ms"),
    reported=0.945,
    fewer=4 / 0.0009,
    why="a peer sends one copy to a store, as two replicas do: 145 s at 110 Mbit/s; it reports 70",
)
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
"""Table 4 of Streaming DiLoCo (arXiv 2501.18512), a simulation of two sites: by parameters, layers
and seconds of a step, the Gbit/s at which a method first computes for each share of `TARGETS`. Its
rates are a grid, each 1.2 times the one before it."""


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
                    *(parameters, layers, 2, step_s, chosen, arguments, f"{rate}gbit,0ms"),
                    reported=target,
                    fewer=0.0,
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
            *(1e9, 24, 2, 0.1, chosen, arguments, "1gbit,0ms"),
            reported=0.67 / hours,
            fewer=fewer,
            than="bf16",
            why=why,
        )


def table() -> str:
    """One line per run; of the simulation those that compute for 95 % of the time, and counts."""
    lines = [
        "| run | link | computing, reported | predicted | fewer bytes, reported | predicted | |",
        "|---" * 7 + "|",
    ]
    shown = [INTELLECT, COVENANT, *over_tokens()]
    shown += [run for run in simulated() if run.reported == 0.95]
    for run in shown:
        fewer = (f"{run.fewer:,.0f}", f"{run.fewer_bytes:,.0f}") if run.fewer else ("", "")
        shares = f"{run.reported:.1%}", f"{run.utilisation:.1%}"
        cells = [run.name, run.link.split(",")[0], *shares, *fewer, _explained(run)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_counts()])


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


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(table())


if __name__ == "__main__":
    main()
