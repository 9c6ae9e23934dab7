"""Elastic training on machines that come and go as spot machines did: recovery by kind of event, and goodput.

    python -m benchmarks.faults.spot --trace FILE [--zone us-east-2b] [--events 100]
    python -m benchmarks.faults.spot --table
    python -m benchmarks.faults.spot --kills 1000 --machines 4    one of four is killed, again and again
    python -m benchmarks.faults.spot --trace FILE --zone us-east-2b --stores 3 --machines 8 --events 40 \\
        --undisturbed 5 --out benchmarks/results/spot-stores    the hosts of the stores go, too: some minutes

A trace is a file of lines `zone,seconds,available`, one for each change, of 16 machines asked for. With fewer
`--machines` a count becomes the same share of them, rounded up. Each machine is a process, killed or asked to leave
(SIGTERM) where the trace takes it; which one, and whether with a notice (`--notice`, a share of the events), is drawn
by `--seed`. Stretches without a change are skipped but for some steps, and a virtual clock adds their seconds: seconds
of recovery are real, those of training are the trace's.

Goodput is the machine-seconds of steps that count, of those in which a machine was there: with the log of updates, by
which a world goes on after the loss of all machines, and as if there were none. Beside it stands the same trace under
the practice of restarting all from the newest checkpoint at any change, by the same clock and with the cost of a start
that was measured here; and a kinder one, which also saves before any change but a kill.

Machines are forks of a process that has imported torch. So the seconds of an import, measured once, are added to each
machine that comes and to each restart. A step stands still for `--pace-s`, as a host does whose accelerator computes.
A second call continues after the events that the file of results has.

With `--stores` that many of the machines with which a world begins keep a store, and go like the others; all end with
most of them, and those that are there begin anew. All steps have the same number of examples, which the lines of the
machines prove. `--undisturbed` runs, with other data each, tell which losses the same number of steps would have had.
"""

import argparse
import csv
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from benchmarks.compare.queue import made_by
from benchmarks.faults.spot_machine import BATCH, SCHEMES, WARM
from benchmarks.faults.spot_world import (
    Conductor,
    Event,
    as_row,
    last_mark,
    seconds_of_a_replayed_step,
)

ASKED = 16
RESULTS = Path(__file__).parents[1] / "results" / "spot"
LEFT_SOME = ("kill", "notice", "join")
Row = dict[str, Any]


def counts(lines: Iterable[str]) -> dict[str, list[tuple[float, int]]]:
    """Of each zone: moments and numbers of machines, in order of time."""
    found: dict[str, list[tuple[float, int]]] = {}
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        found.setdefault(row["zone"], []).append((float(row["seconds"]), int(row["available"])))
    return found


def events(
    changes: Sequence[tuple[float, int]], machines: int, notice: float, seed: int
) -> list[Event]:
    """The events of a zone for `machines` of the `ASKED`; `notice` is the share of those announced.

    >>> [(each.at, each.kind) for each in events([(0, 0), (300, 16), (600, 15), (900, 1), (1200, 0)], 2, 1.0, 0)]
    [(300, 'start'), (900, 'notice')]
    """
    scaled = [(at, -(-count * machines // ASKED)) for at, count in changes]
    kept = [(0.0, 0)]
    for at, count in scaled:
        if count != kept[-1][1]:
            kept.append((at, count))
    ends = [at for at, _ in kept[2:]] + [scaled[-1][0]]
    rng = random.Random(seed)
    return [
        Event(at, before, after, until, after < before and rng.random() < notice)
        for (_, before), (at, after), until in zip(kept, kept[1:], ends, strict=False)
        if until > at
    ]


def kills(machines: int, times: int) -> list[Event]:
    """One machine is killed and another comes, `times` times.

    >>> [(each.kind, each.after) for each in kills(3, 1)]
    [('start', 3), ('kill', 2), ('join', 3)]
    """
    counts = [0, machines, *[machines - 1, machines] * times]
    return [Event(60.0 * n, *pair, 60.0 * (n + 1)) for n, pair in enumerate(pairwise(counts))]


def split(rows: Sequence[Row]) -> list[Row]:
    """The rows, of which one where all began anew is two: all were killed, and some started.

    >>> row = {"kind": "kill", "before": 3, "after": 2, "at": 60.0, "until": 90.0, "anew": True}
    >>> [(each["kind"], each["before"], each["after"], each["until"]) for each in split([row])]
    [('kill, all gone', 3, 0, 60.0), ('start', 0, 2, 90.0)]
    """
    found = []
    for row in rows:
        if not row.get("anew"):
            found.append(row)
            continue
        found.append(row | {"kind": "kill, all gone", "after": 0, "until": row["at"]})
        found.append(row | {"kind": "start", "before": 0})
    return found


def elastic_goodput(
    rows: Sequence[Row], import_s: float, checkpoint_s: float, logs: bool
) -> tuple[float, float]:
    """Machine-seconds that were there, and those of them that count, as the events of `rows` went.

    Where the last machines are killed, what they did since the newest checkpoint is lost. With `logs` only the steps
    under way are, and the next machines take the others from the log: as many as fit into these seconds of the trace,
    each in the seconds that were measured for one. A broken event costs all until the next one.
    """
    there = idle = unsaved = 0.0
    ordinary_s = median_step_s(rows)
    world: list[tuple[float, float, int]] = []  # stretches since all began together
    for row in split(rows):
        before, after, at, until = row["before"], row["after"], row["at"], row["until"]
        whole, stalled = after * (until - at), max(row["stalled_s"], row["longest_s"])
        log_s = unsaved * row["replay_step_s"] / ordinary_s if logs else -row["replay_s"]
        cost = {
            "kill": after * stalled,
            "notice": after * stalled,
            "join": before * stalled + sum(each + import_s for each in row["came_s"]),
            "start": after * (row["until_s"] + import_s + log_s),
        }.get(row["kind"], 0.0)
        there += whole
        idle += whole if row["broken"] else min(cost, whole)
        if row["kind"] == "start":
            world = []
        elif row["kind"] == "kill, all gone" and world:
            mark, began = last_mark(at, checkpoint_s), world[0][0]
            since = max(mark, began)
            unsaved = (
                at - since + (unsaved if mark <= began else 0.0)
            )  # and what it had taken from the log itself
            lost = sum(
                count * (end - max(begin, since)) for begin, end, count in world if end > since
            )
            idle += before * ordinary_s * (1 + row["lost_steps"]) if logs else lost
        elif row["kind"] == "notice, all gone":
            idle, unsaved = idle + before * row["until_s"], 0.0
        world.append((at, until, after))
    return there, there - idle


def restart_goodput(
    rows: Sequence[Row], restart_s: float, checkpoint_s: float, saves: bool
) -> tuple[float, float]:
    """The same where each event starts all again from the newest checkpoint, in `restart_s`.

    saves: Before an event that is no kill, a checkpoint is saved.
    """
    there = idle = 0.0
    ready = 0.0  # when all trained after the last restart
    for row in rows:
        before, after, at, until = row["before"], row["after"], row["at"], row["until"]
        if before and not (saves and not row["kind"].startswith("kill")):
            idle += before * max(0.0, at - max(last_mark(at, checkpoint_s), ready))
        there += after * (until - at)
        ready = min(at + restart_s, until)
        idle += after * (ready - at)
    return there, there - idle


def logged_restart_goodput(
    rows: Sequence[Row], restart_s: float, checkpoint_s: float
) -> tuple[float, float]:
    """The same where each start then takes the steps of the log after the newest checkpoint.

    Only the steps under way are lost. Each step of the log takes the seconds that were measured.
    """
    there = idle = unsaved = 0.0
    began = ready = 0.0  # the last restart, and when all trained after it
    ordinary_s = median_step_s(rows)
    for row in rows:
        before, after, at, until = row["before"], row["after"], row["at"], row["until"]
        if before:
            mark = last_mark(at, checkpoint_s)
            trained = max(0.0, at - max(mark, ready))
            unsaved = trained + (unsaved if mark <= began else 0.0)
            idle += before * min(ordinary_s, trained)
        there += after * (until - at)
        replay_s = unsaved * row["replay_step_s"] / ordinary_s
        began, ready = at, min(at + restart_s + replay_s, until)
        idle += after * (ready - at)
    return there, there - idle


def median_step_s(rows: Sequence[Row]) -> float:
    return statistics.median([row["ordinary_s"] for row in rows if row["ordinary_s"]] or [1.0])


def import_seconds(times: int = 3) -> float:
    """The median seconds in which a new process imports torch and the package."""
    taken = []
    for _ in range(times):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", WARM], check=True)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def spread(values: Sequence[float]) -> str:
    """Median, 95th percentile and worst.

    >>> spread([0.1, 0.2, 0.9])
    '0.20 / 0.90 / 0.90'
    """
    if not values:
        return "-"
    ordered = sorted(values)
    return " / ".join(
        f"{ordered[int(share * (len(ordered) - 1) + 0.5)]:.2f}" for share in (0.5, 0.95, 1)
    )


def measured(what: str, values: Sequence[float]) -> str:
    return f"| {what} | {len(values)} | {spread(values)} |"


def violations(rows: Sequence[Row]) -> list[str]:
    """What must not be: replicas that differ, memory that was lost, events that were not handled."""
    return [
        f"{row['zone']} event {row['index']} ({row['kind']}): {text}"
        for row in rows
        for text in [
            *row["unequal"],
            *row["forgotten"],
            *([row["broken"]] if row["broken"] else []),
        ]
    ]


def batches(rows: Sequence[Row]) -> str:
    """How often the stores were lost, and in how many steps the batch was whole."""
    whole, short = (sum(row[name] for row in rows) for name in ("whole", "short"))
    before = [[0, 0], *[row["stores"] for row in rows]]
    fewer = [
        row
        for row, (left, of) in zip(rows, before, strict=False)
        if row["before"] and not row["anew"] and row["stores"][1] == of and row["stores"][0] < left
    ]
    anew = [row["until_s"] for row in rows if row["anew"]]
    return (
        f"Stores: {len(fewer)} times some were lost and the run went on with the others; "
        f"{len(anew)} times most were, and all began anew in {spread(anew)} s. Each of the "
        f"{BATCH} examples was computed once in {whole} of {whole + short} steps; in the others a "
        "machine was killed."
    )


def interval(losses: Sequence[float]) -> tuple[float, float]:
    """In which a further run lies with 95 %, if the `losses` are normally distributed.

    >>> [round(each, 3) for each in interval([1.0, 1.1, 0.9, 1.0, 1.0])]
    [0.785, 1.215]
    """
    number = len(losses)
    quantile = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}[number]
    reach = quantile * statistics.stdev(losses) * (1 + 1 / number) ** 0.5
    return statistics.mean(losses) - reach, statistics.mean(losses) + reach


def judged_loss(last: Row, args: argparse.Namespace) -> str:
    """The last loss, and what undisturbed runs of as many steps come to; runs those that are missing."""
    path = args.out / "undisturbed.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    steps, losses = last["step"], []
    for seed in range(args.seed + 1, args.seed + 1 + args.undisturbed):
        name = f"{last['scheme']}, {last['machines']} machines, {steps} steps, data {seed}"
        if name not in known:
            with (
                tempfile.TemporaryDirectory(prefix="spot-") as folder,
                Conductor(
                    Path(folder), args.scheme, pace_s=0.0, limit_s=3600, seed=seed
                ) as conductor,
            ):
                known[name] = conductor.undisturbed(last["machines"], steps)
            path.write_text(json.dumps(known, indent=1))
            print(f"undisturbed, {name}: {known[name]}", flush=True)
        losses.append(known[name])
    low, high = interval(losses)
    within = "within" if low <= last["loss"] <= high else "outside"
    return (
        f"{last['zone']}: the loss after {steps} steps is {last['loss']:.5f}, {within} the 95 % interval {low:.5f} to "
        f"{high:.5f} of a run that nothing disturbs ({len(losses)} such runs)."
    )


def table(rows: Sequence[Row], restart_s: float) -> str:
    """The results of some zones, with the same settings."""
    first = rows[0]
    import_s = statistics.median(row["import_s"] for row in rows)
    starts = [
        row["until_s"] - row["replay_s"]
        for row in rows
        if row["kind"] == "start" and not row["broken"]
    ]
    start_s = statistics.median(starts or [0.0]) + import_s
    zones = sorted({row["zone"] for row in rows})
    some = {
        name: [row for row in rows if row["kind"] == name and not row["broken"]]
        for name in LEFT_SOME
    }
    lines = [
        f"{len(rows)} events, {first['machines']} machines, {first['scheme']}, checkpoints every "
        f"{first['checkpoint_s']:g} s, notice for {first['notice']:.0%} of those that go, seed {first['seed']}, "
        f"steps of {first['pace_s']:g} s and more; "
        f"load {spread([row['load'] for row in rows])} on {os.cpu_count()} cores ({platform.machine()}, "
        f"torch {torch.__version__}); import {import_s:.2f} s",
        "",
        "| seconds: median / 95 % / worst | events | |",
        "|---|---|---|",
        measured("kill: the others stand still", [row["stalled_s"] for row in some["kill"]]),
        measured("notice: the others stand still", [row["stalled_s"] for row in some["notice"]]),
        measured("notice: until the machine is free", [row["left_s"] for row in some["notice"]]),
        measured("join: the others' longest step", [row["longest_s"] for row in some["join"]]),
        measured(
            "join: until the first newcomer trains", [min(row["came_s"]) for row in some["join"]]
        ),
        measured(
            "join: until all train, for each",
            [row["until_s"] / len(row["came_s"]) for row in some["join"]],
        ),
        measured("start from nothing, with the load", starts),
        measured("steps of the log after it", [row["replay_s"] for row in rows if row["replayed"]]),
        "",
        f"| goodput | elastic, with the log | elastic | "
        f"restart in {start_s:.1f} s | same, saves if told | same, with the log | "
        f"restart in {restart_s:g} s | same, saves if told | same, with the log |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for zone in [*zones, *(["all"] if len(zones) > 1 else [])]:
        of_zone = [
            [row for row in rows if row["zone"] == name]
            for name in (zones if zone == "all" else [zone])
        ]
        every = first["checkpoint_s"]
        found = [
            [elastic_goodput(each, import_s, every, logs) for each in of_zone]
            for logs in (True, False)
        ]
        for seconds in (start_s, restart_s):
            found += [
                [restart_goodput(each, seconds, every, saves) for each in of_zone]
                for saves in (False, True)
            ]
            found.append([logged_restart_goodput(each, seconds, every) for each in of_zone])
        shares = [
            sum(good for _, good in each) / max(1e-9, sum(there for there, _ in each))
            for each in found
        ]
        lines.append(f"| {zone} | " + " | ".join(f"{100 * share:.2f} %" for share in shares) + " |")
    bad, step_s = (
        violations(rows),
        statistics.median(row["ordinary_s"] for row in rows if row["ordinary_s"]),
    )
    again_s = statistics.median(row["replay_step_s"] for row in rows)
    lost = [row["lost_steps"] for row in rows if row["after"] and row["kind"] != "start"]
    gone = [row for row in rows if not row["after"]]
    lines += [
        "",
        f"Steps lost while a machine was left: {sum(lost)} in {len(lost)} events. All machines went {len(gone)} times, "
        f"{sum(row['kind'].startswith('notice') for row in gone)} with a notice (lost steps there: "
        f"{sum(row['lost_steps'] for row in gone if row['kind'].startswith('notice'))}; with the others, that the log "
        f"lacks: {sum(row['lost_steps'] for row in gone if row['kind'].startswith('kill'))}). "
        f"A step took {1000 * step_s:.0f} ms, to take it again {1000 * again_s:.1f} ms. "
        f"Sums of memories compared: {sum(row['checked'] for row in rows)}. Violations: {len(bad)}.",
        *bad,
    ]
    if first.get("stores_at_most"):
        lines.append(batches(rows))
    return "\n".join(lines)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def play(zone: str, todo: Sequence[Event], path: Path, args: argparse.Namespace) -> None:
    """Handles the events of a zone that its file of results has not, and adds a line for each."""
    done = read(path)
    settings = {"zone": zone, "machines": args.machines, "notice": args.notice, "seed": args.seed}
    settings |= {"scheme": args.scheme, "checkpoint_s": args.checkpoint_s, "pace_s": args.pace_s}
    settings |= {"stores_at_most": args.stores}
    first = {"stores_at_most": 0} | done[0] if done else settings
    if other := {key: first[key] for key in settings if first[key] != settings[key]}:
        raise SystemExit(f"{path} has results with {other}: give another --out")
    if len(done) >= len(todo):
        return
    settings["import_s"] = done[0]["import_s"] if done else import_seconds()
    again = seconds_of_a_replayed_step
    settings["replay_step_s"] = (
        done[0]["replay_step_s"] if done else again(args.scheme, args.machines)
    )
    settings |= made_by()
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="spot-") as folder,
        Conductor(
            Path(folder),
            args.scheme,
            args.checkpoint_s,
            args.steps,
            args.pace_s,
            args.limit_s,
            args.stores,
            args.seed,
        ) as conductor,
        path.open("a", buffering=1) as file,
    ):
        for index in range(len(done), len(todo)):
            outcome = conductor.handle(todo[index], random.Random(f"{args.seed}/{zone}/{index}"))
            row = as_row(outcome, index=index, load=os.getloadavg()[0], **settings)
            file.write(json.dumps(row) + "\n")
            print(
                f"{zone} {index + 1} of {len(todo)}: {outcome.kind} {outcome.before} -> {outcome.after}",
                flush=True,
            )


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path)
    parser.add_argument(
        "--kills", type=int, default=0, help="in the place of a trace: so many kills and joins"
    )
    parser.add_argument("--zone", action="append", help="one or more; all by default")
    parser.add_argument("--machines", type=int, default=8)
    parser.add_argument("--events", type=int, help="of each zone, from the first; all by default")
    parser.add_argument(
        "--notice",
        type=float,
        default=0.5,
        help="share of the events that take machines, from 0 to 1",
    )
    parser.add_argument("--scheme", choices=SCHEMES, default="demo")
    parser.add_argument(
        "--checkpoint-s", type=float, default=600.0, help="seconds of the trace between checkpoints"
    )
    parser.add_argument("--steps", type=int, default=3, help="between two events, at least")
    parser.add_argument(
        "--pace-s", type=float, default=0.05, help="seconds of a step in which the host only waits"
    )
    parser.add_argument(
        "--stores", type=int, default=0, help="machines that keep a store: an odd number, or 0"
    )
    parser.add_argument(
        "--undisturbed", type=int, default=0, help="2 to 8 runs of the same steps without an event"
    )
    parser.add_argument(
        "--limit-s", type=float, default=120.0, help="an event that takes longer is broken"
    )
    parser.add_argument(
        "--restart-s", type=float, default=60.0, help="another cost of a restart, for the table"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder with a file of results for each zone"
    )
    parser.add_argument("--table", action="store_true", help="only print what there is")
    args = parser.parse_args(words)
    if args.stores and args.stores % 2 == 0:
        parser.error(f"--stores is {args.stores}: take 0, or an odd number")
    if args.undisturbed == 1 or not 0 <= args.undisturbed <= 8:
        parser.error(f"--undisturbed is {args.undisturbed}: take 0, or 2 to 8")
    if args.trace is None and not args.table and not args.kills:
        parser.error("--trace is needed, a file of lines zone,seconds,available, or --kills")
    return args


def run(args: argparse.Namespace) -> None:
    """Plays what is missing, and prints what there is."""
    if args.kills:
        args.zone = ["kills"]
        play("kills", kills(args.machines, args.kills), args.out / "kills.jsonl", args)
    elif not args.table:
        found = counts(args.trace.read_text().splitlines())
        for zone in args.zone or found:
            todo = events(found[zone], args.machines, args.notice, args.seed)[: args.events]
            play(zone, todo, args.out / f"{zone}.jsonl", args)
    rows = [row for path in sorted(args.out.glob("*.jsonl")) for row in read(path)]
    rows = [row for row in rows if row["zone"] in (args.zone or {row["zone"]} - {"kills"})]
    print(table(rows, args.restart_s))
    lasts = {row["zone"]: row for row in rows if row.get("step")}
    for last in lasts.values() if args.undisturbed else ():
        print(judged_loss(last, args))


if __name__ == "__main__":
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the machines, too
    run(parsed())
