"""Lines and tables that rich prints on the terminal: about a run, several runs, a plan and a
profile.

All functions accept plain values, such as those in JSON files.
"""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from textwrap import wrap
from typing import IO, Any

from rich.console import Console
from rich.table import Column, Table

from detonation.report.words import (
    duration,
    equality,
    factor,
    less_text,
    loss_text,
    membership_changes,
    printable,
    rate,
    size_text,
    world_text,
)

HEADS = (
    "scheme and optimizer",
    "to the loss",
    "step",
    "waiting",
    "sent/step",
    "loss to the baseline",
)
"""Column titles of the table of a plan. The baseline is full synchronisation with AdamW, or with
the optimizer that `--optimizer` names.
"""
MORE_HEADS = (*HEADS, "sent per day", "state per rank", "measured on")
RESULTS = (
    "scheme, optimizer",
    "validation loss",
    "sent per step",
    "less",
    "step time",
    "replicas equal",
)
"""Column titles of the table of several runs, without the title of the first column."""
_SHOWN = 5
"""Number of rows of a plan that are printed. With --all and --json, all rows are shown."""
_WIDTH = 100
_WIDE = 180
"""Width of the table of a plan with --all, in characters; without --all the width is `_WIDTH`."""


class PlainConsole(Console):
    """Prints text without markup, and adds no line breaks. Escapes characters that the encoding of
    the stream lacks.

    If the reader of stdout has closed the pipe, this console raises `BrokenPipeError`. If the
    reader of another stream has closed the pipe, this console drops the lines. rich alone would end
    the process in the middle of a run.
    """

    def __init__(self, stream: IO[str]) -> None:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        super().__init__(file=stream, highlight=False, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Handles a closed pipe. rich calls this method while it handles the error."""
        if self.file is sys.stdout:
            raise
        discard(self.file)

    def show_cursor(self, show: bool = True) -> bool:
        """Keeps the cursor visible. rich calls this method around a progress bar to hide the
        cursor, but a killed process could not show it again.
        """
        return False

    def lines(self, texts: Iterable[str]) -> None:
        """Prints each text as one line, and escapes unprintable characters."""
        for text in texts:
            self.print(printable(text))

    def table(
        self, heads: Sequence[Column | str], rows: Iterable[Sequence[str]], width: int | None = None
    ) -> None:
        """Prints a table, and escapes unprintable characters.

        If the terminal is too narrow for the table, it prints each cell on its own line.
        """
        if width is not None and self.is_terminal:
            width = min(width, self.width)
        cells = [[printable(cell) for cell in row] for row in rows]
        titles = [str(head.header) if isinstance(head, Column) else head for head in heads]
        if self.is_terminal and _narrowest(cells) > self.width:
            self.lines(_listed(titles, cells))
            return
        table = Table(*heads, show_header=bool(heads), width=width)
        for row in cells:
            table.add_row(*row)
        self.print(table)


def _narrowest(rows: Sequence[Sequence[str]]) -> int:
    """Returns the smallest width at which a table cuts no word. The first column counts as
    `_FIRST_COLUMN` characters, even if it has longer words.
    """
    columns = [*zip(*rows, strict=True)][1:]
    words = [" ".join(column).split() for column in columns]
    widths = [max(map(len, each), default=0) for each in words]
    return sum(widths) + 3 * len(widths) + _FIRST_COLUMN


_FIRST_COLUMN = 24


def _listed(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the rows of a table as lines of text.

    >>> list(_listed(["run", "loss"], [["one", "2.1"]])), list(_listed([], [["steps", "40"]]))
    (['one', '  loss: 2.1'], ['steps: 40'])
    """
    for first, *rest in rows:
        if not titles:
            yield f"{first}: {', '.join(rest)}"
            continue
        yield first
        for title, cell in zip(titles[1:], rest, strict=True):
            yield f"  {title}: {cell}"


def discard(stream: IO[str]) -> None:
    """Redirects `stream` to /dev/null, together with the text in the buffer of `stream`."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def show(summary: dict[str, Any], notes: Iterable[str], stream: IO[str]) -> None:
    """Prints the summary of a run, `notes`, and the run directory. For a stopped run, prints how to
    continue it.
    """
    console = PlainConsole(stream)
    where = summary["directory"]
    if "stopped_after" in summary:
        stopped = f"stopped by {summary['stopped_by']} after step {summary['stopped_after']}"
        remedy = f"continue with --out {where} --resume"
        if "left" in summary:
            remedy = "the other replicas train on"
        console.lines([f"{stopped}; {remedy}"])
        return
    console.table([], run_rows(summary))
    console.lines([*notes, f"run directory: {where}"])


def show_all(summaries: Sequence[dict[str, Any]], notes: Iterable[str], stream: IO[str]) -> None:
    """Prints a table of several runs, the errors of failed runs, and the lines in `notes`."""
    console = PlainConsole(stream)
    names = [Path(summary["directory"]).name for summary in summaries]
    rows = ((name, *row) for name, row in zip(names, results(summaries), strict=True))
    console.table([Column("run", overflow="fold"), *RESULTS], rows)
    pairs = zip(names, summaries, strict=True)
    failed = [f"{name}: {run['error']}" for name, run in pairs if "error" in run]
    console.lines([*failed, *notes])


def results(summaries: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Returns the rows of a table of several runs, with the columns `RESULTS`. Marks the lowest
    loss.
    """
    losses = [summary["val_loss"] for summary in summaries if summary.get("val_loss") is not None]
    lowest = min(filter(isfinite, losses), default=None)
    rows: list[tuple[str, ...]] = []
    for summary in summaries:
        trained = f"{summary['scheme']}, {summary['optimizer']}"
        if "error" in summary:
            problem = "failed"
            if summary["diverged"]:
                problem = "diverged"
            rows.append((trained, problem, *["-"] * 4))
            continue
        loss = summary["val_loss"]
        text = loss_text(loss)
        if "val_accuracy" in summary:
            text += f", {summary['val_accuracy']:.1%} right"
        if loss is not None and loss == lowest:
            text += " (lowest)"
        sent = size_text(summary["bytes_sent_per_step"])
        less = factor(summary["reduction"])
        step = duration(summary["median_step_seconds"])
        rows.append((trained, text, sent, less, step, equality(summary) or "-"))
    return rows


def run_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the labels and texts of a summary. Leaves out labels that have no text."""

    def optional(key: str, form: str) -> str:
        if key in summary:
            return form.format(summary[key])
        return ""

    speed = f"{summary['examples_per_second']:,.1f} examples/s"
    if summary.get("tokens_per_second"):
        speed = f"{summary['tokens_per_second']:,.0f} tokens/s, {speed}"
    time = f"{summary['seconds']:.1f} s, median step {1000 * summary['median_step_seconds']:.0f} ms"
    virtual = ""
    if summary.get("simulated"):
        virtual = ", virtual, in one process"
    memory = ""
    if "peak_memory" in summary:
        memory = f"{size_text(summary['peak_memory'])} on a rank"
    wire = ""
    if summary.get("shard_wire"):
        sent = size_text(summary["shard_bytes_per_step"])
        wire = f"{sent} per step: {summary['shard_wire']}"
    full_sync = f"{size_text(summary['bytes_full_sync_per_step'])} per step"
    if membership_changes(summary):
        full_sync += ", with the replicas that each step had"
    refused = ""
    if summary.get("refused"):
        refused = f"{summary['refused']:,} messages"
    rows = [
        ("scheme", f"{_scheme(summary)} with {summary['optimizer']}"),
        ("world", world_text(summary) + virtual),
        (
            "model",
            f"{summary['model']}, {summary['num_parameters']:,} parameters, on {summary['data']}",
        ),
        ("steps", f"{summary['steps']:,}"),
        ("training loss", loss_text(summary["train_loss"])),
        ("validation loss", loss_text(summary["val_loss"])),
        ("validation accuracy", optional("val_accuracy", "{:.1%}")),
        ("BLEU", optional("val_bleu", "{:.2f}")),
        ("time in steps", time),
        ("throughput", speed),
        ("waiting", _waits(summary)),
        ("local steps", _local_steps(summary.get("local_steps", []))),
        ("peak memory", memory),
        ("sent per replica", f"{size_text(summary['bytes_sent_per_step'])} per step"),
        *((f"sent over {level['axis']}", _level(level)) for level in summary.get("levels", [])),
        ("full synchronisation", full_sync),
        ("reduction", factor(summary["reduction"])),
        ("sent between its nodes", wire),
        ("skipped", _skipped(summary.get("skipped", {}))),
        ("refused", refused),
        ("replicas equal", equality(summary, "yes, bitwise")),
        ("fingerprint", summary["fingerprint"][:16]),
    ]
    return [(label, text) for label, text in rows if text]


def _local_steps(counts: Sequence[int]) -> str:
    if not counts:
        return ""
    shown = [*map(str, counts[:16])]
    if len(counts) > 16:
        shown.append("...")
    return f"{', '.join(shown)} per round of replicas 0 to {len(counts) - 1}"


def _skipped(counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    names = list(counts)[:3]
    if len(counts) > 3:
        names.append("...")
    total = sum(counts.values())
    return f"{total:,} contributions that were not finite, of {', '.join(names)}"


def _waits(summary: dict[str, Any]) -> str:
    r"""Returns the seconds of waiting for the slowest replica and for the network since the last
    start; "" if there are none.

    >>> found = {"seconds": [[0.0, 5.0], [0.0, 0.0]], "network_s": [0.5, 0.5], "slowest": 1}
    >>> found["lasted_s"] = 20.0
    >>> print(*_waits({"waits": found, "seconds": 100.0}).split("; "), sep="\n")
    for replica 1, the slowest: 5.0 s (25% of the time of the others)
    for the network 0.5 s
    in 20.0 s of steps since the last start
    >>> _waits({"waits": {**found, "lasted_s": 0.0}})
    ''
    """
    waits = summary.get("waits")
    if not waits or not waits.get("lasted_s", 1.0):  # no step has ended since the last start
        return ""
    slowest = waits["slowest"]
    seconds = waits["seconds"]
    mean = sum(row[slowest] for row in seconds) / max(1, len(seconds) - 1)
    network = sum(waits["network_s"]) / len(waits["network_s"])
    # a summary contains only the waiting time since the last start
    lasted_s = waits.get("lasted_s", summary["seconds"])
    share = mean / lasted_s
    text = f"for the network {network:.1f} s; in {lasted_s:.1f} s of steps since the last start"
    if share < 0.01:
        return text
    others = f"{share:.0%} of the time of the others"
    return f"for replica {slowest}, the slowest: {mean:.1f} s ({others}); {text}"


def _scheme(chosen: dict[str, Any]) -> str:
    if "scheme_arguments" not in chosen:
        return str(chosen["scheme"])
    arguments = ", ".join(f"{key}={value}" for key, value in chosen["scheme_arguments"].items())
    return f"{chosen['scheme']}({arguments})"


def _level(level: dict[str, Any]) -> str:
    less = ""
    if level["reduction"]:
        less = f" ({less_text(level['reduction'])})"
    return f"{size_text(level['bytes_sent_per_step'])} per step{less}: {_scheme(level)}"


def show_plan(plan: Mapping[str, Any], stream: IO[str], everything: bool) -> None:
    """Prints the reason for the first choice, the best rows, the flags for the first row, and
    notes.

    Args:
        everything: Print all rows and all columns.
    """
    console = PlainConsole(stream)
    reason, flags, *notes = plan_words(plan)
    console.lines(wrap(reason, _WIDTH))
    first = Column(HEADS[0], overflow="fold", min_width=20)
    if everything:
        console.table([first, *MORE_HEADS[1:]], plan_rows(plan), _WIDE)
    else:
        console.table([first, *HEADS[1:]], [row[: len(HEADS)] for row in _five(plan)], _WIDTH)
    console.lines([flags])
    for note in notes:
        console.lines(wrap(note, _WIDTH, subsequent_indent="  "))


def _five(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns the five best rows, at most one for each pair of scheme and optimizer. The baseline
    is always one of them.
    """
    best: dict[tuple[str, str], tuple[str, ...]] = {}
    every = plan_rows(plan)
    for option, row in zip(plan["options"], every, strict=True):
        best.setdefault((option["scheme"], option["optimizer"]), row)
    rows = list(best.values())
    baseline = next((row for row in every if row[0] == plan["baseline"]), None)
    if baseline is None or baseline in rows[:_SHOWN]:
        return rows[:_SHOWN]
    return [*rows[: _SHOWN - 1], baseline]


def plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns a table row for each option of `plan`. `MORE_HEADS` names the columns."""
    return [
        (
            _named(option),
            option["time_to_loss"],
            duration(option["seconds"]),
            f"{1 - option['efficiency']:.0%}",
            size_text(option["bytes_per_step"]),
            option["loss_text"],
            size_text(option["bytes_per_day"]),
            size_text(option["memory_bytes"]),
            option["loss_source"],
        )
        for option in plan["options"]
    ]


def plan_words(plan: Mapping[str, Any]) -> list[str]:
    """Returns the lines around the table: the reason for the first choice, the flags for the first
    row, and notes.
    """
    speed = plan["rate_bits_per_s"]
    first = plan["first"]
    sets = [f"scheme.{key}={_toml(value)}" for key, value in plan["settings"].items()]
    optimizer = plan.get("optimizer", {})
    sets += [f"optimizer.{key}={_toml(value)}" for key, value in optimizer.items()]
    lines = [plan["reason"], f"to use it: --set {shlex.join(sets)}", *plan["notes"]]
    if speed is None:
        return lines
    for key, part in (("if_half_the_rate", 0.5), ("if_twice_the_rate", 2.0)):
        other = plan[key]
        choice = f"first {_named(other)}"
        if _named(other) == _named(first):
            choice = "the same first choice"
        lines.append(
            f"at {rate(part * speed)} per node: {choice}, {duration(other['seconds'])} per step"
        )
    return lines


def _named(option: Mapping[str, Any]) -> str:
    return f"{option['spelled']} with {option['optimizer']}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "")


def show_profile(profile: Mapping[str, Any], stream: IO[str]) -> None:
    """Prints the collectives of each axis, the slowest pairs of nodes, and the compute time of a
    step.
    """
    console = PlainConsole(stream)
    rows = []
    notes = []
    slowest = []
    for name, axis in profile["axes"].items():
        operations = axis["operations"]
        shortest = [each["samples"][0] for each in operations.values() if each["samples"]]
        if shortest:
            slow = max(shortest, key=lambda sample: sample["slowest_s"])
            notes.append(
                f"along {name} the median of the shortest messages takes"
                f" {duration(slow['median_s'])}, the slowest {duration(slow['slowest_s'])}"
            )
        if axis["silence_s"]:
            notes.append(
                f"after a second of silence a message along {name} takes"
                f" {duration(axis['silence_s'])} more"
            )
        label = f"{name} ({axis['size']})"
        for operation, line in operations.items():
            latency = duration(line["latency_s"])
            per_rank = rate(line["rate_bits_per_s"])
            per_node = rate(line["rate_bits_per_s"] * axis["per_node"])
            misfit = f"{line['spread']:.0%}"
            rows.append((label, operation, latency, per_rank, per_node, misfit))
        if axis["pairs"]:
            slowest.append(f"slowest pair of {name}: {_slowest_pair(axis['pairs'])}")
    console.table(("axis", "operation", "latency", "per rank", "per node", "misfit"), rows)
    console.lines([*notes, *slowest])
    compute = profile["compute"]
    if not compute:
        return
    forward = f"forward and backward of {compute['recipe']} ({compute['parameters']:,} parameters)"
    console.lines([f"{forward}: {duration(compute['forward_backward_s'])}"])
    steps = [(scheme, duration(step["exchange_s"])) for scheme, step in compute["steps"].items()]
    console.table(("scheme", "the optimizer's step"), steps)


def _slowest_pair(pairs: Sequence[Mapping[str, Any]]) -> str:
    rates = [pair["rate_bits_per_s"] for pair in pairs]
    slowest = pairs[rates.index(min(rates))]
    times = max(rates) / min(rates)
    return (
        f"{slowest['first']} and {slowest['second']} at {rate(min(rates))}, latency"
        f" {duration(slowest['latency_s'])}; the fastest is {times:.1f} times as fast"
    )
