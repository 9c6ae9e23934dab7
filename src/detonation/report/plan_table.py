"""A plan as a table for a terminal, and in rows for a page. Plain values in, text out."""

from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from detonation.report.words import duration, rate, size

HEADS = ("scheme", "a step", "waiting", "sent a step", "a day", "memory", "loss")


def rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row of texts for each option, in the order of `HEADS`."""
    return [_row(option) for option in plan["options"]]


def show_plan(plan: Mapping[str, Any], stream: IO[str]) -> None:
    """Prints the ranked schemes, why the first is first, and what another link would change."""
    console = Console(file=stream, highlight=False, markup=False, soft_wrap=True)
    table = Table(*HEADS, width=None if console.is_terminal else 140)
    for row in rows(plan):
        table.add_row(*row)
    console.print(table)
    for line in words(plan):
        console.print(line)


def words(plan: Mapping[str, Any]) -> list[str]:
    """What a plan says beside its table."""
    now, first = plan["rate_bits_per_s"], plan["first"]["spelled"]
    lines = [plan["reason"]]
    for key, times in (("if_half_the_rate", 0.5), ("if_twice_the_rate", 2.0)):
        there = plan[key]
        same = "the same first choice" if there["spelled"] == first else f"first {there['spelled']}"
        lines.append(f"at {rate(times * now)} a node: {same}, {duration(there['seconds'])} a step")
    lines.append(f"scheme auto, with {plan['auto_budget']:.0%} of a step to wait: {plan['auto']['spelled']}")
    even = plan["break_even_times"]
    if even is None:
        lines.append(f"full synchronisation is never as quick as {first}, whatever the link")
    elif even == 0:
        lines.append(f"full synchronisation is as quick as {first} on any link")
    else:
        lines.append(f"full synchronisation is as quick as {first} from {rate(even * now)} a node on")
    return lines


def _row(option: Mapping[str, Any]) -> tuple[str, ...]:
    cost = option["loss_cost"]
    return (
        option["spelled"],
        duration(option["seconds"]),
        f"{1 - option['efficiency']:.0%}",
        size(option["bytes_per_step"]),
        size(option["bytes_per_day"]),
        size(option["memory_bytes"]),
        "unknown" if cost is None else f"{cost:+.1%}",
    )
