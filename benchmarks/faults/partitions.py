"""Losses, departures, joins and partitions of an elastic run: what goes on, how soon, what is lost, and how the
others end. Needs root.

    python -m benchmarks.faults.partitions --out partitions.json

Replicas and the store are in network namespaces, joined by a switch. Each scenario starts a run of
`detonation train --elastic --meet`, cuts something once it trains, and watches the steps in its
metrics and the ends of its processes. A scenario whose result is in `--out` is not run again, so
the command can be interrupted; it prints the table of all results.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compare.queue import made_by
from benchmarks.faults.forks import Fork
from benchmarks.lab import INTERFACE, NamespaceCluster, namespace_cluster

from detonation.cli.command import run_command
from detonation.link_speed import LinkSpeed

FAST, SLOW = LinkSpeed.parse("1gbit"), LinkSpeed.parse("1mbit")
PORT = 29400
NOWHERE = "02:00:00:00:00:01"
"""A hardware address that nobody has: frames to it are dropped."""
WATCH_S = 75.0
"""How long a scenario is watched at most after its last change."""
_SETTINGS = (
    "train.batch_size=2",
    "model.hidden_size=64",
    "model.feed_forward=128",
    "data.context=64",
    "train.validate_every=0",
    "train.log_every=1000",
    "train.validation_batches=2",
)
_MORE, _START_S = 3, 180.0


@dataclass
class Ending:
    """The end of a replica: seconds after the cut, exit code, last line."""

    seconds: float
    code: int
    line: str


@dataclass
class Outcome:
    """What came of a scenario. stepped_s: the longest pause between two steps. lost: steps that the
    metrics lack or have twice. came: what a newcomer says of its first step. made_by: torch, the
    processor and the commit.
    """

    goes_on: list[int]
    stepped_s: float | None
    ends: dict[int, Ending] = field(default_factory=dict)
    lost: int = 0
    came: str = ""
    made_by: dict[str, str] = field(default_factory=made_by)


class Command(Fork):
    """A command line in a node, as a fork of this process, which has imported it."""

    def __init__(
        self, cluster: NamespaceCluster, node: int, output: Path, arguments: Sequence[str]
    ) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            cluster.enter(node)
            os.setsid()
            target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(target, 1)
            os.dup2(target, 2)
            # not those of a parent that captures what it prints
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", closefd=False)
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            code = run_command(list(arguments))
        finally:
            sys.stderr.flush()
            os._exit(code)


class Run:
    """A run in `cluster`: replica i in node i, the store in the last node.

    Of several stores, the last one is in the node of the last replica, the others in nodes of their
    own. After these comes the node of a newcomer.
    """

    def __init__(
        self, cluster: NamespaceCluster, folder: Path, replicas: int, stores: int = 1
    ) -> None:
        self.cluster, self.folder, self.replicas = cluster, folder, replicas
        self.metrics = folder / "run" / "metrics.jsonl"
        nodes = [*range(replicas, replicas + stores)]
        if stores > 1:
            nodes[-1] = replicas - 1
        addresses = [f"{cluster.address(node)}:{PORT}" for node in nodes]
        self.address = ",".join(addresses)
        self.stores = [
            self._command(node, f"meet{node}", "meet", address)
            for node, address in zip(nodes, addresses, strict=True)
        ]
        shared = ["train", "quick-lm", "--elastic", "--meet", self.address, "--shards", "1"]
        shared += ["--replicas", str(replicas), "--steps", "1000000", "--interface", INTERFACE]
        shared += ["--out", str(folder / "run"), "--set", *_SETTINGS]
        self.processes = [
            self._command(node, str(node), *shared, "--replica", str(node))
            for node in range(replicas)
        ]

    def join(self) -> None:
        """A newcomer on a node of its own."""
        words = ["train", "quick-lm", "--join", self.address, "--shards", "1", "--steps", "1000000"]
        words += ["--interface", INTERFACE, "--out", str(self.folder / "newcomer")]
        words += ["--set", *_SETTINGS]
        number = len(self.processes)
        node = len(self.cluster.names) - 1
        self.processes.append(self._command(node, str(number), *words))

    def lost(self) -> int:
        """How many steps the metrics lack, or have twice."""
        steps = [json.loads(line) for line in self.metrics.read_text().splitlines()[:-1]]
        counts = Counter(row["step"] for row in steps if "loss" in row)
        return sum(counts[step] != 1 for step in range(min(counts), max(counts) + 1))

    def came(self) -> str:
        """What the newcomer says of its first step."""
        said = self.folder / f"{self.replicas}.txt"
        lines = said.read_text(errors="replace").splitlines() if said.exists() else []
        return next((line for line in lines if "came in after step" in line), "")

    def _command(self, node: int, name: str, *arguments: str) -> "Command":
        return Command(self.cluster, node, self.folder / f"{name}.txt", arguments)

    def step(self) -> int:
        """The last whole record's step."""
        if not self.metrics.exists():
            return 0
        with self.metrics.open("rb") as file:
            file.seek(max(0, self.metrics.stat().st_size - 8000))
            lines = [line for line in file.read().split(b"\n") if line.endswith(b"}")]
        found = [json.loads(line)["step"] for line in lines if line.startswith(b'{"step')]
        return found[-1] if found else 0

    def last_line(self, name: str) -> str:
        """The last line of the output of a replica, or of the store."""
        lines = (self.folder / f"{name}.txt").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def close(self) -> None:
        for process in (*self.processes, *self.stores):
            process.kill()


Act = Callable[[Run], None]


def _neighbour(run: Run, source: int, target: int, cut: bool) -> None:
    """Drops what node `source` sends to node `target`, or sends it again."""
    verb = ["replace"] if cut else ["del"]
    more = ["lladdr", NOWHERE, "nud", "permanent"] if cut else []
    where = ["ip", "neigh", *verb, run.cluster.address(target), *more, "dev", INTERFACE]
    subprocess.run(run.cluster.command(source, where), check=True)


def one_way(source: int, target: int) -> tuple[Act, Act]:
    """Cuts one direction of a link, and mends it."""
    return (
        lambda run: _neighbour(run, source, target, True),
        lambda run: _neighbour(run, source, target, False),
    )


def both_ways(*pairs: tuple[int, int]) -> tuple[Act, Act]:
    """Cuts links in both directions, and mends them; node -1 is the store."""

    def act(run: Run, cut: bool) -> None:
        for a, b in pairs:
            ends = [run.replicas if each < 0 else each for each in (a, b)]
            _neighbour(run, ends[0], ends[1], cut)
            _neighbour(run, ends[1], ends[0], cut)

    return lambda run: act(run, True), lambda run: act(run, False)


def off(*nodes: int) -> tuple[Act, Act]:
    """Takes nodes off the switch, and puts them back."""

    def act(run: Run, state: str) -> None:
        for node in nodes:
            link = ["ip", "-n", run.cluster.switch, "link", "set", f"port{node}", state]
            subprocess.run(link, check=True)

    return lambda run: act(run, "down"), lambda run: act(run, "up")


def reset(node: int) -> tuple[Act, Act]:
    """Ends the connections of a node to the store, as a firewall does that answers."""

    def act(run: Run) -> None:
        kill = ["ss", "-K", "dst", run.cluster.address(run.replicas), "dport", "=", str(PORT)]
        subprocess.run(run.cluster.command(node, kill), check=True, capture_output=True)

    return act, lambda run: None


def stores_end(number: int) -> tuple[Act, Act]:
    """Kills the first `number` stores."""

    def act(run: Run) -> None:
        for store in run.stores[:number]:
            store.kill()

    return act, lambda run: None


def store_and_host(node: int) -> tuple[Act, Act]:
    """Kills the first store, and half a second later takes a node off the switch."""

    def act(run: Run) -> None:
        stores_end(1)[0](run)
        time.sleep(0.5)
        off(node)[0](run)

    return act, off(node)[1]


def sent(number: int, *replicas: int) -> tuple[Act, Act]:
    """Sends a signal to replicas."""

    def act(run: Run) -> None:
        for replica in replicas:
            os.kill(run.processes[replica].pid, number)

    return act, lambda run: None


def together(*acts: tuple[Act, Act]) -> tuple[Act, Act]:
    """Several, one after the other without a wait."""

    def act(run: Run) -> None:
        for each, _ in acts:
            each(run)

    return act, lambda run: None


JOIN: tuple[Act, Act] = (lambda run: run.join(), lambda run: None)
SLOWER: tuple[Act, Act] = (
    lambda run: run.cluster.shape(SLOW),
    lambda run: run.cluster.shape(FAST),
)


@dataclass(frozen=True)
class Scenario:
    """A cut, for `seconds`, or for ever (0), among `replicas`."""

    name: str
    cut: tuple[Act, Act]
    seconds: float = 0.0
    replicas: int = 3
    stores: int = 1


def _three(name: str, cut: tuple[Act, Act]) -> list[Scenario]:
    lasts = ((3.0, "3 s"), (30.0, "30 s"), (0.0, "for ever"))
    return [Scenario(f"{name}, {text}", cut, seconds) for seconds, text in lasts]


HALVES = [(0, 2), (0, 3), (1, 2), (1, 3)]
SCENARIOS = [
    Scenario("a replica is killed", sent(signal.SIGKILL, 1)),
    Scenario("replica 0 is killed", sent(signal.SIGKILL, 0)),
    Scenario("a replica is asked to leave", sent(signal.SIGTERM, 1)),
    Scenario("a replica joins", JOIN),
    Scenario(
        "one of three stores and replica 1 are killed",
        together(stores_end(1), sent(signal.SIGKILL, 1)),
        stores=3,
    ),
    *_three("0 cannot send to 1", one_way(0, 1)),
    *_three("0 and 1 cut off from each other", both_ways((0, 1))),
    *_three("1 cut off from the store", both_ways((1, -1))),
    Scenario("the store resets 1", reset(1)),
    *_three("1 off the network", off(1)),
    Scenario("1 cut off from 0 and 2, not from the store", both_ways((0, 1), (1, 2))),
    Scenario("two replicas cut off from each other", both_ways((0, 1)), 0.0, 2),
    Scenario("halves, 0 and 1, 2 and 3; all reach the store", both_ways(*HALVES), 0.0, 4),
    Scenario("halves, 2 and 3 without the store", both_ways(*HALVES, (2, -1), (3, -1)), 0.0, 4),
    *_three("all cut off from the store", both_ways((0, -1), (1, -1), (2, -1))),
    Scenario("the process of the store is killed", stores_end(1)),
    Scenario("one of three stores is killed", stores_end(1), stores=3),
    Scenario("one of three stores cut off from all, 30 s", off(3), 30.0, stores=3),
    Scenario("the host of one of three stores, with replica 2, off", off(2), stores=3),
    Scenario("one of five stores, then such a host, in 0.5 s", store_and_host(2), stores=5),
    Scenario("two of three stores are killed", stores_end(2), stores=3),
    Scenario("two of three stores cut off from all, for ever", off(3, 4), stores=3),
    Scenario("all links at 1 Mbit/s, 60 s", SLOWER, 60.0),
]


def measured(scenario: Scenario) -> Outcome:
    """Runs one scenario."""
    with (
        tempfile.TemporaryDirectory(prefix="partitions-") as folder,
        namespace_cluster(scenario.replicas + max(1, scenario.stores - 1) + 1, FAST) as cluster,
    ):
        run = Run(cluster, Path(folder), scenario.replicas, scenario.stores)
        try:
            _await_start(run)
            return _watched(run, scenario)
        finally:
            run.close()


def _await_start(run: Run) -> None:
    deadline = time.monotonic() + _START_S
    while run.step() < 20:
        if time.monotonic() > deadline:
            said = {name: run.last_line(name) for name in map(str, range(run.replicas))}
            raise RuntimeError(f"the run has not begun within {_START_S:g} s: {said}")
        time.sleep(0.05)


def _watched(run: Run, scenario: Scenario) -> Outcome:
    cut, mend = scenario.cut
    began = time.monotonic()
    cut(run)
    before, changed, mended = run.step(), began, not scenario.seconds
    stepped_s: float | None = None
    longest = 0.0
    ends: dict[int, Ending] = {}
    while time.monotonic() - began < scenario.seconds + WATCH_S and len(ends) < run.replicas:
        now = time.monotonic() - began
        if not mended and now >= scenario.seconds:
            mend(run)
            mended = True
        step = run.step()
        if step > before:
            longest = max(longest, time.monotonic() - changed)
            before, changed = step, time.monotonic()
        _note_ends(run, ends, now)
        time.sleep(0.01)
        if mended and now > scenario.seconds + 50 and not ends and changed > began + now - 1:
            break
        if ends and now > max(each.seconds for each in ends.values()) + 10:
            break
    goes_on = [each for each in range(len(run.processes)) if each not in ends]
    stepped_s = round(longest, 1) if goes_on and before else None
    return Outcome(goes_on, stepped_s, ends, run.lost(), run.came())


def _note_ends(run: Run, ends: dict[int, Ending], now: float) -> None:
    for number, process in enumerate(run.processes):
        if number not in ends and (code := process.poll()) is not None:
            ends[number] = Ending(round(now, 1), code, run.last_line(str(number)))


def table(results: dict[str, Any]) -> str:
    """The results as a table in Markdown."""
    lines = ["| what happens | go on | they stand still | steps lost | the others end |"]
    lines.append("|---|---|---|---|---|")
    for name, found in results.items():
        go_on = ", ".join(map(str, found["goes_on"])) or "none"
        still = "" if found["stepped_s"] is None else f"{found['stepped_s']:.1f} s"
        ends = "; ".join(
            f"{number} after {end['seconds']:.1f} s with {end['code']}: {end['line'][:160]}"
            for number, end in found["ends"].items()
            if end["code"] != -signal.SIGKILL
        )
        lost = found.get("lost", "")
        lines.append(f"| {name} | {go_on} | {still} | {lost} | {ends or found.get('came', '')} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["DETONATION_TOKEN"] = "a token for a benchmark"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("partitions.json"))
    parser.add_argument("--only", default="", help="scenarios whose name has this text")
    asked = parser.parse_args(arguments)
    results = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    for scenario in SCENARIOS:
        if scenario.name in results or asked.only not in scenario.name:
            continue
        results[scenario.name] = asdict(measured(scenario))
        asked.out.write_text(json.dumps(results, indent=1))
        print(table({scenario.name: results[scenario.name]}).splitlines()[-1], flush=True)
    ordered = {each.name: results[each.name] for each in SCENARIOS if each.name in results}
    print(table(ordered))


if __name__ == "__main__":
    main()
