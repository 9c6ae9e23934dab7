"""The summary of a run as labelled rows, and as a table for a terminal."""

from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import IO, Any

from rich.table import Column, Table

from detonation.report.console import PlainConsole
from detonation.report.words import duration, factor, less_text, loss_text, printable, size_text


def run_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Lists labels and texts of a summary, without empty ones."""
    less = summary["reduction"]
    rows = [
        ("scheme", f"{_scheme(summary)} with {summary['optimizer']}"),
        ("adapted to", summary.get("adapted_to", "")),
        ("world", f"{summary['replicas']} replicas x {summary['shards']} shards{_virtual(summary)}"),
        ("model", f"{summary['model']}, {summary['num_parameters']:,} parameters, on {summary['data']}"),
        ("steps", f"{summary['steps']:,}"),
        ("training loss", loss_text(summary["train_loss"])),
        ("validation loss", f"{loss_text(summary['val_loss'])}{_bigram(summary)}"),
        ("validation accuracy", f"{summary['val_accuracy']:.1%}" if "val_accuracy" in summary else ""),
        ("BLEU", f"{summary['val_bleu']:.2f}" if "val_bleu" in summary else ""),
        (
            f"{_predicted(summary)}time in steps",
            f"{summary['seconds']:.1f} s, median step {1000 * summary['median_step_seconds']:.0f} ms",
        ),
        ("throughput", _speed(summary)),
        ("waiting", _waits(summary)),
        ("local steps", _local_steps(summary.get("local_steps", []))),
        ("late gradients", _late(summary.get("late", {}))),
        ("peak memory", f"{size_text(summary['peak_memory'])} on a rank" if "peak_memory" in summary else ""),
        ("sent per replica", f"{size_text(summary['bytes_sent_per_step'])} per step"),
        *((f"sent over {level['axis']}", _level(level)) for level in summary.get("levels", [])),
        ("full synchronisation", f"{size_text(summary['bytes_full_sync_per_step'])} per step"),
        ("reduction", factor(less)),
        ("sent between its nodes", _shard_wire(summary)),
        ("skipped", _skipped(summary.get("skipped", {}))),
        ("refused", f"{summary['refused']:,} messages" if summary.get("refused") else ""),
        ("replicas equal", "yes, bitwise" if summary["replicas_equal"] else "no"),
        ("fingerprint", summary["fingerprint"][:16]),
    ]
    return [(label, text) for label, text in rows if text]


def _shard_wire(summary: dict[str, Any]) -> str:
    if "shard_wire" not in summary:
        return ""
    return f"{size_text(summary['shard_bytes_per_step'])} per step: {summary['shard_wire']}"


def show(summary: dict[str, Any], notes: Iterable[str], stream: IO[str]) -> None:
    """Prints the summary of a run, `notes` and the run's directory; for a stopped run, how to continue."""
    console = PlainConsole(stream)
    if "stopped_after" in summary:
        by, step, where = summary["stopped_by"], summary["stopped_after"], summary["directory"]
        console.print(printable(f"stopped by {by} after step {step}; continue with --out {where} --resume"))
        return
    table = Table(show_header=False)
    for label, text in run_rows(summary):
        table.add_row(*map(printable, (label, text)))
    console.print(table)
    for note in notes:
        console.print(printable(note))
    console.print(printable(f"run directory: {summary['directory']}"))


def show_all(summaries: Sequence[dict[str, Any]], notes: Iterable[str], stream: IO[str]) -> None:
    """Prints several runs in one table, one row per run, and `notes`. The run with the lowest loss is marked.

    A run that failed has a row and a line with its error.
    """
    console = PlainConsole(stream)
    titles = ("optimizer", "validation loss", "sent per step", "less", "step time", "replicas equal")
    table = Table(Column("run", overflow="fold"), *titles)
    losses = [summary.get("val_loss") for summary in summaries]
    lowest = min((loss for loss in losses if loss is not None and isfinite(loss)), default=None)
    failed = []
    for summary, loss in zip(summaries, losses, strict=True):
        head = [printable(Path(summary["directory"]).name), printable(summary["optimizer"])]
        if "error" in summary:
            table.add_row(*head, "diverged" if summary["diverged"] else "failed", *["-"] * 4)
            failed.append(f"{head[0]}: {summary['error']}")
            continue
        table.add_row(
            *head,
            f"{loss_text(loss)}{' (lowest)' if loss is not None and loss == lowest else ''}",
            size_text(summary["bytes_sent_per_step"]),
            factor(summary["reduction"]),
            duration(summary["median_step_seconds"]),
            "yes" if summary["replicas_equal"] else "no",
        )
    console.print(table)
    for note in (*failed, *notes):
        console.print(printable(note))


def _waits(summary: dict[str, Any]) -> str:
    r"""The replica for which the others waited longest since the last start, and the network; "" where nobody waited.

    >>> found = {"seconds": [[0.0, 5.0], [0.0, 0.0]], "network_s": [0.5, 0.5], "slowest": 1, "lasted_s": 20.0}
    >>> print(*_waits({"waits": found, "seconds": 100.0}).split("; "), sep="\n")
    for replica 1, the slowest: 5.0 s (25% of the time of the others)
    for the network 0.5 s
    in 20.0 s of steps since the last start
    """
    waits = summary.get("waits")
    if not waits:
        return ""
    slowest, others = waits["slowest"], max(1, len(waits["seconds"]) - 1)
    mean = sum(row[slowest] for row in waits["seconds"]) / others
    network = sum(waits["network_s"]) / len(waits["network_s"])
    lasted_s = waits.get("lasted_s", summary["seconds"])  # waits of earlier starts are not in the summary
    share = mean / lasted_s
    named = f"for replica {slowest}, the slowest: {mean:.1f} s ({share:.0%} of the time of the others); "
    since = f"in {lasted_s:.1f} s of steps since the last start"
    return f"{named if share >= 0.01 else ''}for the network {network:.1f} s; {since}"


def _local_steps(counts: Sequence[int]) -> str:
    """The local steps of each replica; "" where all take all."""
    shown = ", ".join(map(str, counts[:16])) + (", ..." if len(counts) > 16 else "")
    return f"{shown} per round of replicas 0 to {len(counts) - 1}" if counts else ""


def _late(by_replica: dict[str, int]) -> str:
    """The steps in which replicas were late; "" for none."""
    return ", ".join(f"of replica {replica} in {times:,} steps" for replica, times in by_replica.items())


def _speed(summary: dict[str, Any]) -> str:
    examples, mfu = f"{summary['examples_per_second']:,.1f} examples/s", summary.get("mfu")
    tokens = f"{summary['tokens_per_second']:,.0f} tokens/s, " if "tokens_per_second" in summary else ""
    return f"{tokens}{examples}" + (f", MFU {mfu:.0%}" if mfu else "")


def _virtual(summary: dict[str, Any]) -> str:
    return ", virtual, in one process" if summary.get("simulated") else ""


def _predicted(summary: dict[str, Any]) -> str:
    return "predicted " if summary.get("seconds_predicted") else ""


def _skipped(by_parameter: dict[str, int]) -> str:
    """Counts the skipped contributions and names their parameters; "" for none."""
    if not by_parameter:
        return ""
    names = list(by_parameter)[:3] + ["..."] * (len(by_parameter) > 3)
    return f"{sum(by_parameter.values()):,} contributions that were not finite, of {', '.join(names)}"


def _bigram(summary: dict[str, Any]) -> str:
    return f" nats/byte (a bigram model: {summary['bigram_loss']:.4f})" if "bigram_loss" in summary else ""


def _scheme(chosen: dict[str, Any]) -> str:
    if "scheme_arguments" not in chosen:
        return str(chosen["scheme"])
    arguments = ", ".join(f"{key}={value}" for key, value in chosen["scheme_arguments"].items())
    return f"{chosen['scheme']}({arguments})"


def _level(level: dict[str, Any]) -> str:
    less = f" ({less_text(level['reduction'])})" if level["reduction"] else ""
    return f"{size_text(level['bytes_sent_per_step'])} per step{less}: {_scheme(level)}"
