"""How long do replicas stand still when one joins, and for what?

    python -m benchmarks.faults.joins --joins 20

Two replicas train, and newcomers join them one after the other and leave again. Each join prints
the longest time between the ends of two steps of replica 0, and its parts there.
"""

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.faults.spot_world import forked
from torch.nn.functional import mse_loss

import detonation as dt
from detonation.cluster.survive.agreement import ReplicaLeft
from detonation.cluster.survive.membership import Membership
from detonation.cluster.survive.surviving import SurvivingCommunicator
from detonation.cluster.survive.users import AxisUser
from detonation.core.optimizer import Replicated

TOKEN = b"joins are measured on loopback"
AROUND = 3
"""Steps after the one at which a newcomer enters that count as its join, too."""
PARTS: dict[str, tuple[type, str]] = {
    "until all wait": (AxisUser, "_await_guest"),
    "agreement": (Membership, "agree"),
    "group": (SurvivingCommunicator, "_formed"),
    "comparison": (Replicated, "verify"),
}
"""Each part of a join and the function that does it. The first contains the next two."""


class Clock:
    """Seconds in the functions of `PARTS` since the last step."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return function(*arguments, **named)
            finally:
                self.spent[part] += time.monotonic() - began

        return timed

    def parts(self) -> list[float]:
        """Seconds of each part; begins again."""
        spent = self.spent
        self.spent = dict.fromkeys(PARTS, 0.0)
        spent["until all wait"] -= spent["agreement"] + spent["group"]
        return list(spent.values())


def train(folder: Path, port: int, replica: int, width: int, pace_s: float) -> None:
    """The loop of a replica; with a negative `replica`, of a newcomer."""
    clock = Clock()
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, width), torch.nn.Tanh(), torch.nn.Linear(width, 16)
    )
    if replica < 0:
        optimizer, axis = dt.admitted(model, dt.Guest(store), token=TOKEN, timeout_s=120.0)
    else:
        axis = dt.elastic(replica=replica, replicas=2, store=store)
        base = dt.SignSGD(model.parameters(), lr=1e-3)
        optimizer = dt.replicate(base, model, axis, dt.demo(topk=4, chunk=16))
    door = dt.Admission(model, optimizer, token=TOKEN)
    signal.signal(signal.SIGTERM, lambda *_: axis.depart())
    before = time.monotonic()
    with contextlib.suppress(ReplicaLeft), (folder / str(replica)).open("w", buffering=1) as lines:
        while True:
            optimizer.renumber()
            time.sleep(pace_s)
            mse_loss(model(torch.rand(4, 32)), torch.zeros(4, 16)).backward()
            optimizer.step()
            optimizer.zero_grad()
            door.after_step()
            now = time.monotonic()
            numbers = [axis.size(), now - before, *clock.parts()]
            lines.write(" ".join(map(str, numbers)) + "\n")
            before = now


def rows_of(file: Path) -> list[list[float]]:
    """The complete lines of a replica."""
    if not file.exists():
        return []
    text = file.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [list(map(float, line.split())) for line in lines]


def until(holds: Callable[[], bool], what: str, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {limit_s:g} s")
        time.sleep(0.02)


def joins(folder: Path, count: int, width: int, pace_s: float) -> list[list[float]]:
    """Of each of `count` joins: the longest time between two steps, and the parts of that time."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    pids = [
        forked(lambda each=each: train(folder, port, each, width, pace_s), folder / f"{each}.error")
        for each in range(2)
    ]
    found = []
    seen = 0

    def steps_of(replicas: int, steps: int) -> bool:
        recent = rows_of(folder / "0")[seen:]
        return len([row for row in recent if row[0] == replicas]) >= steps

    try:
        until(lambda: steps_of(2, 20), "the first step")
        for number in range(count):
            seen = len(rows_of(folder / "0"))
            guest = -1 - number
            pid = forked(
                lambda guest=guest: train(folder, port, guest, width, pace_s),
                folder / f"{guest}.error",
            )
            pids.append(pid)
            until(lambda: steps_of(3, 2 * AROUND), f"newcomer {number}")
            rows = rows_of(folder / "0")[seen:]
            first = next(index for index, row in enumerate(rows) if row[0] == 3)
            found.append(max(rows[: first + AROUND], key=lambda row: row[1])[1:])
            seen = len(rows_of(folder / "0"))
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
            pids.remove(pid)
            until(lambda: steps_of(2, 10), "the step after a departure")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return found


def table(found: list[list[float]]) -> str:
    """Medians, and the longest, of the joins `found`."""
    lines = ["| seconds of a join | median | longest |", "|---|---|---|"]
    columns = list(zip(*found, strict=True))
    names = ["between two steps", *PARTS]
    for name, column in zip(names, columns, strict=True):
        lines.append(f"| {name} | {statistics.median(column):.3f} | {max(column):.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--joins", type=int, default=20)
    parser.add_argument("--width", type=int, default=64, help="of the hidden layer")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of each step's gradient")
    arguments = parser.parse_args()
    # forks of this process need not import the compiler, which an optimizer of torch imports
    dt.SignSGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with tempfile.TemporaryDirectory(prefix="joins-") as folder:
        found = joins(Path(folder), arguments.joins, arguments.width, arguments.pace)
    for row in found:
        print(" ".join(f"{each:.3f}" for each in row), file=sys.stderr)
    print(table(found))


if __name__ == "__main__":
    main()
