"""A plan as a table: for a terminal, and as rows for the page. Plain values in, text out."""

from collections.abc import Mapping
from typing import IO, Any

from rich.table import Column, Table

from detonation.report.console import PlainConsole
from detonation.report.words import duration, printable, rate, size_text

HEADS = (
    "scheme",
    "step",
    "waiting",
    "sent per node and step",
    "sent per node and day",
    "state per rank",
    "loss against full synchronisation; measured with",
)
SHARD_HEADS = (
    "weights, gradients between nodes",
    "step, nothing hidden",
    "of it transfer",
    "sent per node and step",
    "held by the shard wire",
    "per rank with AdamW in fp32",
)
SHOWN = 8
"""Rows in a terminal; --json and the page have all of them."""


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
            option["loss_text"].replace(" parameters", ""),
        )
        for option in plan["options"]
    ]


def shard_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of texts per shard wire, in the order of `SHARD_HEADS`; none for copies that lie on one node."""
    return [
        (
            cost["precisions"],
            duration(cost["total_s"]),
            duration(cost["transfer_s"]),
            size_text(cost["bytes_sent"]),
            size_text(cost["wire_bytes"]),
            size_text(cost["memory_bytes"]),
        )
        for cost in plan.get("shard_wires", [])
    ]


def show_plan(plan: Mapping[str, Any], stream: IO[str]) -> None:
    """Prints the best ranked schemes, the reason for the first, and the first choice on other links.

    Of copies that lie on several nodes the costs of their shard wires come first, and nothing else where there is one.
    """
    console = PlainConsole(stream)
    if shards := shard_rows(plan):
        table = Table(*SHARD_HEADS, width=None if console.is_terminal else 140)
        for row in shards:
            table.add_row(*map(printable, row))
        console.print(
            f"a copy on {plan['shard_nodes']} nodes, {plan['shards']} shards, {plan['parameters']:,} parameters"
        )
        console.print(table)
        if plan["replicas"] == 1:
            return
    table = Table(
        Column(HEADS[0], overflow="fold", min_width=26), *HEADS[1:], width=None if console.is_terminal else 140
    )
    ranked = plan_rows(plan)
    for row in ranked[:SHOWN]:
        table.add_row(*map(printable, row))
    console.print(table)
    if len(ranked) > SHOWN:
        console.print(f"{len(ranked) - SHOWN} more with --json")
    for line in words(plan):
        console.print(printable(line))


def words(plan: Mapping[str, Any]) -> list[str]:
    """The text beside the table, in lines: the reason, how to take the first, other links, the break-even rate."""
    speed, first = plan["rate_bits_per_s"], plan["first"]["spelled"]
    lines = [plan["reason"], f"to take it: {_flags(plan)}; scheme.name=auto measures and chooses like this"]
    for key, times in (("if_half_the_rate", 0.5), ("if_twice_the_rate", 2.0)) if speed is not None else ():
        other = plan[key]
        choice = "the same first choice" if other["spelled"] == first else f"first {other['spelled']}"
        lines.append(f"at {rate(times * speed)} per node: {choice}, {duration(other['seconds'])} per step")
    if plan.get("device"):
        lines.append(plan["device"])
    measured, size = plan["measured_parameters"], plan["parameters"]
    if size > measured:
        few, many = f"{measured / 1e6:.1f} M", f"{size / 1e6:,.1f} M"
        lines.append(f"losses were measured on models of at most {few} parameters, this one has {many}: compare first")
    times = plan["break_even_times"]
    if first == "full()":
        return lines
    if times is None:
        lines.append(f"full synchronisation is never as fast as {first}, whatever the link")
    elif times == 0:
        lines.append(f"full synchronisation is as fast as {first} on any link")
    else:
        lines.append(f"full synchronisation is as fast as {first} from {rate(times * speed)} per node on")
    return lines


def _flags(plan: Mapping[str, Any]) -> str:
    """The flags of `detonation train` that choose the first option."""
    first = plan["first"]
    settings = plan.get("settings", {"name": first["scheme"], **first["changed"]})  # a page of an older run has none
    return "--set " + " ".join(f"scheme.{key}={_value(value)}" for key, value in settings.items())


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
