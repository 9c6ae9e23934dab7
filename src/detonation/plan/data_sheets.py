"""Accelerators by their data sheets, and the time of an optimizer's step there before anybody has measured it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from detonation.choices import unknown
from detonation.cluster.network.profile import Step

LAUNCH_S = 5e-6
"""Seconds of the host for one operation of torch and its kernel launch; assumed, alike for all devices."""
REACHED = 0.85
"""The share of a data sheet's bandwidth that a copy reaches; assumed."""


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator. memory_bytes_per_s: bandwidth of its memory by the data sheet."""

    product: str
    memory_bytes_per_s: float

    def seconds(self, launches: float, nbytes: float) -> float:
        """The time of `launches` operations that move `nbytes`: the host or the memory bounds it, whichever is slower.

        >>> round(1e3 * DEVICES["h100"].seconds(launches=100, nbytes=2.8e9), 2)
        0.98
        """
        return max(launches * LAUNCH_S, nbytes / (REACHED * self.memory_bytes_per_s))


DEVICES = {
    "a100": DeviceSpec("A100 SXM 80GB", 2.039e12),
    "h100": DeviceSpec("H100 SXM", 3.35e12),
    "h200": DeviceSpec("H200 SXM", 4.8e12),
    "b200": DeviceSpec("B200", 8.0e12),
    "l40s": DeviceSpec("L40S", 0.864e12),
    "rtx4090": DeviceSpec("GeForce RTX 4090", 1.008e12),
    "rtx5090": DeviceSpec("GeForce RTX 5090", 1.792e12),
    "mi300x": DeviceSpec("Instinct MI300X", 5.3e12),
}
"""Data sheets of NVIDIA and AMD, by the name that `--device` takes."""


@dataclass(frozen=True)
class StepCounts:
    """The operations of a step of one scheme with its optimizer, and the bytes that they read and write.

    Counted on the device `meta` with plain torch (`python benchmarks/device_steps.py`). launches: their number.
    bytes_per_parameter: of the local shard. `local_` counts a step without an exchange.
    """

    launches: int
    bytes_per_parameter: float
    local_launches: int
    local_bytes_per_parameter: float


@cache
def step_counts(replicas: int) -> Mapping[str, StepCounts]:
    """The counts by scheme, as it is spelled and by its name for its defaults, of the nearest number of replicas."""
    table: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("device_steps.json").read_text())
    nearest = min(table, key=lambda counted: abs(math.log(max(1, replicas) / int(counted))))
    return {name: StepCounts(*row) for name, row in table[nearest].items()}


def device_spec(name: str) -> DeviceSpec:
    """The accelerator that `--device` names.

    Raises:
        ValueError: There is none of this name; the error lists them.
    """
    if name.lower() not in DEVICES:
        raise unknown("device", name, DEVICES)
    return DEVICES[name.lower()]


def prediction_note(name: str) -> str:
    """The line that says where predicted steps come from.

    >>> prediction_note("h100")
    'optimizer steps are predicted for the H100 SXM, 3,350 GB/s by its data sheet, in plain torch; probe measures them'
    """
    spec = device_spec(name)
    rate = f"{spec.memory_bytes_per_s / 1e9:,.0f} GB/s by its data sheet"
    return f"optimizer steps are predicted for the {spec.product}, {rate}, in plain torch; probe measures them"


def predicted_steps(
    device: DeviceSpec, shards: Sequence[Mapping[str, tuple[int, ...]]], replicas: int
) -> dict[str, Step]:
    """The optimizer's step of every scheme of the table on the rank with the largest shard, until `probe` measures it.

    The step runs in plain torch. Kernels that are compiled for the device take less.

    Args:
        shards: The local parameter shapes on each rank of a node.
    """
    numel = max(sum(map(math.prod, shapes.values())) for shapes in shards)
    return {
        name: Step(
            device.seconds(counts.launches, counts.bytes_per_parameter * numel),
            device.seconds(counts.local_launches, counts.local_bytes_per_parameter * numel),
        )
        for name, counts in step_counts(replicas).items()
    }
