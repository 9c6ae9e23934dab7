"""Overlap: buckets of gradients leave from hooks while backward still makes the others."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from detonation.core.flat.gradients import gradient
from detonation.core.flat.layout import local
from detonation.core.integrity import readback
from detonation.core.replicator.channel import Channel, Flight

SAMPLE = 1024


class OverlapError(RuntimeError):
    """Gradients that were sent during backward have changed since, came twice, or never had their step."""


class Side:
    """The stream of an accelerator on which buckets are encoded and sent; nothing on a CPU.

    Hooks run on whatever stream has made the gradient (FSDP2 has its own), so one of ours waits for each of them and
    keeps the buckets, and the memory that they share with the step before, in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device) if self._module else None

    def follow(self, *used: Tensor) -> None:
        """What it gets from now on waits for all that the current stream was given before.

        used: what it is to read, which may be forgotten at once: the memory is free when it has done so.
        """
        if self._module:
            self._stream.wait_stream(self._module.current_stream(self._device))
            for tensor in used:
                tensor.record_stream(self._stream)

    def current(self) -> AbstractContextManager[Any]:
        return self._module.stream(self._stream) if self._module else nullcontext()

    def join(self) -> None:
        """The other way round: the current stream waits for it."""
        if self._module:
            self._module.current_stream(self._device).wait_stream(self._stream)


class Overlap:
    """The gradients of one step, sent bucket by bucket as backward makes them.

    The order is that of the channel's carriers on every rank, in whatever order hooks fire: a bucket that is complete
    waits for those before it, so that no two ranks ever start collectives in different orders. What has not left at
    the end of backward `finish` sends; a gradient that did not come is zero.
    """

    def __init__(self, parameters: Mapping[str, Tensor], channel: Channel, step: int, side: Side) -> None:
        self.step = step
        self._names, self._parameters, self._side = list(parameters), list(parameters.values()), side
        self._flight = channel.flight(step)
        self._carriers, self._left = len(channel.carriers), deque(channel.carriers)
        self._here: set[int] = set()  # numbers of the parameters whose gradients came
        self._seen: dict[int, _Seen] = {}  # what they were when their first piece left
        self._samples: list[tuple[Tensor, Tensor]] = []
        self._device = channel.device
        side.follow()

    @property
    def began(self) -> bool:
        """Whether a bucket is on its way."""
        return len(self._left) < self._carriers

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Within it backward sends."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
            if parameter.requires_grad  # it may have been frozen since
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> tuple[Flight, readback.Later | None]:
        """Sends what is left. Raises `OverlapError`; what only a device knows of it is for `refuse_unequal`, later."""
        self._refuse_changed()
        self._side.follow()
        while self._left:
            self._send_next()
        self._side.join()
        if not readback.late(self._device):
            return self._flight, None
        return self._flight, readback.Later(self._equal().view(1))

    @torch.no_grad()
    def _arrived(self, index: int, parameter: Tensor) -> None:
        if index in self._here:
            raise OverlapError(
                f"the gradient of {self._names[index]} came twice within overlap(): put one backward into it, the last "
                "before step(); a model that runs a sharded module twice cannot overlap"
            )
        self._here.add(index)
        self._side.follow()
        while self._left and self._here >= self._left[0].bucket.parameters:
            self._send_next()

    def _send_next(self) -> None:
        carrier = self._left[0]
        signals: list[Tensor | None] = [None] * len(self._parameters)
        with self._side.current():
            for index in carrier.bucket.parameters:
                signals[index] = gradient(self._names[index], self._parameters[index])
            pieces = carrier.bucket.cut(signals)
            for index in carrier.bucket.parameters:
                self._seen.setdefault(index, _Seen(self._parameters[index]))
            self._keep_sample(pieces)
            self._flight.send(carrier, signals)
        self._left.popleft()

    def _keep_sample(self, pieces: list[Tensor | None]) -> None:
        """Some numbers of the largest piece: scaling by torch's GradScaler leaves no trace in a tensor's version."""
        largest = max((p for p in pieces if p is not None), key=Tensor.numel, default=None)
        if largest is not None:
            sample = largest.reshape(-1)[:: max(1, largest.numel() // SAMPLE)]
            self._samples.append((sample, sample.clone()))

    def _refuse_changed(self) -> None:
        for index, seen in self._seen.items():
            if not seen.same(self._parameters[index]):
                raise _changed(f"the gradient of {self._names[index]}")
        if not readback.late(self._device):
            refuse_unequal(bool(self._equal()))

    def _equal(self) -> Tensor:
        """Whether the samples are what they were."""  # [] bool
        same = [(now.nan_to_num() == then.nan_to_num()).all() for now, then in self._samples]
        return torch.stack(same).all() if same else torch.ones((), dtype=torch.bool, device=self._device)


def refuse_unequal(equal: bool) -> None:
    """Raises `OverlapError` unless the samples of gradients were still `equal` to what was sent."""
    if not equal:
        raise _changed("a gradient")


def _changed(which: str) -> OverlapError:
    text = f"{which} changed after it was sent within overlap()"
    return OverlapError(f"{text}: clip, unscale or zero gradients without overlap()")


class _Seen:
    """What a parameter's gradient was: torch counts the changes of each tensor, of a DTensor and its shard apart."""

    def __init__(self, parameter: Tensor) -> None:
        self._gradient, self._versions = parameter.grad, _versions(parameter.grad)

    def same(self, parameter: Tensor) -> bool:
        return parameter.grad is self._gradient and _versions(parameter.grad) == self._versions


def _versions(gradient: Tensor | None) -> tuple[int, ...]:
    return () if gradient is None else (gradient._version, local(gradient)._version)
