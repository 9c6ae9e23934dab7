"""A plan as a table: for a terminal, and as rows for the page. Plain values in, text out."""

from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from detonation.report.words import duration, rate, size_text

HEADS = ("scheme", "step", "waiting", "sent per step", "sent per day", "memory", "loss")


def plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of texts per option, in the order of `HEADS`."""
    return [
        (
            option["spelled"],
            duration(option["seconds"]),
            f"{1 - option['efficiency']:.0%}",
            size_text(option["bytes_per_step"]),
            size_text(option["bytes_per_day"]),
            size_text(option["memory_bytes"]),
            "unknown" if option["loss_cost"] is None else f"{option['loss_cost']:+.1%}",
        )
        for option in plan["options"]
    ]


def show_plan(plan: Mapping[str, Any], stream: IO[str]) -> None:
    """Prints the ranked schemes, the reason for the first, and the first choice on other links."""
    console = Console(file=stream, highlight=False, markup=False, soft_wrap=True)
    table = Table(*HEADS, width=None if console.is_terminal else 140)
    for row in plan_rows(plan):
        table.add_row(*row)
    console.print(table)
    for line in words(plan):
        console.print(line)


def words(plan: Mapping[str, Any]) -> list[str]:
    """The text beside the table, in lines: the reason, other links, the automatic choice, the break-even rate."""
    speed, first = plan["rate_bits_per_s"], plan["first"]["spelled"]
    lines = [plan["reason"]]
    for key, times in (("if_half_the_rate", 0.5), ("if_twice_the_rate", 2.0)):
        other = plan[key]
        choice = "the same first choice" if other["spelled"] == first else f"first {other['spelled']}"
        lines.append(f"at {rate(times * speed)} per node: {choice}, {duration(other['seconds'])} per step")
    lines.append(f"scheme auto, with a budget of {plan['auto_budget']:.0%} of a step: {plan['auto']['spelled']}")
    times = plan["break_even_times"]
    if times is None:
        lines.append(f"full synchronisation is never as fast as {first}, whatever the link")
    elif times == 0:
        lines.append(f"full synchronisation is as fast as {first} on any link")
    else:
        lines.append(f"full synchronisation is as fast as {first} from {rate(times * speed)} per node on")
    return lines
