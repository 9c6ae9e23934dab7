"""Measurements of a cluster, and `profile.json`, the file that holds them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROFILE_FORMAT = 1
SILENT_S = 1.0
SILENT_BYTES = 2**16
"""Silence after which `probe` sends a message, and its size."""


@dataclass(frozen=True)
class Sample:
    """Time of one message size: a rank sends `bytes_sent` in `seconds` (mean; `spread` is IQR /
    median)."""

    bytes_sent: int
    seconds: float
    spread: float


@dataclass(frozen=True)
class Operation:
    """A collective as one rank sees it, a straight line: seconds = latency_s + 8 * bytes_sent /
    rate_bits_per_s.

    All groups of the axis send at once, as in training, so a node sends at `per_node` times the
    rate. spread: the largest relative distance of a sample from the line.
    """

    latency_s: float
    rate_bits_per_s: float
    spread: float
    samples: Sequence[Sample] = ()

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + 8 * nbytes / self.rate_bits_per_s


@dataclass(frozen=True)
class LinkSample:
    """Two replicas that sent to each other at once, while all others were silent."""

    first: int
    second: int
    latency_s: float
    rate_bits_per_s: float


@dataclass(frozen=True)
class AxisProfile:
    """One axis of the mesh: `size` nodes, each with `per_node` ranks that share its link.

    silence_s: how much longer an all-gather of `SILENT_BYTES` takes after `SILENT_S` without any; 0
    was not measured.
    """

    size: int
    per_node: int
    operations: Mapping[str, Operation]
    pairs: Sequence[LinkSample] = ()
    silence_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """Seconds of an optimizer's step with an exchange (encoding and decoding, no network), and
    without an exchange."""

    exchange_s: float
    local_s: float


@dataclass(frozen=True)
class Compute:
    """One training step of a recipe on this machine, without the network.

    parameters: that are trained. forward_backward_s: median. spread: its IQR / median. steps: the
    times of the optimizer's step by scheme, each with the base optimizer that the recipe has for
    it. examples: per rank and step, over all micro-batches; None in a profile that does not say.
    """

    recipe: str
    parameters: int
    forward_backward_s: float
    spread: float
    steps: Mapping[str, Step] = field(default_factory=dict)
    examples: int | None = None


@dataclass(frozen=True)
class Profile:
    """Result of `detonation probe`."""

    replicas: int
    shards: int
    backend: str
    axes: Mapping[str, AxisProfile]
    compute: Compute | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> dict[str, Any]:
        """Writes the profile to `path`; returns the table in the file."""
        table = {"format": PROFILE_FORMAT, **asdict(self)}
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        return table

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """Reads the profile at `path`.

        Raises `ValueError` if it is no profile, or of another version.
        """
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} is no profile ({error}): make one with detonation probe --out {path}"
            ) from error
        version = None
        if isinstance(table, dict):
            version = table.pop("format", None)
        if version != PROFILE_FORMAT:
            raise ValueError(
                f"{path} has format {version}, this version reads {PROFILE_FORMAT}: measure again"
                " with probe"
            )
        try:
            return cls.of(table)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged ({error}): measure again with detonation probe"
            ) from error

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Profile":
        """Inverse of `asdict`."""
        axes = {name: axis_profile(axis) for name, axis in table["axes"].items()}
        steps = {}
        if table["compute"]:
            steps = {name: Step(**step) for name, step in table["compute"]["steps"].items()}
        compute = table["compute"] and Compute(**{**table["compute"], "steps": steps})
        return cls(**{**table, "axes": axes, "compute": compute})


def axis_profile(table: Mapping[str, Any]) -> AxisProfile:
    """Inverse of `asdict`."""
    operations = {
        name: Operation(
            **{**operation, "samples": [Sample(**sample) for sample in operation["samples"]]}
        )
        for name, operation in table["operations"].items()
    }
    return AxisProfile(
        **{
            **table,
            "operations": operations,
            "pairs": [LinkSample(**pair) for pair in table["pairs"]],
        }
    )
