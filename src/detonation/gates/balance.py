"""Balance: slower replicas take fewer local steps in a round, so that replicas of different speed
end their rounds together.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from detonation.core.agreement import StepGate
from detonation.core.link import Link
from detonation.core.round import LocalSteps

_ODD = 4


class Balance(StepGate):
    """Measures how long this replica's local steps last. Agrees with the other replicas on the
    number of local steps that each replica takes per round.

    A local step lasts from the end of one `step()` call to the end of the base optimizer's step in
    the next call. So it includes loading, forward and backward. The gate averages the durations of
    the local steps of a round. It leaves out durations above `_ODD` times the median, such as those
    of a step with an evaluation or a checkpoint. The slowest of the `shards` determines the
    duration of a replica. At the end of a round, each replica sends 8 bytes to each other replica,
    and waits for 8 bytes from each of them. On an accelerator, the host waits for these bytes, too.
    """

    def __init__(
        self, local_steps: LocalSteps, link: Link, shards: Sequence[Link], device: torch.device
    ) -> None:
        self.local_steps = local_steps
        self._link = link
        self._shards = shards
        self._device = device
        self._since: Any = None  # time mark at the end of the last step
        self._laps: list[tuple[Any, Any]] = []

    def idle(self, step: int) -> bool:
        """True if this replica takes no local step in `step`."""
        return not bool(self.local_steps.taken(step)[self._link.replica])

    def moved(self, step: int, idle: bool) -> None:
        """Records the duration of the local step that ends now, unless this replica was idle."""
        if not idle and self._since is not None:
            self._laps.append((self._since, time_mark(self._device)))

    def end(self, step: int) -> None:
        """Ends `step`. At the end of a round, agrees with the other replicas on the number of local
        steps of each replica; the call is then collective.
        """
        if self.local_steps.round.ends(step):
            lasted = typical([elapsed_ns(*lap) for lap in self._laps])
            everyone = self._link.collect(
                torch.tensor([lasted], dtype=torch.int64, device=self._device)
            ).view(-1)
            for link in self._shards:
                # Shards exchange last, because some may lack the duration of a lost replica.
                everyone = link.collect(everyone).amax(0)
            self.local_steps.agree(everyone.tolist())
            self._laps.clear()
        self._since = time_mark(self._device)


def typical(durations: Sequence[int]) -> int:
    """Returns the mean of `durations`, leaving out durations above `_ODD` times the median. Returns
    0 if there are no durations.

    >>> typical([2, 4, 3, 90]), typical([])
    (3, 0)
    """
    if not durations:
        return 0
    most = _ODD * statistics.median_low(durations)
    return int(statistics.fmean(each for each in durations if each <= most))


def time_mark(device: torch.device) -> Any:
    """Returns a mark of the current time: seconds on the host, or an event in the queue of an
    accelerator.
    """
    if device.type == "cpu":
        return time.perf_counter()
    module = torch.get_device_module(device)
    event = module.Event(enable_timing=True)
    event.record(module.current_stream(device))
    return event


def elapsed_ns(first: Any, last: Any) -> int:
    """Returns the nanoseconds between two time marks. On an accelerator, waits until the second
    mark is reached.
    """
    if isinstance(first, float):
        return int(1e9 * (last - first))
    last.synchronize()
    return int(1e6 * first.elapsed_time(last))
