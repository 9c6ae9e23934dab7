"""GradientReplicator: replaces gradients by the agreed update before the step of the base
optimizer.

With a delay of n steps, an update is applied n steps after its messages were sent.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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
from detonation.core.link import Link, links_of_shards
from detonation.core.memory import LocalState
from detonation.core.optim import BaseStep, SignSGD
from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel, Transfer, Update
from detonation.core.replicator.overlap import CommStream, Overlap, OverlapError, refuse_unequal
from detonation.core.runtime import Readback
from detonation.core.schemes import GradientScheme


@dataclass(frozen=True)
class Flat:
    """A pending update as a tensor, `[rows, chunk]` fp32: zeros before the first message, or a
    received update. Checkpoints store updates in this form.

    When the replicas have agreed which parameters no replica used, the rows of these parameters are
    set to infinity. No valid update contains infinity. So a saved copy of this tensor also tells
    which parameters were unused.
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
        """Replaces the gradients by this update; see `Update.apply`."""
        copy(gradients_to_fill(parameters, unused), self.layout.parts(self.of_rows))

    def settle(self, unused: Unused) -> None:
        """Agrees with the other replicas on the parameters that no replica used, and marks the rows
        of these parameters. Collective.
        """
        if self.missing:
            numbers = unused.settle(self.missing, self.missing.step)
            rows = self.layout.row_numbers(numbers) >= 0
            self.of_rows[rows.to(self.of_rows.device)] = torch.inf

    def marked(self) -> Tensor:
        """Returns for each parameter whether its rows are marked as unused; False if this shard has
        no rows of the parameter.

        Shapes: -> `[parameters]` bool.
        """
        parts = self.layout.parts(self.of_rows)
        return torch.stack([part.isinf().any() for part in parts])

    def without(self, marked: Sequence[bool], unused: Unused) -> "Flat":
        """Returns a copy of this update which records that no replica used the parameters whose
        entry in `marked` is True."""
        numbers = [number for number, found in enumerate(marked) if found]
        return replace(self, missing=unused.agreed(numbers) if numbers else None)


class Pending:
    """The pending updates: the updates of the last `delay` steps, oldest first, whose messages may
    still be in flight.

    Before the first message, and after `take`, the list begins with blank entries, which have no
    message. A blank entry is a tensor of negative zeros. So a saved state distinguishes a blank
    entry from an update of positive zeros.
    """

    def __init__(self, layout: Layout, delay: int, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._updates: deque[Transfer | Flat] = deque(self._blank() for _ in range(delay))
        self._blanks = delay

    def exchange(self, update: Transfer) -> Transfer | Flat:
        """Appends the newest update, and removes and returns the oldest update, which is applied
        now."""
        self._updates.append(update)
        due = self._updates.popleft()
        self._blanks = max(0, self._blanks - 1)
        if isinstance(due, Flat):
            due.of_rows.add_(0.0)  # adding 0.0 makes negative zeros positive
        return due

    def wait(self, index: int) -> Tensor:
        """Waits for the messages of update number `index`, counted from the oldest, and replaces
        the messages by the decoded update.

        Shapes: -> `[rows, chunk]` fp32.
        """
        update = self._updates[index].receive()
        arrived = self._updates[index] = Flat(self._layout, update.flat(), update.missing)
        return arrived.of_rows

    def settle(self, index: int, unused: Unused) -> None:
        """Waits for update number `index`, and agrees with the other replicas on the parameters
        that no replica used in its step. Collective.
        """
        self.wait(index)
        settled = self._updates[index]
        assert isinstance(settled, Flat)
        settled.settle(unused)

    def look(self, unused: Unused, shards: Iterable[Link]) -> None:
        """Finds, after a checkpoint was loaded, which parameters are unused in each update, and how
        many entries are blank (see `Pending`). Collective over the links `shards`.

        The values of an update show both: rows of unused parameters are infinite (see
        `Flat.settle`), and a blank entry contains only negative zeros.
        """
        updates = [each for each in self._updates if isinstance(each, Flat)]
        blanks = sum(self._is_blank(each) for each in self._updates)
        used = [(~each.marked()).long() for each in updates]
        first = torch.tensor([blanks], dtype=torch.int64, device=self._device)
        found = torch.cat([first, *used])
        # A shard without any rows reports each parameter as used (1) and each update as blank.
        # The smallest report of all shards is right, both for "used" and for the count of blanks.
        for link in shards:
            found = link.collect(found).amin(0)
        self._blanks = int(found[0])
        marked = iter((found[1:] == 0).view(len(updates), -1).tolist())
        self._updates = deque(
            each.without(next(marked), unused) if isinstance(each, Flat) else each
            for each in self._updates
        )

    def arrived(self) -> list[Tensor]:
        """Returns all pending updates as tensors. Waits for messages in flight.

        Shapes: `[rows, chunk]` each.
        """
        return [self.wait(index) for index in range(len(self._updates))]

    def due(self) -> range:
        """Returns the numbers of the updates that are no blank entries, counted from the oldest."""
        return range(self._blanks, len(self._updates))

    def take(self, index: int) -> Update | Flat:
        """Waits for update number `index` and returns it. A blank entry replaces this update, and
        all older updates must have been taken.
        """
        update = self._updates[index].receive()
        self._updates[index] = self._blank()
        self._blanks = index + 1
        return update

    def _blank(self) -> Flat:
        return Flat(self._layout, self._layout.zeros(self._device).fill_(-0.0))

    def _is_blank(self, update: Transfer | Flat) -> bool:
        """True if `update` is a blank entry, which has no message. Waits for the device."""
        if not isinstance(update, Flat):
            return False
        parts = self._layout.parts(update.of_rows)
        return all(bool((part.signbit() & (part == 0)).all()) for part in parts)


class GradientReplicator(Replicator):
    """Replaces each gradient by the agreed update before the base optimizer reads the gradient.

    With a delay, the update belongs to an earlier step. If this replica has no gradient for a
    parameter but another replica has one, the missing gradient counts as zero. A parameter that no
    replica used gets no gradient, so the base optimizer skips this parameter.

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
        # whether the gradients equal those that `overlap` sent; the result is read later
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
            # A replica that began or stopped training a parameter sends no later messages.
            if not self.counts.changed_apart:
                self._updates.wait(index)

    def make_portable(self, step: int) -> None:
        self.refuse_overlap()

    def synchronize(self, step: int) -> None:
        self.synchronize_level([self], step)

    def synchronize_level(self, level: Sequence[Replicator], step: int) -> None:
        """Applies all pending updates of `level` at once: makes one step of the base optimizer for
        each update, which holds the parts of all replicators.

        Afterwards the parameters have the gradients that they had before, because a later backward
        pass may add to these gradients.
        """
        parts = [each for each in level if isinstance(each, GradientReplicator)]
        due = sorted({index for each in parts for index in each._updates.due()})
        if not due:
            return
        groups = self._base.optimizer.param_groups
        everyone = [parameter for group in groups for parameter in group["params"]]
        kept = [parameter.grad for parameter in everyone]
        for parameter in everyone:
            parameter.grad = None
        for index in due:
            for each in parts:
                each.apply_pending(index, step - self.scheme.round.delay + index)
            self._base()
        for parameter, gradient in zip(everyone, kept, strict=True):
            parameter.grad = gradient

    def apply_pending(self, index: int, step: int) -> None:
        """Makes the next step of the base optimizer apply pending update number `index`, which
        belongs to `step`. A blank entry applies nothing.
        """
        if index not in self._updates.due():
            return
        update = self._updates.take(index)
        unused = self.channel.unused.settle(update.missing, step)
        update.apply(self.parameters, unused, self._signs, locals_of(self.parameters))

    @contextmanager
    def overlap(self, step: int, may_send: Callable[[], bool] | None = None) -> Iterator[None]:
        """Context manager in which backward sends the gradients of `step`. Afterwards `before`
        sends the gradients that backward has not sent.
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
            if not overlap.began:  # no gradient was sent, so the step may go on without overlap
                self._overlap = None
                self.overlapping = False
            raise

    def refuse_overlap(self) -> None:
        """Raises `OverlapError` if `overlap` has begun, but no step has used the sent gradients
        yet, or if gradients changed after `overlap` had sent them.
        """
        if self._equal:
            self._refuse_unequal()
        if self._overlap:
            raise OverlapError(
                f"overlap() began at step {self._overlap.step}, but no step() followed: call step()"
                " once after every overlap()"
            )

    def drop_overlap(self) -> None:
        overlap = self._overlap
        self._overlap = None
        self._equal = None
        self.overlapping = False
        if overlap:
            overlap.abandon()

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
        if self._delayed:
            shards = links_of_shards(self.parameters.values())
            self._updates.look(self.channel.unused, shards)

    def _refuse_unequal(self) -> None:
        equal = self._equal
        self._equal = None
        if equal:
            refuse_unequal(*equal.read())
