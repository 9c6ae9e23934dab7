"""Lines and tables of a terminal, by rich: of a run, of several, of a plan and of a profile.

They take plain values.
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
    printable,
    rate,
    size_text,
)

HEADS = (
    "scheme and optimizer",
    "to the loss",
    "step",
    "waiting",
    "sent/step",
    "loss to the baseline",
)
"""Of a plan; the last is AdamW with full synchronisation, or the optimizer that must stay."""
MORE_HEADS = (*HEADS, "sent per day", "state per rank", "measured on")
RESULTS = (
    "scheme, optimizer",
    "validation loss",
    "sent per step",
    "less",
    "step time",
    "replicas equal",
)
"""Titles of the table of several runs, after that of their names."""
_SHOWN = 5
"""Rows of a plan; --all, --json and the page have all of them."""
_WIDTH, _WIDE = 100, 180
"""Columns of a plan, and of one with all that is known."""


class PlainConsole(Console):
    """Prints text as it is, in lines that reach a pipe whole, whatever its width; escapes what its
    encoding lacks.

    Raises `BrokenPipeError` where nobody reads stdout any more, and drops its lines where nobody
    reads another stream. rich would end the process, in the middle of a run, and with a code that
    says nothing.
    """

    def __init__(self, stream: IO[str]) -> None:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        super().__init__(file=stream, highlight=False, markup=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error."""
        if self.file is sys.stdout:
            raise
        discard(self.file)

    def show_cursor(self, show: bool = True) -> bool:
        """Called by rich around a bar; a process that is killed would leave a terminal without a
        cursor."""
        return False

    def lines(self, texts: Iterable[str]) -> None:
        """Prints each text as one line; names in it may come from elsewhere."""
        for text in texts:
            self.print(printable(text))

    def table(
        self, heads: Sequence[Column | str], rows: Iterable[Sequence[str]], width: int | None = None
    ) -> None:
        """Prints a table; names in its cells may come from elsewhere.

        A terminal too narrow for its numbers gets each row as lines, a cell on each.
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
    """Columns below which a table would cut words; those of the first column may be folded."""
    columns = [*zip(*rows, strict=True)][1:]
    words = [
        max(len(word) for cell in column for word in [*cell.split(), ""]) for column in columns
    ]
    return sum(words) + 3 * len(words) + _FIRST_COLUMN


_FIRST_COLUMN = 24


def _listed(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows of a table as lines.

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
    """Lets all that `stream` still holds, and all that it is given from now on, go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def show(summary: dict[str, Any], notes: Iterable[str], stream: IO[str]) -> None:
    """Prints the summary of a run, `notes` and the run's directory; for a stopped run, how to
    continue."""
    console, where = PlainConsole(stream), summary["directory"]
    if "stopped_after" in summary:
        stopped = f"stopped by {summary['stopped_by']} after step {summary['stopped_after']}"
        goes_on = (
            "the others train on" if "left" in summary else f"continue with --out {where} --resume"
        )
        console.lines([f"{stopped}; {goes_on}"])
        return
    console.table([], run_rows(summary))
    console.lines([*notes, f"run directory: {where}"])


def show_all(summaries: Sequence[dict[str, Any]], notes: Iterable[str], stream: IO[str]) -> None:
    """Prints several runs in one table, one row per run, the errors of those that failed, and
    `notes`."""
    console, names = (
        PlainConsole(stream),
        [Path(summary["directory"]).name for summary in summaries],
    )
    rows = ((name, *row) for name, row in zip(names, results(summaries), strict=True))
    console.table([Column("run", overflow="fold"), *RESULTS], rows)
    failed = [
        f"{name}: {run['error']}"
        for name, run in zip(names, summaries, strict=True)
        if "error" in run
    ]
    console.lines([*failed, *notes])


def results(summaries: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The texts of a table of several runs, below `RESULTS`; the lowest loss is marked, and a
    failed run has none."""
    losses = [summary["val_loss"] for summary in summaries if summary.get("val_loss") is not None]
    lowest = min(filter(isfinite, losses), default=None)
    rows: list[tuple[str, ...]] = []
    for summary in summaries:
        trained = f"{summary['scheme']}, {summary['optimizer']}"
        if "error" in summary:
            rows.append((trained, "diverged" if summary["diverged"] else "failed", *["-"] * 4))
            continue
        loss, step_s = summary["val_loss"], summary["median_step_seconds"]
        text = loss_text(loss) + (
            f", {summary['val_accuracy']:.1%} right" if "val_accuracy" in summary else ""
        )
        text += " (lowest)" if loss is not None and loss == lowest else ""
        equal = equality(summary)
        sent, less = size_text(summary["bytes_sent_per_step"]), factor(summary["reduction"])
        rows.append((trained, text, sent, less, duration(step_s), equal))
    return rows


def run_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Lists labels and texts of a summary, without empty ones."""

    def if_there(key: str, form: str) -> str:
        return form.format(summary[key]) if summary.get(key) else ""

    speed = (
        if_there("tokens_per_second", "{:,.0f} tokens/s, ")
        + f"{summary['examples_per_second']:,.1f} examples/s"
    )
    time = f"{summary['seconds']:.1f} s, median step {1000 * summary['median_step_seconds']:.0f} ms"
    virtual = ", virtual, in one process" if summary.get("simulated") else ""
    wire = summary.get("shard_wire", "")
    counts, skipped = summary.get("local_steps", []), summary.get("skipped", {})
    shown = ", ".join(map(str, counts[:16])) + (", ..." if len(counts) > 16 else "")
    names = ", ".join([*list(skipped)[:3], *["..."] * (len(skipped) > 3)])
    rows = [
        ("scheme", f"{_scheme(summary)} with {summary['optimizer']}"),
        ("adapted to", summary.get("adapted_to", "")),
        ("world", f"{summary['replicas']} replicas x {summary['shards']} shards{virtual}"),
        (
            "model",
            f"{summary['model']}, {summary['num_parameters']:,} parameters, on {summary['data']}",
        ),
        ("steps", f"{summary['steps']:,}"),
        ("training loss", loss_text(summary["train_loss"])),
        ("validation loss", loss_text(summary["val_loss"])),
        (
            "validation accuracy",
            f"{summary['val_accuracy']:.1%}" if "val_accuracy" in summary else "",
        ),
        ("BLEU", f"{summary['val_bleu']:.2f}" if "val_bleu" in summary else ""),
        ("time in steps", time),
        ("throughput", speed),
        ("waiting", _waits(summary)),
        ("local steps", f"{shown} per round of replicas 0 to {len(counts) - 1}" if counts else ""),
        (
            "peak memory",
            f"{size_text(summary['peak_memory'])} on a rank" if "peak_memory" in summary else "",
        ),
        ("sent per replica", f"{size_text(summary['bytes_sent_per_step'])} per step"),
        *((f"sent over {level['axis']}", _level(level)) for level in summary.get("levels", [])),
        ("full synchronisation", f"{size_text(summary['bytes_full_sync_per_step'])} per step"),
        ("reduction", factor(summary["reduction"])),
        (
            "sent between its nodes",
            f"{size_text(summary['shard_bytes_per_step'])} per step: {wire}" if wire else "",
        ),
        (
            "skipped",
            (
                f"{sum(skipped.values()):,} contributions that were not finite, of {names}"
                if skipped
                else ""
            ),
        ),
        ("refused", if_there("refused", "{:,} messages")),
        ("replicas equal", equality(summary, "yes, bitwise")),
        ("fingerprint", summary["fingerprint"][:16]),
    ]
    return [(label, text) for label, text in rows if text]


def _waits(summary: dict[str, Any]) -> str:
    r"""The replica for which the others waited longest since the last start, and the network; ""
    where nobody waited.

    >>> found = {"seconds": [[0.0, 5.0], [0.0, 0.0]], "network_s": [0.5, 0.5], "slowest": 1, "lasted_s": 20.0}
    >>> print(*_waits({"waits": found, "seconds": 100.0}).split("; "), sep="\n")
    for replica 1, the slowest: 5.0 s (25% of the time of the others)
    for the network 0.5 s
    in 20.0 s of steps since the last start
    >>> _waits({"waits": {**found, "lasted_s": 0.0}})
    ''
    """
    if not (waits := summary.get("waits")) or not waits.get(
        "lasted_s", 1.0
    ):  # no step since the last start
        return ""
    slowest = waits["slowest"]
    mean = sum(row[slowest] for row in waits["seconds"]) / max(1, len(waits["seconds"]) - 1)
    network = sum(waits["network_s"]) / len(waits["network_s"])
    lasted_s = waits.get(
        "lasted_s", summary["seconds"]
    )  # waits of earlier starts are not in the summary
    share = mean / lasted_s
    named = (
        f"for replica {slowest}, the slowest: {mean:.1f} s ({share:.0%} of the time of the"
        " others); "
    )
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


def show_plan(plan: Mapping[str, Any], stream: IO[str], everything: bool = False) -> None:
    """Prints the answer in a sentence, the first rows, the flags of the first, and what else is
    known of it.

    everything: Print all rows, and all columns.
    """
    console = PlainConsole(stream)
    reason, flags, *notes = plan_words(plan)
    console.lines(wrap(reason, _WIDTH))
    first = Column(HEADS[0], overflow="fold", min_width=20)
    if everything:
        console.table([first, *MORE_HEADS[1:]], plan_rows(plan), _WIDE)
    else:
        console.table([first, *HEADS[1:]], [row[: len(HEADS)] for row in _five(plan)], _WIDTH)
    console.lines(
        [flags, *(line for note in notes for line in wrap(note, _WIDTH, subsequent_indent="  "))]
    )


def _five(plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The best rows, one per scheme with an optimizer, and the baseline's among them."""
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
    """One row of texts per option, in the order of `MORE_HEADS`."""
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
    """The text beside the table, in lines: the reason, how to take the first, and what else is
    known of it."""
    speed, first = plan["rate_bits_per_s"], plan["first"]
    tables = {"scheme": plan["settings"], "optimizer": plan.get("optimizer", {})}
    sets = [
        f"{name}.{key}={_toml(value)}"
        for name, table in tables.items()
        for key, value in table.items()
    ]
    lines = [plan["reason"], f"to take it: --set {shlex.join(sets)}", *plan["notes"]]
    for key, part in (
        (("if_half_the_rate", 0.5), ("if_twice_the_rate", 2.0)) if speed is not None else ()
    ):
        other = plan[key]
        choice = (
            "the same first choice" if _named(other) == _named(first) else f"first {_named(other)}"
        )
        lines.append(
            f"at {rate(part * speed)} per node: {choice}, {duration(other['seconds'])} per step"
        )
    return lines


def _named(option: Mapping[str, Any]) -> str:
    return f"{option['spelled']} with {option['optimizer']}"


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def show_profile(profile: Mapping[str, Any], stream: IO[str]) -> None:
    """Prints each operation of each axis, what silence costs, the slowest pair of nodes, and the
    compute of a step."""
    console, rows, notes, slowest = PlainConsole(stream), [], list[str](), []
    for name, axis in profile["axes"].items():
        if jitter := [
            line["samples"][0]["spread"] for line in axis["operations"].values() if line["samples"]
        ]:
            notes.append(f"along {name} the shortest messages have a jitter of {max(jitter):.0%}")
        if axis["silence_s"]:
            notes.append(
                f"after a second of silence a message along {name} takes"
                f" {duration(axis['silence_s'])} more"
            )
        for operation, line in axis["operations"].items():
            rates = [rate(line["rate_bits_per_s"] * ranks) for ranks in (1, axis["per_node"])]
            spread = f"{line['spread']:.0%}"
            rows.append(
                (f"{name} ({axis['size']})", operation, duration(line["latency_s"]), *rates, spread)
            )
        ordered = sorted(axis["pairs"], key=lambda pair: pair["rate_bits_per_s"])
        for pair in ordered[:1]:
            times = ordered[-1]["rate_bits_per_s"] / pair["rate_bits_per_s"]
            link = f"{pair['first']} and {pair['second']} at {rate(pair['rate_bits_per_s'])}"
            latency = (
                f"latency {duration(pair['latency_s'])}; the fastest is {times:.1f} times as fast"
            )
            slowest.append(f"slowest pair of {name}: {link}, {latency}")
    console.table(("axis", "operation", "latency", "per rank", "per node", "misfit"), rows)
    console.lines([*notes, *slowest])
    if compute := profile["compute"]:
        forward = (
            f"forward and backward of {compute['recipe']} ({compute['parameters']:,} parameters)"
        )
        console.lines([f"{forward}: {duration(compute['forward_backward_s'])}"])
        steps = [
            (scheme, duration(step["exchange_s"])) for scheme, step in compute["steps"].items()
        ]
        console.table(("scheme", "the optimizer's step"), steps)
