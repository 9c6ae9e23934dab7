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
class Step:
    """Seconds of an optimizer's step in which a message is made and everyone's are read, and of one without."""

    exchange_s: float
    local_s: float


@dataclass(frozen=True)
class Compute:
    """One step of a recipe's training on this machine, without the network.

    forward_backward_s: median, give or take `spread` (IQR / median). steps: what the optimizer's step takes under each
    scheme, with the base optimizer that the recipe has for it.
    """

    recipe: str
    parameters: int
    forward_backward_s: float
    spread: float
    steps: Mapping[str, Step] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """What `detonation probe` measured."""

    replicas: int
    shards: int
    backend: str
    axes: Mapping[str, Axis]
    compute: Compute | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> dict[str, Any]:
        """Writes it to `path`, and returns what stands there."""
        table = {"format": FORMAT, **asdict(self)}
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        return table

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
            return cls.of(table)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error}): measure again with detonation probe") from error

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Profile":
        """The profile that `asdict` made a table of."""
        axes = {name: _axis(axis) for name, axis in table["axes"].items()}
        compute = table["compute"] and _compute(table["compute"])
        return cls(**{**table, "axes": axes, "compute": compute})


def _axis(table: Mapping[str, Any]) -> Axis:
    operations = {
        name: Operation(**{**operation, "samples": [Sample(**sample) for sample in operation["samples"]]})
        for name, operation in table["operations"].items()
    }
    return Axis(**{**table, "operations": operations, "pairs": [Pair(**pair) for pair in table["pairs"]]})


def _compute(table: Mapping[str, Any]) -> Compute:
    return Compute(**{**table, "steps": {name: Step(**step) for name, step in table["steps"].items()}})
