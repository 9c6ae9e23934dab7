"""What a row of the gate's table says, and how the gate counts."""

import time
from dataclasses import dataclass, field


@dataclass
class Row:
    """One kind of fault: how often it was tried, how often nothing was lost, what was, and the longest it took.

    worst_s is from the fault until things were right again, in seconds; 0 where nobody waits. note: why not tried.
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
        """Counts one fault, with what was lost by it, and the time since it happened (a `time.monotonic`)."""
        self.tried += 1
        if problem:
            self.losses.append(problem)
        if since is not None:
            self.worst_s = max(self.worst_s, time.monotonic() - since)


def table(rows: list[Row]) -> str:
    """The table of the gate."""
    head = f"{'fault':34} {'tried':>6} {'survived':>9} {'lost':>5} {'worst time':>11}"
    lines = [head, "-" * len(head)]
    for row in rows:
        worst = f"{row.worst_s:.2f} s" if row.worst_s else "-"
        lines.append(f"{row.name:34} {row.tried:6} {max(row.tried - row.lost, 0):9} {row.lost:5} {worst:>11}")
    lines += [f"{row.name}: {row.note}" for row in rows if row.note]
    return "\n".join([*lines, *(f"LOST {row.name}: {loss}" for row in rows for loss in row.losses)])
