"""Overlap: hooks send buckets of gradients while backward still computes the others."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from detonation.core import runtime
from detonation.core.base_error import DetonationError
from detonation.core.flat.tensors import local, local_gradients
from detonation.core.replicator.channel import Channel, Transfer

SAMPLED_VALUES = 1024


class OverlapError(DetonationError, RuntimeError):
    """Gradients that were sent during backward have changed since, came twice, or never had their
    step."""


class CommStream:
    """The stream of an accelerator on which buckets are encoded and sent; nothing on a CPU.

    Hooks run on the stream that computed the gradient (FSDP2 has its own), so this stream waits for
    each of them. It orders the buckets, and their use of the memory that they share with the
    previous step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = self._module.Stream(device) if self._module else None

    def wait_for_current(self, *used: Tensor) -> None:
        """Makes the comm stream wait for the current stream.

        Args:
            used: Tensors that the comm stream reads; the caller may release them at once.
        """
        if self._module:
            self._stream.wait_stream(self._module.current_stream(self._device))
            for tensor in used:
                tensor.record_stream(self._stream)

    def active(self) -> AbstractContextManager[Any]:
        """Context in which operations go to the comm stream."""
        return self._module.stream(self._stream) if self._module else nullcontext()

    def join(self) -> None:
        """Makes the current stream wait for the comm stream."""
        if self._module:
            self._module.current_stream(self._device).wait_stream(self._stream)


class Overlap:
    """The gradients of one step, sent bucket by bucket as backward computes them.

    The order is that of the channel's pipelines on every rank, in whatever order hooks fire: a
    bucket that is complete waits for the buckets before it, so that no two ranks ever start
    collectives in different orders. `finish` sends the rest after backward; a gradient that did not
    come is zero.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], channel: Channel, step: int, stream: CommStream
    ) -> None:
        self.step = step
        self._parameters, self._names, self._channel, self._stream = (
            parameters,
            list(parameters),
            channel,
            stream,
        )
        self._transfer = channel.start(step)
        self._count, self._left = len(channel.pipelines), deque(channel.pipelines)
        self._everything = frozenset(range(len(self._names)))
        self._arrived: set[int] = set()  # numbers of the parameters whose gradients came
        self._versions: dict[
            str, tuple[Tensor | None, tuple[int, ...]]
        ] = {}  # when their first piece left
        self._samples: list[tuple[Tensor, Tensor]] = []
        self._device = channel.runtime.device
        stream.wait_for_current()

    @property
    def began(self) -> bool:
        """True once a bucket was sent."""
        return len(self._left) < self._count

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context in which backward sends."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters.values())
            if parameter.requires_grad  # it may have been frozen since
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> tuple[Transfer, runtime.Readback | None]:
        """Sends the rest.

        Raises `OverlapError` for changed gradients, or returns the numbers for `refuse_unequal`.
        """
        for name, seen in self._versions.items():
            gradient = self._parameters[name].grad
            if gradient is not seen[0] or _versions(gradient) != seen[1]:
                raise _changed(f"the gradient of {name}")
        missing = [i for i, each in enumerate(self._parameters.values()) if each.grad is None]
        if missing:
            self._channel.unused.miss(self._transfer.message, missing)
        on_device = runtime.decides_on_device(self._device)
        if not on_device:
            refuse_unequal(bool(self._equal()))
        self._stream.wait_for_current()
        while self._left:
            self._send_next()
        self._stream.join()
        return self._transfer, runtime.Readback(self._equal().view(1)) if on_device else None

    @torch.no_grad()
    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        if index in self._arrived:
            raise OverlapError(
                f"the gradient of {self._names[index]} came twice within overlap(): put one"
                " backward into it, the last before step(); a model that runs a sharded module"
                " twice cannot overlap"
            )
        self._arrived.add(index)
        self._stream.wait_for_current()
        while self._left:
            # the last bucket needs all gradients, because its header says which are missing
            last = len(self._left) == 1
            needed = self._everything if last else self._left[0].bucket.parameters
            if not self._arrived >= needed:
                break
            self._send_next()

    def _send_next(self) -> None:
        pipeline = self._left[0]
        signals: list[Tensor | None] = [None] * len(self._names)
        with self._stream.active(), self._channel.runtime.exact_arithmetic():
            for index in pipeline.bucket.parameters:
                name = self._names[index]
                parameter = self._parameters[name]
                (signals[index],) = local_gradients({name: parameter})
                self._versions.setdefault(name, (parameter.grad, _versions(parameter.grad)))
            pieces = pipeline.bucket.cut(signals)
            largest = max((p for p in pieces if p is not None), key=Tensor.numel, default=None)
            if largest is not None:  # torch's GradScaler does not change the version of a tensor
                sample = largest.reshape(-1)[:: max(1, largest.numel() // SAMPLED_VALUES)]
                self._samples.append((sample, sample.clone()))
            self._channel.send_bucket(self._transfer, pipeline, pieces)
        self._left.popleft()

    def _equal(self) -> Tensor:
        """True if the samples have not changed."""  # [] bool
        same = [(now.nan_to_num() == then.nan_to_num()).all() for now, then in self._samples]
        return (
            torch.stack(same).all()
            if same
            else torch.ones((), dtype=torch.bool, device=self._device)
        )


def refuse_unequal(equal: bool) -> None:
    """Raises `OverlapError` unless the samples of the gradients were `equal` to the sent ones."""
    if not equal:
        raise _changed("a gradient")


def _changed(which: str) -> OverlapError:
    text = f"{which} changed after it was sent within overlap()"
    return OverlapError(
        f"{text}: clip by replicate(clip=...), and unscale or zero gradients without overlap()"
    )


def _versions(gradient: Tensor | None) -> tuple[int, ...]:
    """The version counters of a tensor and of its local shard, which torch counts separately for a
    DTensor."""
    return () if gradient is None else (gradient._version, local(gradient)._version)
