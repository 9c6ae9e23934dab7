"""What a terminal shows of a run, of several, of a plan and of a profile: lines and tables of rich. Plain values in."""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Column, Table

from detonation.report.words import duration, factor, less_text, loss_text, printable, rate, size_text

HEADS = (
    *("scheme", "step", "waiting", "sent per node and step", "sent per node and day", "state per rank"),
    "loss against full synchronisation; measured with",
)
_SHARD_HEADS = (
    *("weights, gradients between nodes", "step, nothing hidden", "of it transfer", "sent per node and step"),
    *("held by the shard wire", "per rank with AdamW in fp32"),
)
_SHOWN = 8
"""Rows of a plan; --json and the page have all of them."""
_PIPE_WIDTH = 140


class PlainConsole(Console):
    """Prints text as it is, in lines that reach a pipe whole, whatever its width.

    Raises `BrokenPipeError` where nobody reads stdout any more, and drops its lines where nobody reads another stream.
    rich would end the process, in the middle of a run, and with a code that says nothing.
    """

    def __init__(self, stream: IO[str]) -> None:
        super().__init__(file=stream, highlight=False, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error."""
        if self.file is sys.stdout:
            raise
        discard(self.file)

    def lines(self, texts: Iterable[str]) -> None:
        """Prints each text as one line; names in it may come from elsewhere."""
        for text in texts:
            self.print(printable(text))

    def table(self, heads: Sequence[Column | str], rows: Iterable[Sequence[str]], width: int | None = None) -> None:
        """Prints a table; names in its cells may come from elsewhere."""
        table = Table(*heads, show_header=bool(heads), width=None if self.is_terminal else width)
        for row in rows:
            table.add_row(*map(printable, row))
        self.print(table)


def discard(stream: IO[str]) -> None:
    """Lets all that `stream` still holds, and all that it is given from now on, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def show(summary: dict[str, Any], notes: Iterable[str], stream: IO[str]) -> None:
    """Prints the summary of a run, `notes` and the run's directory; for a stopped run, how to continue."""
    console, where = PlainConsole(stream), summary["directory"]
    if "stopped_after" in summary:
        stopped = f"stopped by {summary['stopped_by']} after step {summary['stopped_after']}"
        console.lines([f"{stopped}; continue with --out {where} --resume"])
        return
    console.table([], run_rows(summary))
    console.lines([*notes, f"run directory: {where}"])


def show_all(summaries: Sequence[dict[str, Any]], notes: Iterable[str], stream: IO[str]) -> None:
    """Prints several runs in one table, one row per run, and `notes`. The run with the lowest loss is marked.

    A run that failed has a row and a line with its error.
    """
    console = PlainConsole(stream)
    losses = [loss for loss in (summary.get("val_loss") for summary in summaries) if loss is not None]
    lowest = min(filter(isfinite, losses), default=None)
    rows, failed = [], []
    for summary in summaries:
        head = (Path(summary["directory"]).name, summary["optimizer"])
        if "error" in summary:
            rows.append((*head, "diverged" if summary["diverged"] else "failed", *["-"] * 4))
            failed.append(f"{head[0]}: {summary['error']}")
            continue
        loss, sent = summary.get("val_loss"), summary["bytes_sent_per_step"]
        marked = f"{loss_text(loss)}{' (lowest)' if loss is not None and loss == lowest else ''}"
        step, equal = duration(summary["median_step_seconds"]), "yes" if summary["replicas_equal"] else "no"
        rows.append((*head, marked, size_text(sent), factor(summary["reduction"]), step, equal))
    titles = ("optimizer", "validation loss", "sent per step", "less", "step time", "replicas equal")
    console.table([Column("run", overflow="fold"), *titles], rows)
    console.lines([*failed, *notes])


def run_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Lists labels and texts of a summary, without empty ones."""

    def if_there(key: str, form: str) -> str:
        return form.format(summary[key]) if summary.get(key) else ""

    speed = if_there("tokens_per_second", "{:,.0f} tokens/s, ") + f"{summary['examples_per_second']:,.1f} examples/s"
    time = f"{summary['seconds']:.1f} s, median step {1000 * summary['median_step_seconds']:.0f} ms"
    bigram = if_there("bigram_loss", " nats/byte (a bigram model: {:.4f})")
    virtual = ", virtual, in one process" if summary.get("simulated") else ""
    wire = summary.get("shard_wire", "")
    counts, skipped = summary.get("local_steps", []), summary.get("skipped", {})
    shown = ", ".join(map(str, counts[:16])) + (", ..." if len(counts) > 16 else "")
    names = ", ".join([*list(skipped)[:3], *["..."] * (len(skipped) > 3)])
    rows = [
        ("scheme", f"{_scheme(summary)} with {summary['optimizer']}"),
        ("adapted to", summary.get("adapted_to", "")),
        ("world", f"{summary['replicas']} replicas x {summary['shards']} shards{virtual}"),
        ("model", f"{summary['model']}, {summary['num_parameters']:,} parameters, on {summary['data']}"),
        ("steps", f"{summary['steps']:,}"),
        ("training loss", loss_text(summary["train_loss"])),
        ("validation loss", loss_text(summary["val_loss"]) + bigram),
        ("validation accuracy", f"{summary['val_accuracy']:.1%}" if "val_accuracy" in summary else ""),
        ("BLEU", f"{summary['val_bleu']:.2f}" if "val_bleu" in summary else ""),
        (f"{'predicted ' if summary.get('seconds_predicted') else ''}time in steps", time),
        ("throughput", speed + if_there("mfu", ", MFU {:.0%}")),
        ("waiting", _waits(summary)),
        ("local steps", f"{shown} per round of replicas 0 to {len(counts) - 1}" if counts else ""),
        ("peak memory", f"{size_text(summary['peak_memory'])} on a rank" if "peak_memory" in summary else ""),
        ("sent per replica", f"{size_text(summary['bytes_sent_per_step'])} per step"),
        *((f"sent over {level['axis']}", _level(level)) for level in summary.get("levels", [])),
        ("full synchronisation", f"{size_text(summary['bytes_full_sync_per_step'])} per step"),
        ("reduction", factor(summary["reduction"])),
        ("sent between its nodes", f"{size_text(summary['shard_bytes_per_step'])} per step: {wire}" if wire else ""),
        ("skipped", f"{sum(skipped.values()):,} contributions that were not finite, of {names}" if skipped else ""),
        ("refused", if_there("refused", "{:,} messages")),
        ("replicas equal", "yes, bitwise" if summary["replicas_equal"] else "no"),
        ("fingerprint", summary["fingerprint"][:16]),
    ]
    return [(label, text) for label, text in rows if text]


def _waits(summary: dict[str, Any]) -> str:
    r"""The replica for which the others waited longest since the last start, and the network; "" where nobody waited.

    >>> found = {"seconds": [[0.0, 5.0], [0.0, 0.0]], "network_s": [0.5, 0.5], "slowest": 1, "lasted_s": 20.0}
    >>> print(*_waits({"waits": found, "seconds": 100.0}).split("; "), sep="\n")
    for replica 1, the slowest: 5.0 s (25% of the time of the others)
    for the network 0.5 s
    in 20.0 s of steps since the last start
    """
    if not (waits := summary.get("waits")):
        return ""
    slowest = waits["slowest"]
    mean = sum(row[slowest] for row in waits["seconds"]) / max(1, len(waits["seconds"]) - 1)
    network = sum(waits["network_s"]) / len(waits["network_s"])
    lasted_s = waits.get("lasted_s", summary["seconds"])  # waits of earlier starts are not in the summary
    share = mean / lasted_s
    named = f"for replica {slowest}, the slowest: {mean:.1f} s ({share:.0%} of the time of the others); "
    since = f"in {lasted_s:.1f} s of steps since the last start"
    return f"{named if share >= 0.01 else ''}for the network {network:.1f} s; {since}"


def _scheme(chosen: dict[str, Any]) -> str:
    if "scheme_arguments" not in chosen:
        return str(chosen["scheme"])
    arguments = ", ".join(f"{key}={value}" for key, value in chosen["scheme_arguments"].items())
    return f"{chosen['scheme']}({arguments})"


def _level(level: dict[str, Any]) -> str:
    less = f" ({less_text(level['reduction'])})" if level["reduction"] else ""
    return f"{size_text(level['bytes_sent_per_step'])} per step{less}: {_scheme(level)}"


def show_plan(plan: Mapping[str, Any], stream: IO[str]) -> None:
    """Prints the best ranked schemes, the reason for the first, and the first choice on other links.

    Of copies that lie on several nodes the costs of their shard wires come first, and nothing else where there is one.
    """
    console = PlainConsole(stream)
    if shards := shard_rows(plan):
        size = f"{plan['shards']} shards, {plan['parameters']:,} parameters"
        console.lines([f"a copy on {plan['shard_nodes']} nodes, {size}"])
        console.table(_SHARD_HEADS, shards, _PIPE_WIDTH)
        if plan["replicas"] == 1:
            return
    ranked = plan_rows(plan)
    console.table([Column(HEADS[0], overflow="fold", min_width=26), *HEADS[1:]], ranked[:_SHOWN], _PIPE_WIDTH)
    more = [f"{len(ranked) - _SHOWN} more with --json"] if len(ranked) > _SHOWN else []
    console.lines([*more, *plan_words(plan)])


def plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of texts per option, in the order of `HEADS`."""
    return [
        (
            option["spelled"],
            duration(option["seconds"]),
            f"{1 - option['efficiency']:.0%}",
            *(size_text(option[key]) for key in ("bytes_per_step", "bytes_per_day", "memory_bytes")),
            option["loss_text"].replace(" parameters", ""),
        )
        for option in plan["options"]
    ]


def shard_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row of texts per shard wire; none for copies that lie on one node."""
    return [
        (
            cost["precisions"],
            *(duration(cost[key]) for key in ("total_s", "transfer_s")),
            *(size_text(cost[key]) for key in ("bytes_sent", "wire_bytes", "memory_bytes")),
        )
        for cost in plan.get("shard_wires", [])
    ]


def plan_words(plan: Mapping[str, Any]) -> list[str]:
    """The text beside the table, in lines: the reason, how to take the first, other links, the break-even rate."""
    speed, first, times = plan["rate_bits_per_s"], plan["first"]["spelled"], plan["break_even_times"]
    chosen = {"name": plan["first"]["scheme"], **plan["first"]["changed"]}
    settings = plan.get("settings", chosen).items()  # a page of an older run has none
    flags = " ".join(f"scheme.{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in settings)
    lines = [plan["reason"], f"to take it: --set {flags}; scheme.name=auto measures and chooses like this"]
    for key, part in (("if_half_the_rate", 0.5), ("if_twice_the_rate", 2.0)) if speed is not None else ():
        other = plan[key]
        choice = "the same first choice" if other["spelled"] == first else f"first {other['spelled']}"
        lines.append(f"at {rate(part * speed)} per node: {choice}, {duration(other['seconds'])} per step")
    lines += [plan["device"]] if plan.get("device") else []
    measured, size = plan["measured_parameters"], plan["parameters"]
    if size > measured:
        few, many = f"{measured / 1e6:.1f} M", f"{size / 1e6:,.1f} M"
        lines.append(f"losses were measured on models of at most {few} parameters, this one has {many}: compare first")
    if times is None:
        as_fast = f"never as fast as {first}, whatever the link"
    else:
        as_fast = f"as fast as {first} " + (f"from {rate(times * speed)} per node on" if times else "on any link")
    return lines if first == "full()" else [*lines, f"full synchronisation is {as_fast}"]


def show_profile(profile: Mapping[str, Any], stream: IO[str]) -> None:
    """Prints each operation of each axis, the slowest pair of nodes, and the compute time of a step."""
    console, rows, slowest = PlainConsole(stream), [], []
    for name, axis in profile["axes"].items():
        for operation, line in axis["operations"].items():
            rates = [rate(line["rate_bits_per_s"] * ranks) for ranks in (1, axis["per_node"])]
            spread = f"{line['spread']:.0%}"
            rows.append((f"{name} ({axis['size']})", operation, duration(line["latency_s"]), *rates, spread))
        ordered = sorted(axis["pairs"], key=lambda pair: pair["rate_bits_per_s"])
        for pair in ordered[:1]:
            times = ordered[-1]["rate_bits_per_s"] / pair["rate_bits_per_s"]
            link = f"{pair['first']} and {pair['second']} at {rate(pair['rate_bits_per_s'])}"
            latency = f"latency {duration(pair['latency_s'])}; the fastest is {times:.1f} times as fast"
            slowest.append(f"slowest pair of {name}: {link}, {latency}")
    console.table(("axis", "operation", "latency", "per rank", "per node", "largest misfit"), rows)
    console.lines(slowest)
    if compute := profile["compute"]:
        forward = f"forward and backward of {compute['recipe']} ({compute['parameters']:,} parameters)"
        console.lines([f"{forward}: {duration(compute['forward_backward_s'])}"])
        steps = [(scheme, duration(step["exchange_s"])) for scheme, step in compute["steps"].items()]
        console.table(("scheme", "the optimizer's step"), steps)
