"""Staging: messages of an accelerator in host memory, for a process group that carries no tensors of it."""

import torch
from torch import Tensor


class HostStaging:
    """Takes messages to the host and back, on the current stream.

    Pinned memory lets the accelerator copy by itself. Torch keeps freed pinned blocks, and hands one out again only
    after the copies that were started from it have ended, so that a buffer need not be held here.
    """

    @staticmethod
    def has_devices() -> bool:
        """True where this process may have tensors outside of host memory."""
        return torch.accelerator.is_available()

    def needed(self, tensor: Tensor) -> bool:
        """True where `tensor` is not in host memory."""
        return tensor.device.type != "cpu"

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A host buffer for a message with the dtype and of the device of `like`.

        Shapes: -> `shape`.
        """
        return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type != "cpu")

    def to_host(self, message: Tensor) -> Tensor:
        """A copy of `message` that the network may read: the host waits for it, and for nothing else but its stream.

        Shapes: any -> the same.
        """
        if not self.needed(message):
            return message
        host = self.empty(tuple(message.shape), message)
        host.copy_(message, non_blocking=True)
        if message.device.type != "cpu":
            torch.get_device_module(message.device).current_stream(message.device).synchronize()
        return host

    def to_device(self, host: Tensor, like: Tensor) -> Tensor:
        """The buffer `host` on the device of `like`; the copy runs on the current stream, and the host goes on.

        Shapes: any -> the same.
        """
        if not self.needed(like):
            return host
        message = torch.empty(host.shape, dtype=host.dtype, device=like.device)
        return message.copy_(host, non_blocking=True)
