"""Readback: the copy of numbers from a device to the host, which reads them once it no longer has to wait."""

from typing import Any

import torch
from torch import Tensor


class Readback:
    """A copy, made in the background, of a small tensor that no longer changes.

    Shapes: any; `read` returns nested lists of the same shape.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._event = numbers, None
        if numbers.device.type != "cpu":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            module = torch.get_device_module(numbers.device)
            self._event = module.Event()  # over when the current stream has done all that it was given so far
            self._event.record(module.current_stream(numbers.device))

    def wait(self) -> Tensor:
        """The copy on the host. Waits as `read` does.

        Shapes: as the tensor.
        """
        if self._event:
            self._event.synchronize()
        return self._numbers

    def read(self) -> list[Any]:
        """The numbers as lists. Waits for the work that the device got before the copy, not for later work."""
        return self.wait().tolist()
