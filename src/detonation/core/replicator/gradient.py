"""GradientReplicator: replaces gradients by the agreed update before the step of the base
optimizer.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from detonation.core.flat.layout import copy
from detonation.core.flat.tensors import local, local_gradients, locals_of, state_of
from detonation.core.integrity.message import NO_PARAMETERS
from detonation.core.memory import LocalState
from detonation.core.optim import BaseStep, SignSGD
from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel, Transfer
from detonation.core.replicator.overlap import CommStream, Overlap, OverlapError, refuse_unequal
from detonation.core.runtime import Readback


class GradientReplicator(Replicator):
    """Replaces each gradient by the agreed update before the base optimizer reads the gradient.

    If this replica has no gradient for a parameter but another replica has one, the missing
    gradient counts as zero. A parameter that no replica used gets no gradient, so the base
    optimizer skips this parameter.

    Args:
        last: Whether no later level exchanges gradients. SignSGD then reads the update directly
            from the messages if it can, because storing the update and reading it costs more than
            decoding. The gradients then remain this replica's own.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        channel: Channel,
        base: BaseStep,
        last: bool,
    ) -> None:
        super().__init__(parameters, channel)
        self._base = base
        self.last = last
        self._signs: SignSGD | None = None
        if last and isinstance(base.optimizer, SignSGD):
            self._signs = base.optimizer
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
        update = transfer.receive()
        unused = NO_PARAMETERS
        if update.missing or self.link.playback:
            unused = self.channel.unused.settle(update.missing, step)
        update.apply(self.parameters, unused, self._signs, weights)

    def announce(self, step: int, at: int, name: str, in_buckets: bool) -> list[Transfer]:
        transfers = self.channel.announce(step, name, in_buckets)
        self.channel.discard(transfers)
        return transfers

    def make_portable(self, step: int) -> None:
        self.refuse_overlap()

    def synchronize(self, step: int) -> None:
        return

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
        """Raises `OverlapError` if `overlap` has begun, but no step has used its gradients yet, or
        if gradients changed after `overlap` had sent them.
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

    def local_state(self) -> LocalState:
        return self.channel.local_state({})

    def _refuse_unequal(self) -> None:
        equal = self._equal
        self._equal = None
        if equal:
            refuse_unequal(*equal.read())
