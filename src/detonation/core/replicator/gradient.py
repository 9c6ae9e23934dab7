"""GradientReplicator: every step's gradients, replaced by what the replicas agreed on, before the local step."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor
from torch.optim import Optimizer

from detonation.core.flat.gradients import gradient
from detonation.core.flat.layout import copy, local
from detonation.core.integrity.readback import Later
from detonation.core.optim.signsgd import SignSGD
from detonation.core.replicator.channel import Channel, Flight, Landed
from detonation.core.replicator.local_state import Private
from detonation.core.replicator.overlap import Overlap, OverlapError, Side, refuse_unequal
from detonation.core.replicator.pending import LookAhead, Pending, apply, gradients
from detonation.core.schemes.scheme import Scheme


class GradientReplicator:
    """Replaces each gradient by the update that all replicas agreed on, before the base optimizer sees it.

    With a delay it is the update of an earlier step, and with `lookahead` the gradient was taken where this replica
    expected to be. A parameter that requires a gradient and has none counts as zero, on every replica alike.

    last: whether nothing else wants to know the update. SignSGD then takes it straight from the messages where it can,
    and the gradients stay this replica's own: to write the update down and read it again would cost more than to
    decode it.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], channel: Channel, base: Optimizer, scheme: Scheme, last: bool
    ) -> None:
        self.channel = channel
        self._parameters, self._base, self.last = parameters, base, last
        self._delayed = scheme.round.delay > 0
        self._pending = Pending(channel.layout, scheme.round.delay, channel.device)
        self._told = Pending(channel.layout, scheme.round.delay if scheme.lookahead else 0, channel.device)
        self._overlap: Overlap | None = None
        self._equal: Later | None = None  # whether gradients stayed as they were sent, of the last step that overlapped
        self._side: Side | None = None
        self._lookahead = LookAhead(parameters, base, channel.layout) if scheme.lookahead else None

    def before(self, step: int) -> None:
        self.back()
        sent = self._send(step)
        if sent.told is not None:
            self._told.exchange(sent.told)
        if self._delayed:
            copy(gradients(self._parameters), self.channel.layout.parts(self._pending.exchange(sent.update)))
        else:
            self._land(sent.land())

    def _land(self, landed: Landed) -> None:
        base, weights = self._base, [local(p) for p in self._parameters.values()]
        if self.last and isinstance(base, SignSGD) and base.plain and landed.can_follow(weights):
            base.defer(list(self._parameters.values()), partial(landed.follow, weights))
        else:
            landed.write(gradients(self._parameters))

    def _send(self, step: int) -> Flight:
        if self._overlap:
            flight, self._equal = self._overlap.finish()
            self._overlap = None
            return flight
        self._refuse_unequal()
        signals = [gradient(name, parameter) for name, parameter in self._parameters.items()]
        return self.channel.send(signals, step)

    @contextmanager
    def overlap(self, step: int) -> Iterator[None]:
        """Within it backward sends the gradients of `step`, of which `before` then sends what is left."""
        self.refuse_overlap()
        self._side = self._side or Side(self.channel.device)
        overlap = self._overlap = Overlap(self._parameters, self.channel, step, self._side)
        try:
            with overlap.listening():
                yield
        except BaseException:
            if not overlap.began:  # then nothing has happened
                self._overlap = None
            raise

    @property
    def overlapping(self) -> bool:
        """Whether gradients were sent, or are to be, bucket by bucket and their step has not come."""
        return self._overlap is not None

    def refuse_overlap(self) -> None:
        """Raises `OverlapError` while a step is half done, or where what one sent changed."""
        self._refuse_unequal()
        if self._overlap:
            raise OverlapError(
                f"gradients of step {self._overlap.step} left within overlap(), but no step() followed: call it once "
                "after every overlap(); a GradScaler, which skips steps, cannot be used with it"
            )

    def _refuse_unequal(self) -> None:
        equal, self._equal = self._equal, None
        if equal:
            refuse_unequal(*equal.read())

    def after(self, step: int) -> None:
        self.ahead()

    def settle(self, step: int) -> None:
        self.back()
        apply(self._pending.landed(), self._parameters, self._base, self.channel.layout)
        self._pending.clear()
        self._told.clear()

    def back(self) -> None:
        if self._lookahead:
            self._lookahead.back()

    def ahead(self) -> None:
        if self._lookahead:
            self._lookahead.move(self._told.landed())

    def shared(self) -> list[Tensor]:
        return [local(parameter) for parameter in self._parameters.values()]

    def equal(self) -> dict[str, Tensor]:
        equal = {}
        for name, parameter in self._parameters.items():
            equal[name] = local(parameter).detach()
            for key, kept in sorted(self._base.state.get(parameter, {}).items()):
                if isinstance(kept, Tensor):
                    equal[f"{name} ({key})"] = local(kept)
        return equal

    def mend(self, tensors: Mapping[str, Tensor]) -> None:
        equal = self.equal()
        copy([equal[name] for name in tensors], list(tensors.values()))

    def private(self) -> Private:
        updates = {f"update{i}": update for i, update in enumerate(self._pending.landed())}
        told = {f"told{i}": update for i, update in enumerate(self._told.landed())}
        return self.channel.private(updates | told)
