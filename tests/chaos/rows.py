"""The rows of the gate's table, and its counts."""

import time
from dataclasses import dataclass, field


@dataclass
class Row:
    """One kind of fault.

    losses: a line for each fault by which something was lost. worst_s: the longest time from a fault until the run was
    right again; 0 where nothing waits. note: the reason where it was not tried.
    """

    name: str
    tried: int = 0
    losses: list[str] = field(default_factory=list)
    worst_s: float = 0.0
    note: str = ""

    @property
    def lost(self) -> int:
        return len(self.losses)

    def add(self, problem: str = "", since: float | None = None) -> None:
        """Counts one fault.

        problem: the loss by it, "" for none. since: when it happened, by `time.monotonic`.
        """
        self.tried += 1
        if problem:
            self.losses.append(problem)
        if since is not None:
            self.worst_s = max(self.worst_s, time.monotonic() - since)


def table(rows: list[Row]) -> str:
    """The table of the gate."""
    head = f"{'fault':42} {'tried':>6} {'survived':>9} {'lost':>5} {'worst time':>11}"
    lines = [head, "-" * len(head)]
    for row in rows:
        worst = f"{row.worst_s:.2f} s" if row.worst_s else "-"
        lines.append(
            f"{row.name:42} {row.tried:6} {max(row.tried - row.lost, 0):9} {row.lost:5} {worst:>11}"
        )
    lines += [f"{row.name}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, *(f"LOST {row.name}: {loss}" for row in rows for loss in row.losses)])
