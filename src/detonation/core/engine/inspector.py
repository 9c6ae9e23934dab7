"""Inspectors: each checks the signals of a message for bad values, bucket by bucket, and computes
one status for the whole message.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from detonation.core.compute.nonfinite import first_outside, inspected, signals_within
from detonation.core.runtime import Runtime


class SignalInspector:
    """Checks the signals of each message for bad values on the host, bucket by bucket, and computes
    one status for each message. The order of buckets is the same in all messages.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._status = 0

    def begin(self) -> None:
        """Begins a new message: forgets the status of the previous message."""
        self._status = 0

    def look(
        self, pieces: Sequence[Tensor | None], numbers: Sequence[int], engine: Any
    ) -> bool | Tensor:
        """Checks the signals of the next bucket for bad values; see `Verdict.bad`.

        Args:
            pieces: Signals of the parameters with the indices `numbers`.
            engine: Engine of the bucket.

        Shapes: any.
        """
        verdict = inspected(pieces, self._runtime)
        place = verdict.status
        assert isinstance(place, int)
        if place and not self._status:
            self._status = 1 + numbers[place - 1]
        return verdict.bad

    def status(self) -> int | Tensor:
        """The status of the message, from all its buckets since `begin`; see `Header`."""
        return self._status


class DeviceInspector(SignalInspector):
    """Checks signals for bad values on the device, so that the host need not wait for the
    result."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._numbers: list[list[int]] = []
        self._within: list[Tensor] = []

    def begin(self) -> None:
        self._numbers = []
        self._within = []

    def look(
        self, pieces: Sequence[Tensor | None], numbers: Sequence[int], engine: Any
    ) -> bool | Tensor:
        places, within = signals_within(pieces, self._runtime.device)
        self._numbers.append([numbers[place] for place in places])
        self._within.append(within)
        return within.all().logical_not()

    def status(self) -> int | Tensor:
        if not any(self._numbers):
            return 0
        return first_outside(self._numbers, self._within)


def inspector_of(runtime: Runtime) -> SignalInspector:
    """The inspector that checks signals in plain torch, on the host or on the device."""
    if runtime.decides_on_device:
        return DeviceInspector(runtime)
    return SignalInspector(runtime)
