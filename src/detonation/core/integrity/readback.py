"""Later: numbers on their way from a device to the host, which reads them when it does not have to wait any more."""

from typing import Any

import torch
from torch import Tensor


def late(device: torch.device) -> bool:
    """Whether what lies on `device` is decided on there, and the host hears of it later: it would have to wait."""
    return device.type != "cpu"


class Later:
    """The numbers of a small tensor that nobody changes any more."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._event = numbers, None
        if numbers.device.type != "cpu":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = _event(numbers.device)

    def read(self) -> list[Any]:
        """As lists. Waits for what the device was given before them, not for what it was given since."""
        if self._event:
            self._event.synchronize()
        return self._numbers.tolist()


def _event(device: torch.device) -> Any:
    """Over when the current stream has done all that it has been given so far."""
    event = torch.get_device_module(device).Event()
    event.record(torch.get_device_module(device).current_stream(device))
    return event
