"""GradientReplicator: replaces gradients by the agreed update before the local step."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from detonation.core.flat.layout import copy
from detonation.core.flat.tensors import local, local_gradients, locals_of, state_of
from detonation.core.integrity.missing import NO_PARAMETERS
from detonation.core.memory import LocalState
from detonation.core.optim.base_step import BaseStep
from detonation.core.optim.signsgd import SignSGD
from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel, Transfer, Update
from detonation.core.replicator.overlap import CommStream, Overlap, OverlapError, refuse_unequal
from detonation.core.replicator.pending import Flat, Pending
from detonation.core.runtime import Readback
from detonation.core.schemes.scheme import GradientScheme


class GradientReplicator(Replicator):
    """Replaces each gradient by the agreed update before the base optimizer reads it.

    With a delay it is the update of an earlier step. A missing gradient counts as zero if another
    replica has one. A parameter that no replica used gets no gradient, so the base optimizer skips
    it.

    Args: last: Whether no later level exchanges gradients. SignSGD then reads the update directly
        from the messages if it can, and gradients remain this replica's own: storing the update and
        reading it costs more than decoding.
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
        # readback: are gradients still those sent by the last overlapped step?
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
            transfer = self.channel.send(local_gradients(self.parameters), step)
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
            # the replica that announced a change skips all later messages
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
    def overlap(self, step: int) -> Iterator[None]:
        """Context manager in which backward sends the gradients of `step`; `before` then sends the
        rest.
        """
        self.refuse_overlap()
        device = self.channel.runtime.device
        if self._stream is None and device.type != "cpu":
            self._stream = CommStream(device)
        overlap = Overlap(self.parameters, self.channel, step, self._stream)
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
