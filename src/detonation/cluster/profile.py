"""Profile: what was measured of a cluster, as it stands in `profile.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass(frozen=True)
class Sample:
    """One size of one operation: a rank sends `bytes_sent` in `seconds` (median; `spread` is their IQR / median)."""

    bytes_sent: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class Operation:
    """A straight line through the samples: seconds = latency_s + 8 * bytes_sent / rate_bits_per_s, as one rank sees it.

    All groups of the axis talk at once, as in training, so a node sends `per_node` times the rate. spread: the largest
    relative distance of a sample from the line.
    """

    latency_s: float
    rate_bits_per_s: float
    spread: float
    samples: Sequence[Sample] = ()

    def seconds(self, nbytes: float) -> float:
        """How long the operation takes in which a rank sends `nbytes`."""
        return self.latency_s + 8 * nbytes / self.rate_bits_per_s


@dataclass(frozen=True)
class Pair:
    """Two places of an axis that sent to each other at once, nobody else talking."""

    first: int
    second: int
    latency_s: float
    rate_bits_per_s: float


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh: `size` places, each with `per_node` ranks that share its wire."""

    size: int
    per_node: int
    operations: Mapping[str, Operation]
    pairs: Sequence[Pair] = ()

    @property
    def slowest(self) -> Pair | None:
        """The pair with the lowest rate."""
        return min(self.pairs, key=lambda pair: pair.rate_bits_per_s, default=None)


@dataclass(frozen=True)
class Compute:
    """One step of a recipe's training on this machine, without the network.

    step_s: what the optimizer's step takes under each scheme, its own messages included.
    """

    recipe: str
    parameters: int
    forward_backward_s: float
    spread: float
    step_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """What `detonation probe` measured."""

    replicas: int
    shards: int
    backend: str
    axes: Mapping[str, Axis]
    compute: Compute | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """The profile at `path`. Raises `ValueError` where it is not one of this version."""
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} is no profile ({error}): make one with detonation probe --out {path}") from error
        version = table.pop("format", None) if isinstance(table, dict) else None
        if version != FORMAT:
            raise ValueError(f"{path} has format {version}, this version reads {FORMAT}: measure again with probe")
        try:
            axes = {name: _axis(axis) for name, axis in table.pop("axes").items()}
            compute = table.pop("compute")
            return cls(axes=axes, compute=compute and Compute(**compute), **table)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}): measure again with detonation probe") from error


def _axis(table: dict[str, Any]) -> Axis:
    operations = {
        name: Operation(**{**op, "samples": [Sample(**sample) for sample in op["samples"]]})
        for name, op in table.pop("operations").items()
    }
    return Axis(operations=operations, **{**table, "pairs": [Pair(**pair) for pair in table["pairs"]]})
