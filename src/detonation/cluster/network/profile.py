"""Measurements of a cluster, and `profile.json`, the file that holds them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from detonation.whole_files import json_text

PROFILE_FORMAT = 1
SILENT_S = 1.0
SILENT_BYTES = 2**16
"""`probe` sends nothing for `SILENT_S` seconds, and then times a message of `SILENT_BYTES`
bytes.
"""


@dataclass(frozen=True)
class Sample:
    """Mean time of messages of one size: a rank sends `bytes_sent` bytes in `seconds`.

    spread: interquartile range / median of the measured times. median_s, slowest_s: median and
    largest of these times; 0 in profiles of older versions.
    """

    bytes_sent: int
    seconds: float
    spread: float
    median_s: float = 0.0
    slowest_s: float = 0.0


@dataclass(frozen=True)
class Operation:
    """Time of a collective on one rank, as a line: seconds = latency_s + 8 * bytes_sent /
    rate_bits_per_s.

    All groups of the axis send at the same time, as in training, so a node sends at `per_node`
    times this rate. spread: largest relative distance of a measured sample from the line.
    """

    latency_s: float
    rate_bits_per_s: float
    spread: float
    samples: Sequence[Sample] = ()

    def seconds(self, nbytes: float) -> float:
        return self.latency_s + self.transfer_s(nbytes)

    def transfer_s(self, nbytes: float) -> float:
        """Returns the seconds that the transfer of `nbytes` bytes takes without the latency."""
        return 8 * nbytes / self.rate_bits_per_s


@dataclass(frozen=True)
class LinkSample:
    """Latency and rate of the link between two replicas, measured while both replicas sent."""

    first: int
    second: int
    latency_s: float
    rate_bits_per_s: float


@dataclass(frozen=True)
class AxisProfile:
    """Measurements of one mesh axis: `size` nodes, each with `per_node` ranks that share the link
    of the node.

    silence_s: additional seconds of an all-gather of `SILENT_BYTES` bytes after a pause of
    `SILENT_S` seconds without messages; 0 if it was not measured.
    """

    size: int
    per_node: int
    operations: Mapping[str, Operation]
    pairs: Sequence[LinkSample] = ()
    silence_s: float = 0.0


@dataclass(frozen=True)
class Step:
    """Duration of an optimizer step.

    exchange_s: seconds of a step with an exchange, including encoding and decoding, but not the
    network. local_s: seconds of a step without an exchange.
    """

    exchange_s: float
    local_s: float


@dataclass(frozen=True)
class Compute:
    """Times of one training step of a recipe on this machine, without the network.

    parameters: number of trained parameters. forward_backward_s: median seconds of forward and
    backward. spread: interquartile range / median of these seconds. steps: times of the optimizer
    step for each scheme, with the recipe's base optimizer for that scheme. examples: number of
    examples per rank and step, over all micro-batches; None if it is not recorded.
    """

    recipe: str
    parameters: int
    forward_backward_s: float
    spread: float
    steps: Mapping[str, Step] = field(default_factory=dict)
    examples: int | None = None


@dataclass(frozen=True)
class Profile:
    """The result of `detonation probe`: measurements of the axes and of the training step."""

    replicas: int
    shards: int
    backend: str
    axes: Mapping[str, AxisProfile]
    compute: Compute | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> dict[str, Any]:
        """Writes the profile to the file `path`. Returns the table that the file holds."""
        table = {"format": PROFILE_FORMAT, **asdict(self)}
        path.write_text(json_text(table, indent=1) + "\n", encoding="utf-8")
        return table

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """Reads the profile at `path`.

        Raises `ValueError` if the file is no profile, or has the format of another version.
        """
        try:
            table = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} is no network profile ({error}): make one with detonation probe --out"
                f" {path}"
            ) from error
        version = None
        if isinstance(table, dict):
            version = table.pop("format", None)
        if version != PROFILE_FORMAT:
            raise ValueError(
                f"{path} has format {version}, but this version reads {PROFILE_FORMAT}: measure"
                " again with detonation probe"
            )
        try:
            return cls.of(table)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path} is damaged ({error}): measure again with detonation probe"
            ) from error

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Profile":
        """Makes a profile from a table as `dataclasses.asdict` returns it."""
        axes = {name: axis_profile(axis) for name, axis in table["axes"].items()}
        steps = {}
        if table["compute"]:
            steps = {name: Step(**step) for name, step in table["compute"]["steps"].items()}
        compute = table["compute"] and Compute(**{**table["compute"], "steps": steps})
        return cls(**{**table, "axes": axes, "compute": compute})


def axis_profile(table: Mapping[str, Any]) -> AxisProfile:
    """Makes the profile of an axis from a table as `dataclasses.asdict` returns it."""
    operations = {}
    for name, operation in table["operations"].items():
        samples = [Sample(**sample) for sample in operation["samples"]]
        operations[name] = Operation(**{**operation, "samples": samples})
    pairs = [LinkSample(**pair) for pair in table["pairs"]]
    return AxisProfile(**{**table, "operations": operations, "pairs": pairs})
