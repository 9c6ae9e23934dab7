"""The order and the time of parts under `--minutes`, and what an earlier report spares."""

import hashlib
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from benchmarks.gpu.children import ROOT
from benchmarks.gpu.common import TIME_WAS_UP, Findings, read_findings

SHARES = {"profile": 150, "right": 150, "waiting": 80, "memory": 60, "occupancy": 100}
"""The parts that decide most, in their order, and how they share the time."""
MORE = ("fast", "training", "twin", "first", "world", "law")
"""Parts that use what is left of the time; `law` only if it is named."""
LEAST_S = 15
"""Seconds below which no part starts: a process imports torch first."""
SOURCES = (
    "src/detonation",
    "benchmarks/gpu",
    "benchmarks/accelerator",
    "tests/laws",
    "tests/world",
)
"""Folders on which the findings depend."""


@dataclass
class Clock:
    """The end of the time of all parts, on the monotonic clock that processes share."""

    ends_at: float

    @classmethod
    def of(cls, minutes: float) -> "Clock":
        """A clock that starts now."""
        return cls(time.monotonic() + 60 * minutes)

    def left_s(self) -> float:
        """Seconds until the end."""
        return self.ends_at - time.monotonic()

    def end_of(self, part: str, after: list[str]) -> float:
        """When `part` should be done.

        A part gets what the parts `after` it do not need by their shares of the time left, so that
        time that one part spares goes to the next.
        """
        share = SHARES.get(part, 0)
        reserved = sum(SHARES.get(each, 0) for each in after)
        if not reserved:
            return self.ends_at
        return time.monotonic() + self.left_s() * max(share, 1) / (share + reserved)


def parts_by_worth(wanted: list[str]) -> list[str]:
    """The wanted parts, in the order of what they tell for the time that they need."""
    return [part for part in [*SHARES, *MORE] if part in wanted]


def build_of(device: str, tiny: bool) -> str:
    """A digest of the sources, versions and device on which findings depend."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            digest.update(f"{file.relative_to(ROOT)}\n".encode())
            digest.update(file.read_bytes())
    name = device
    if device == "cuda":
        name = torch.cuda.get_device_name(0)
    kernels = ""
    if find_spec("triton") is not None:
        import triton

        kernels = triton.__version__
    digest.update(f"{torch.__version__} {kernels} {name} {tiny}".encode())
    return digest.hexdigest()[:16]


def continued(path: Path, title: str, build: str) -> Findings:
    """The findings with which a part begins: those of an earlier run of the same build that passed,
    or none.
    """
    earlier = read_findings(path)
    if earlier is None or not build or earlier.build != build:
        return Findings(path, title=title, build=build)
    if not earlier.complete:
        if path.stem not in SHARES:  # other parts cannot go on in their midst
            return Findings(path, title=title, build=build)
        earlier.checks -= len(earlier.failures)
        earlier.failures.clear()
        earlier.left_out.clear()
        earlier.notes = [note for note in earlier.notes if not note.endswith(TIME_WAS_UP)]
        earlier.done = False
    return earlier
