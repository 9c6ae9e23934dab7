"""Overlap: hooks send buckets of gradients while backward still computes other gradients."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from detonation.core import runtime
from detonation.core.base_error import DetonationError
from detonation.core.flat.tensors import (
    GradientStamp,
    gradient_stamps,
    largest_local_shape,
    local,
    local_gradients,
)
from detonation.core.replicator.channel import Channel, Transfer

SAMPLED_VALUES = 1024


class OverlapError(DetonationError, RuntimeError):
    """Raised if gradients that backward sent in `overlap` changed after they were sent, or were
    computed twice, or if no `step()` followed. Training can continue after all ranks have loaded a
    checkpoint or a state.
    """


class CommStream:
    """The accelerator stream on which buckets are encoded and sent. On a CPU, its methods do
    nothing.

    A gradient hook runs on the stream that computed the gradient, and FSDP2 uses several streams.
    So this stream waits for the stream of each hook before it sends a bucket. Because all buckets
    use this one stream, they are sent in order, and no step overwrites a buffer that the previous
    step still needs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None
        self._stream: Any = None
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream(device)

    def wait_for_current(self, *used: Tensor) -> None:
        """Makes the comm stream wait for the work that is queued on the current stream.

        Args:
            used: Tensors that the comm stream reads; the caller may release them at once.
        """
        if self._module:
            self._stream.wait_stream(self._module.current_stream(self._device))
            for tensor in used:
                tensor.record_stream(self._stream)

    def active(self) -> AbstractContextManager[Any]:
        """Context manager in which operations run on the comm stream."""
        if self._module:
            return self._module.stream(self._stream)  # type: ignore[no-any-return]
        return nullcontext()

    def join(self) -> None:
        """Makes the current stream wait for the work that is queued on the comm stream."""
        if self._module:
            self._module.current_stream(self._device).wait_stream(self._stream)


class Overlap:
    """Sends the gradients of one step bucket by bucket, while backward computes other gradients.

    Every rank sends the buckets in the same order, even if backward completes them in different
    orders: a complete bucket waits for the buckets before it. So no two ranks start collectives in
    different orders. `finish` sends the remaining buckets after backward; a missing gradient counts
    as zero.

    Args:
        stream: Stream on which an accelerator encodes and sends; None on a CPU.
        may_send: See `Replicated.overlap`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        channel: Channel,
        step: int,
        stream: CommStream | None,
        may_send: Callable[[], bool] | None = None,
    ) -> None:
        self.step = step
        self._ask = may_send
        self._may_send = True
        self._parameters = parameters
        self._names = list(parameters)
        self._channel = channel
        self._stream = stream
        self._transfer = channel.start(step)
        self._count = len(channel.pipelines)
        self._left = deque(channel.pipelines)
        self._everything = frozenset(range(len(self._names)))
        # indices of the parameters whose gradients backward has computed
        self._arrived: set[int] = set()
        # version of each gradient when its first piece was sent; see `GradientStamp`
        self._stamps: dict[str, GradientStamp] = {}
        self._samples: list[tuple[Tensor, Tensor]] = []
        # for each storage, by its data pointer: the names of the sent gradients in this storage
        self._views: dict[int, list[str]] = {}
        if stream:
            stream.wait_for_current()

    @property
    def began(self) -> bool:
        """True if at least one bucket was sent."""
        return len(self._left) < self._count

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Context manager that registers gradient hooks, so that backward sends gradients."""
        hooks = []
        for index, parameter in enumerate(self._parameters.values()):
            if parameter.requires_grad:  # hooks cannot be registered on frozen parameters
                hook = partial(self._on_gradient, index)
                hear: Any = parameter.register_post_accumulate_grad_hook  # this method is untyped
                hooks.append(hear(hook))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def finish(self) -> tuple[Transfer, runtime.Readback | None]:
        """Sends all buckets that are not sent yet, and checks that sent gradients have not changed.

        Raises `OverlapError` if gradients changed. On an accelerator, the device makes a part of
        this check. The caller later passes the returned result to `refuse_unequal`.
        """
        now = gradient_stamps({name: self._parameters[name] for name in self._stamps})
        for name, seen in self._stamps.items():
            same = now[name][0] is seen[0] and now[name][1] == seen[1]
            if not same or (now[name][2] != seen[2] and self._owns_memory_of(name)):
                raise _changed(f"the gradient of {name}")
        missing = [i for i, each in enumerate(self._parameters.values()) if each.grad is None]
        if missing:
            self._channel.unused.miss(self._transfer.message, missing)
        on_device = self._channel.runtime.decides_on_device
        if not on_device:
            refuse_unequal(bool(self._equal()))
        if self._stream:
            self._stream.wait_for_current()
        while self._left:
            self._send_next()
        if self._stream:
            self._stream.join()
        equal = None
        if on_device:
            equal = runtime.Readback(self._equal().view(1))
        return self._transfer, equal

    @torch.no_grad()
    def abandon(self) -> None:
        """Ends the exchange without using any gradient. All ranks call this method.

        Ranks may have sent different numbers of buckets. So each rank first sends zeros in place of
        its remaining buckets, and then waits for all messages. If `may_send` returned False, no
        rank has sent a bucket, and this method does nothing.
        """
        if not self._may_send:
            return
        sending: AbstractContextManager[Any] = nullcontext()
        if self._stream:
            self._stream.wait_for_current()
            sending = self._stream.active()
        with sending, self._channel.runtime.exact_arithmetic():
            self._channel.send_zeros(self._transfer, self._left)
        self._left.clear()
        if self._stream:
            self._stream.join()
        self._channel.abandon(self._transfer)

    @_disable_dynamo  # compiled code would free tensors whose addresses it passes to kernels
    @torch.no_grad()
    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        if parameter.grad is None:  # no rank used the parameter, so its zero gradient was removed
            return
        if index in self._arrived:
            raise OverlapError(
                f"the gradient of {self._names[index]} was computed twice within overlap(): put"
                " only the last backward before step() into overlap(); a model that runs a sharded"
                " module twice cannot overlap"
            )
        self._arrived.add(index)
        if self._views:
            self._forgive_accumulation(parameter.grad)
        if self._stream:
            self._stream.wait_for_current()
        while self._left:
            # The last bucket waits for all gradients: its header says if a gradient is missing.
            last = len(self._left) == 1
            if last:
                needed = self._everything
            else:
                needed = self._left[0].bucket.parameters
            if not self._arrived >= needed:
                break
            if self._ask:
                self._may_send = self._ask()
                self._ask = None
            if not self._may_send:
                break
            self._send_next()

    def _send_next(self) -> None:
        pipeline = self._left[0]
        signals: list[Tensor | None] = [None] * len(self._names)
        numbers = list(pipeline.bucket.parameters)
        names = [self._names[number] for number in numbers]
        parameters = {name: self._parameters[name] for name in names}
        sending: AbstractContextManager[Any] = nullcontext()
        if self._stream:
            sending = self._stream.active()
        with sending, self._channel.runtime.exact_arithmetic():
            for number, gradient in zip(numbers, local_gradients(parameters), strict=True):
                signals[number] = gradient
                if gradient is not None:
                    views = self._views.setdefault(gradient.untyped_storage().data_ptr(), [])
                    views.append(self._names[number])
            self._stamps = gradient_stamps(parameters) | self._stamps
            pieces = pipeline.bucket.cut(signals)
            largest = max((p for p in pieces if p is not None), key=Tensor.numel, default=None)
            # samples detect changes by torch's GradScaler, which do not change the version counter
            if largest is not None:
                sample = largest.reshape(-1)[:: max(1, largest.numel() // SAMPLED_VALUES)]
                self._samples.append((sample, sample.clone()))
            self._channel.send_bucket(self._transfer, pipeline, pieces)
        self._left.popleft()

    def _forgive_accumulation(self, gradient: Tensor) -> None:
        """Updates the version stamps of sent gradients that share memory with the new `gradient`,
        so that the new gradient does not look like a change of the sent gradients.

        FSDP2 adds the gradients of a unit one after the other into views of one tensor, and torch
        has only one version counter for all these views.
        """
        shard = local(gradient)
        for name in self._views.get(shard.untyped_storage().data_ptr(), ()):
            sent, version, of_shard = self._stamps[name]
            if of_shard + 1 == shard._version:
                self._stamps[name] = (sent, version, shard._version)

    def _owns_memory_of(self, name: str) -> bool:
        """True if the storage of the gradient of `name` holds only gradients of this replicator's
        parameters.

        Otherwise the version counter of the storage also counts writes to other gradients, by FSDP2
        or another optimizer. Then only `_samples`, copies of a few values of the sent gradients,
        show whether these gradients have changed.
        """
        whole = local(_gradient(self._parameters[name])).untyped_storage()
        own = 0
        for parameter in self._parameters.values():
            if parameter.grad is None:
                continue
            shard = local(parameter.grad)
            if shard.untyped_storage().data_ptr() == whole.data_ptr():
                own += math.prod(largest_local_shape(parameter)) * shard.itemsize
        return own >= whole.nbytes()

    def _equal(self) -> Tensor:
        """Compares the samples of sent gradients with their current values. Returns True if they
        are equal.
        """  # [] bool
        same = [(now.nan_to_num() == then.nan_to_num()).all() for now, then in self._samples]
        if not same:
            return torch.ones((), dtype=torch.bool, device=self._channel.runtime.device)
        return torch.stack(same).all()


def refuse_unequal(equal: bool) -> None:
    """Raises `OverlapError` if `equal` is False: the gradients differ from the samples that were
    taken when the gradients were sent.
    """
    if not equal:
        raise _changed("a gradient")


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "its gradient was sent"
    return parameter.grad


def _changed(which: str) -> OverlapError:
    text = f"{which} changed after it was sent within overlap()"
    return OverlapError(
        f"{text}: clip by replicate(clip=...); to unscale or zero gradients, do not use overlap()"
    )
