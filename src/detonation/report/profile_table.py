"""A measured cluster profile as a table for a terminal. Plain values in, text out."""

from collections.abc import Mapping
from typing import IO, Any

from rich.table import Table

from detonation.report.console import PlainConsole
from detonation.report.words import duration, rate


def show_profile(profile: Mapping[str, Any], stream: IO[str]) -> None:
    """Prints each operation of each axis, the slowest pair of nodes, and the compute time of a step."""
    console = PlainConsole(stream)
    table = Table("axis", "operation", "latency", "per rank", "per node", "largest misfit")
    for name, axis in profile["axes"].items():
        for operation, line in axis["operations"].items():
            rates = [rate(line["rate_bits_per_s"] * ranks) for ranks in (1, axis["per_node"])]
            misfit = f"{line['spread']:.0%}"
            table.add_row(f"{name} ({axis['size']})", operation, duration(line["latency_s"]), *rates, misfit)
    console.print(table)
    for name, axis in profile["axes"].items():
        if axis["pairs"]:
            console.print(_slowest(name, axis["pairs"]))
    if profile["compute"]:
        console.print(_compute(profile["compute"]))
        steps = Table("scheme", "the optimizer's step")
        for scheme, step in profile["compute"]["steps"].items():
            steps.add_row(scheme, duration(step["exchange_s"]))
        console.print(steps)


def _slowest(name: str, pairs: list[dict[str, Any]]) -> str:
    slowest = min(pairs, key=lambda pair: pair["rate_bits_per_s"])
    fastest = max(pairs, key=lambda pair: pair["rate_bits_per_s"])
    times = fastest["rate_bits_per_s"] / slowest["rate_bits_per_s"]
    link = f"slowest pair of {name}: {slowest['first']} and {slowest['second']} at {rate(slowest['rate_bits_per_s'])}"
    return f"{link}, latency {duration(slowest['latency_s'])}; the fastest is {times:.1f} times as fast"


def _compute(compute: Mapping[str, Any]) -> str:
    forward = f"forward and backward of {compute['recipe']} ({compute['parameters']:,} parameters)"
    return f"{forward}: {duration(compute['forward_backward_s'])}"
