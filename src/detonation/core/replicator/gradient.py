"""GradientReplicator: replaces gradients by the agreed update before the local step.

With a delay, updates are applied a number of steps after their messages were sent.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from detonation.core.exchange import Unused
from detonation.core.flat.layout import Layout, copy
from detonation.core.flat.tensors import (
    gradients_to_fill,
    local,
    local_gradients,
    locals_of,
    state_of,
)
from detonation.core.integrity.message import NO_PARAMETERS, Missing
from detonation.core.memory import LocalState
from detonation.core.optim import BaseStep, SignSGD
from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel, Transfer, Update
from detonation.core.replicator.overlap import CommStream, Overlap, OverlapError, refuse_unequal
from detonation.core.runtime import Readback
from detonation.core.schemes import GradientScheme

Applies = Callable[["Update | Flat", Collection[int]], None]
"""Applies an update in the next step; the given parameter numbers were not used."""


@dataclass(frozen=True)
class Flat:
    """An update as a tensor, `[rows, chunk]` fp32: zeros before the first message, or the update of
    a checkpoint.

    Once all replicas agree on the parameters that none of them used, the rows of these parameters
    are set to infinity, which no other update contains. So checkpoints save this information, and
    it moves to other layouts with the update.
    """

    layout: Layout
    of_rows: Tensor
    missing: Missing | None = None

    def receive(self) -> "Flat":
        return self

    def flat(self) -> Tensor:
        return self.of_rows

    def apply(
        self,
        parameters: Mapping[str, Tensor],
        unused: Collection[int] = (),
        signs: object = None,
        weights: object = (),
    ) -> None:
        """Replaces the gradients by the update; see `Update.apply`."""
        copy(gradients_to_fill(parameters, unused), self.layout.parts(self.of_rows))

    def settle(self, unused: Unused) -> None:
        """Agrees on the parameters that no replica used. Collective."""
        if self.missing:
            numbers = unused.settle(self.missing, self.missing.step)
            rows = self.layout.row_numbers(numbers) >= 0
            self.of_rows[rows.to(self.of_rows.device)] = torch.inf

    def look(self, unused: Unused) -> "Flat":
        """This update, with its unused parameters read from the loaded `of_rows`.

        Waits for the device.
        """
        parts = self.layout.parts(self.of_rows)
        infinite = torch.stack([part.isinf().any() for part in parts]).tolist()
        numbers = [number for number, found in enumerate(infinite) if found]
        return replace(self, missing=unused.agreed(numbers) if numbers else None)


class Pending:
    """The updates of the last `delay` steps, oldest first, as messages.

    Before the first update arrives, and after `step_on`, the list holds blanks without a message. A
    blank is a tensor of negative zeros, which a saved state distinguishes from an update of zeros.
    """

    def __init__(self, layout: Layout, delay: int, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._updates: deque[Transfer | Flat] = deque(self._blank() for _ in range(delay))

    def exchange(self, update: Transfer) -> Transfer | Flat:
        """Appends an update, and removes the update that is due."""
        self._updates.append(update)
        due = self._updates.popleft()
        if isinstance(due, Flat):
            due.of_rows.add_(0.0)  # adding 0.0 turns negative zeros into zeros
        return due

    def wait(self, index: int) -> Tensor:
        """Waits for update `index`, counted from the oldest, and keeps it in memory from then on.

        Shapes: -> `[rows, chunk]` fp32.
        """
        update = self._updates[index].receive()
        arrived = self._updates[index] = Flat(self._layout, update.flat(), update.missing)
        return arrived.of_rows

    def settle(self, index: int, unused: Unused) -> None:
        """Waits for update `index`, and agrees on the parameters that no replica used.
        Collective.
        """
        self.wait(index)
        settled = self._updates[index]
        assert isinstance(settled, Flat)
        settled.settle(unused)

    def look(self, unused: Unused) -> None:
        """Reads the unused parameters of all updates after they were loaded."""
        self._updates = deque(
            each.look(unused) if isinstance(each, Flat) else each for each in self._updates
        )

    def arrived(self) -> list[Tensor]:
        """All updates. Waits for messages in flight.

        Shapes: `[rows, chunk]` each.
        """
        return [self.wait(index) for index in range(len(self._updates))]

    def step_on(self, base: BaseStep, applies: Applies, unused: Unused, step: int) -> None:
        """Steps `base` on each update except blanks, and replaces the updates by blanks.

        Gradients are unchanged, because a following backward pass may add to them.

        Args:
            step: Of the oldest update.
        """
        due = [index for index, each in enumerate(self._updates) if not self._is_blank(each)]
        if not due:
            return
        everyone = [
            parameter for group in base.optimizer.param_groups for parameter in group["params"]
        ]
        kept = [parameter.grad for parameter in everyone]
        for parameter in everyone:
            parameter.grad = None
        for index in due:
            update = self._updates[index].receive()
            alone = unused.settle(update.missing, step + index)
            applies(update, alone)
            base()
            self._updates[index] = self._blank()
        for parameter, gradient in zip(everyone, kept, strict=True):
            parameter.grad = gradient

    def _blank(self) -> Flat:
        return Flat(self._layout, self._layout.zeros(self._device).fill_(-0.0))

    def _is_blank(self, update: Transfer | Flat) -> bool:
        """True if this entry has no message. Waits for the device."""
        if not isinstance(update, Flat):
            return False
        parts = self._layout.parts(update.of_rows)
        return all(bool((part.signbit() & (part == 0)).all()) for part in parts)


class GradientReplicator(Replicator):
    """Replaces each gradient by the agreed update before the base optimizer reads it.

    With a delay, the update belongs to an earlier step. A missing gradient counts as zero if
    another replica has one. A parameter that no replica used gets no gradient, so the base
    optimizer skips it.

    Args:
        last: Whether no later level exchanges gradients. SignSGD then reads the update directly
            from the messages if it can, and gradients remain this replica's own: storing the update
            and reading it costs more than decoding.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        channel: Channel,
        base: BaseStep,
        scheme: GradientScheme,
        last: bool,
    ) -> None:
        super().__init__(parameters, channel)
        self._base = base
        self.last = last
        self._signs: SignSGD | None = None
        if last and isinstance(base.optimizer, SignSGD):
            self._signs = base.optimizer
        delay = scheme.round.delay
        self._delayed = delay > 0
        self._updates = Pending(channel.layout, delay, channel.runtime.device)
        self._overlap: Overlap | None = None
        # readback: do gradients equal the gradients that the last overlapped step sent?
        self._equal: Readback | None = None
        self._stream: CommStream | None = None
        self.stepped = base

    def before(self, step: int) -> None:
        weights: list[Tensor] = []
        if self._signs is not None:
            weights = locals_of(self.parameters)
        if self._overlap:
            transfer, self._equal = self._overlap.finish()
            self._overlap = None
            self.overlapping = False
        else:
            if self._equal:
                self._refuse_unequal()
            gradients = local_gradients(self.parameters)
            lost = self.innermost and self._base.lost
            transfer = self.channel.send(gradients, step, lost=lost)
        due: Transfer | Flat = transfer
        if self._delayed:
            due = self._updates.exchange(transfer)
        update = due.receive()
        unused = NO_PARAMETERS
        if update.missing or self.link.playback:
            unused = self.channel.unused.settle(update.missing, step - self.scheme.round.delay)
        update.apply(self.parameters, unused, self._signs, weights)

    def announce(self, step: int, at: int, name: str, in_buckets: bool) -> list[Transfer]:
        transfers = self.channel.announce(step, name, in_buckets)
        if self._delayed:
            self._updates.settle(0, self.channel.unused)
        else:
            self.channel.discard(transfers)
        return transfers

    def drain(self) -> None:
        for index in range(self.scheme.round.delay):
            # all later messages of a replica that announced a change are skipped
            if not self.counts.changed_apart:
                self._updates.wait(index)

    def make_portable(self, step: int) -> None:
        self.refuse_overlap()

    def synchronize(self, step: int) -> None:
        first = step - self.scheme.round.delay

        def applies(update: Update | Flat, unused: Collection[int]) -> None:
            weights = locals_of(self.parameters)
            update.apply(self.parameters, unused, self._signs, weights)

        self._updates.step_on(self._base, applies, self.channel.unused, first)

    @contextmanager
    def overlap(self, step: int, may_send: Callable[[], bool] | None = None) -> Iterator[None]:
        """Context manager in which backward sends the gradients of `step`; `before` then sends the
        rest.
        """
        self.refuse_overlap()
        device = self.channel.runtime.device
        if self._stream is None and device.type != "cpu":
            self._stream = CommStream(device)
        overlap = Overlap(self.parameters, self.channel, step, self._stream, may_send)
        self._overlap = overlap
        self.overlapping = True
        try:
            with overlap.listening():
                yield
        except BaseException:
            if not overlap.began:  # then nothing was sent
                self._overlap = None
                self.overlapping = False
            raise

    def refuse_overlap(self) -> None:
        """Raises `OverlapError` between `overlap` and its step, or if gradients changed after they
        were sent.
        """
        if self._equal:
            self._refuse_unequal()
        if self._overlap:
            raise OverlapError(
                f"gradients of step {self._overlap.step} left within overlap(), but no step()"
                " followed: call it once after every overlap()"
            )

    def shared_weights(self) -> list[Tensor]:
        return locals_of(self.parameters)

    def replicated(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.parameters.items():
            found[name] = local(parameter).detach()
            found |= {
                f"{name} ({key})": state
                for key, state in state_of(self._base.optimizer, parameter).items()
            }
        return found

    def repair(self, tensors: Mapping[str, Tensor]) -> None:
        replicated = self.replicated()
        copy([replicated[name] for name in tensors], list(tensors.values()))

    def local_state(self, alone: bool = False) -> LocalState:
        for index in range(0 if alone else self.scheme.round.delay):
            self._updates.settle(index, self.channel.unused)
        updates = {f"update{i}": each for i, each in enumerate(self._updates.arrived())}
        return replace(self.channel.local_state(updates), loaded=self._loaded)

    def _loaded(self) -> None:
        self.channel.unused.forget()
        self._updates.look(self.channel.unused)

    def _refuse_unequal(self) -> None:
        equal = self._equal
        self._equal = None
        if equal:
            refuse_unequal(*equal.read())
