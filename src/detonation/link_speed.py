"""The speed of a link: rate and latency of one tier of the network. The planner, the emulation and
the probe use it.
"""

import math
import re
from dataclasses import dataclass

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_PER_SECOND = {"us": 1e6, "ms": 1e3, "s": 1.0}
# in MBps a capital B means bytes, so the b of bps must be small
_FORM = re.compile(
    r"\s*([0-9.]+)\s*([kmg]?(?:bit|(?-i:b)ps))(?:/s)?\s*(?:,\s*([0-9.]+)\s*(us|ms|s)\s*)?",
    re.IGNORECASE,
)

SLOW_BACKENDS = ("gloo",)
"""Backends that users may choose for the communication between replicas."""


@dataclass(frozen=True)
class LinkSpeed:
    """Rate and latency of the link of a node. The link sends and receives at the same time.

    Args:
        rate_bits_per_s: Rate of each direction, for all ranks of the node together; above 0, may
            be infinite.
        latency_s: Latency of one direction, at least 0.

    Raises:
        ValueError: A value is out of range.
    """

    rate_bits_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.rate_bits_per_s > 0:
            raise ValueError(f"the rate of a link is {self.rate_bits_per_s} bit/s, must be above 0")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(
                f"the latency of a link is {self.latency_s} s, must be finite and at least 0"
            )

    @classmethod
    def parse(cls, text: str) -> "LinkSpeed":
        """Parses a rate and an optional latency, such as "100mbit,5ms", "1Gbit/s", "20Mbps" or
        "56kbit, 0.2s".

        >>> LinkSpeed.parse("0.1 Gbit/s, 5ms") == LinkSpeed.parse("100mbit,5ms")
        True
        """
        try:
            found = _FORM.fullmatch(text)
            assert found is not None
            rate, unit, latency, time = found.groups()
            seconds = 0.0
            if latency and time:
                seconds = float(latency) / _PER_SECOND[time.lower()]
            return cls(float(rate) * _RATES[unit.lower().replace("bps", "bit")], seconds)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"a link is {text!r}, must be a rate above 0 in bit, kbit, mbit or gbit (a second)"
                " and, optionally, a latency in us, ms or s, such as 100mbit,5ms; 1 MB/s is 8mbit"
            ) from error

    def seconds(self, nbytes: float, hops: int) -> float:
        """Returns the seconds to send `nbytes` in `hops` messages that follow one another. Each
        message costs one latency.
        """
        return 8 * nbytes / self.rate_bits_per_s + hops * self.latency_s

    def __str__(self) -> str:
        unit = next(
            (u for u in ("gbit", "mbit", "kbit") if self.rate_bits_per_s >= _RATES[u]), "bit"
        )
        rate = f"{self.rate_bits_per_s / _RATES[unit]:.4g}{unit}"
        if self.latency_s:
            return f"{rate},{self.latency_s * 1e3:.4g}ms"
        return rate
