"""Pending updates, and the look-ahead to where they are expected to lead."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from detonation.core.compute.kernel_library import SignRate
from detonation.core.flat.layout import Layout, copy
from detonation.core.flat.tensors import gradients_to_fill, local
from detonation.core.optim.base_step import BaseStep
from detonation.core.optim.muon import Muon
from detonation.core.optim.signsgd import SignedUpdate, SignSGD
from detonation.core.replicator.transfer import OwnPart


class Decodable(SignedUpdate, Protocol):
    """An update that is decoded where it is needed: of the messages that arrived, of this replica's own, or a flat."""

    def flat(self) -> Tensor:
        """The update as one matrix.

        Shapes: -> `[rows, chunk]` fp32.
        """
        ...

    def write(self, targets: Sequence[Tensor]) -> None:
        """Decodes the update into `targets`.

        Shapes: one local shape per parameter.
        """
        ...


class InTransit(Protocol):
    """An update that may still be on its way."""

    def receive(self) -> Decodable:
        """Waits for it."""
        ...


@dataclass(frozen=True)
class Flat:
    """An update that lies in memory, `[rows, chunk]` fp32: zeros before the first message, or of a checkpoint."""

    layout: Layout
    of_rows: Tensor

    def receive(self) -> Decodable:
        return self

    def flat(self) -> Tensor:
        return self.of_rows

    def write(self, targets: Sequence[Tensor]) -> None:
        copy(targets, self.layout.parts(self.of_rows))

    def can_apply_signs(self, weights: Sequence[Tensor]) -> bool:
        return False

    def apply_signs(self, weights: Sequence[Tensor], rates: Sequence[SignRate]) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class OwnUpdate:
    """The update if all replicas had sent this replica's message, which is kept as it was sent."""

    layout: Layout
    parts: Sequence[OwnPart]

    def receive(self) -> Decodable:
        return self

    def flat(self) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0].decode()
        device = self.parts[0].pipeline.engine.device
        flat = torch.empty(self.layout.rows, self.layout.chunk, dtype=torch.float32, device=device)
        for part in self.parts:
            flat[part.pipeline.bucket.rows] = part.decode()
        return flat

    def write(self, targets: Sequence[Tensor]) -> None:
        if not all(target.is_contiguous() for target in targets):  # a piece of one that is not has memory of its own
            copy(targets, self.layout.parts(self.flat()))
            return
        for part in self.parts:
            part.pipeline.engine.write(part.received, part.pipeline.bucket.cut(targets))

    def can_apply_signs(self, weights: Sequence[Tensor]) -> bool:
        pieces = ((part, part.pipeline.bucket.cut(weights)) for part in self.parts)
        return all(part.pipeline.engine.can_apply_signs(part.received, cut) for part, cut in pieces)

    def apply_signs(self, weights: Sequence[Tensor], rates: Sequence[SignRate]) -> None:
        for part in self.parts:
            bucket, engine = part.pipeline.bucket, part.pipeline.engine
            engine.apply_signs(part.received, bucket.cut(weights), [rates[piece.index] for piece in bucket.pieces])


class Pending:
    """The updates of the last `delay` steps, oldest first, as their messages; zeros before the first ones arrive."""

    def __init__(self, layout: Layout, delay: int, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._updates: deque[InTransit] = deque(Flat(layout, layout.zeros(device)) for _ in range(delay))

    def exchange(self, update: InTransit) -> InTransit:
        """Puts in an update, and takes out the one that is due."""
        self._updates.append(update)
        return self._updates.popleft()

    def wait(self, index: int) -> None:
        """Waits for update `index`, counted from the oldest; it stays."""
        self._updates[index] = Flat(self._layout, self._updates[index].receive().flat())

    def waiting(self) -> list[Decodable]:
        """All updates, as their messages."""
        return [update.receive() for update in self._updates]

    def arrived(self) -> list[Tensor]:
        """All updates, after waiting for the ones in flight: from now on they lie in memory.

        Shapes: `[rows, chunk]` each.
        """
        for index in range(len(self._updates)):
            self.wait(index)
        return [update.receive().flat() for update in self._updates]

    def clear(self) -> None:
        """Replaces all updates by zeros."""
        self._updates = deque(Flat(self._layout, self._layout.zeros(self._device)) for _ in self._updates)


class LookAhead:
    """Takes the gradient where the replica expects to be when its own pending messages land, and moves exactly back.

    The base optimizer steps on this replica's own messages; the weights before are saved, so that nothing is rounded.
    This is DisTrO's answer to waiting (as run by Psyche). It needs an optimizer without state, because a step on a
    guess must leave no trace.
    """

    def __init__(self, parameters: Mapping[str, Tensor], base: BaseStep) -> None:
        self._parameters, self._base = parameters, base
        self._agreed = [local(p).clone() for p in parameters.values()]
        self.is_ahead = False

    @torch.no_grad()
    def move(self, updates: Sequence[Decodable]) -> None:
        """Moves from the agreed weights to where this replica's own `updates` would lead."""
        weights = [local(p) for p in self._parameters.values()]
        if self._base.optimizer.state:
            copy(weights, self._agreed)  # where they were before the first step
            raise _needs_state(self._base.optimizer)
        copy(self._agreed, weights)
        norm = self._base.clip.norm if self._base.clip else None
        step_on(updates, self._parameters, self._base)
        if self._base.clip:  # its norm is that of the agreed step
            self._base.clip.norm = norm
        self.is_ahead = True

    @torch.no_grad()
    def back(self) -> bool:
        """Moves to the agreed weights, bit for bit; False where it is there."""
        moves, self.is_ahead = self.is_ahead, False
        if moves:
            copy([local(p) for p in self._parameters.values()], self._agreed)
        return moves

    def forget(self) -> None:
        """Takes the weights, which were loaded, for the agreed ones."""
        self.is_ahead = False


def require_stateless(base: Optimizer) -> None:
    """Raises `ValueError` if `base` is known to keep state between steps.

    An optimizer of another library shows it at the first step only; `LookAhead` refuses it then.
    """
    ours = {torch.optim.Optimizer, torch.optim.SGD, SignSGD}
    stateful = any(_is_known(kind) and kind not in ours for kind in type(base).__mro__)
    momentum = isinstance(base, torch.optim.SGD | SignSGD) and any(group["momentum"] for group in base.param_groups)
    if stateful or momentum or base.state:
        raise _needs_state(base)


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith("torch.optim.") or kind is Muon


def _needs_state(base: Optimizer) -> ValueError:
    return ValueError(
        f"look-ahead needs an optimizer without state, and {type(base).__name__} keeps some: use SignSGD, or SGD "
        "without momentum, or a scheme with lookahead=False"
    )


def step_on(updates: Sequence[Decodable], parameters: Mapping[str, Tensor], base: BaseStep) -> None:
    """Lets `base` step on each update, and on `parameters` only.

    The gradients do not change, because a backward pass may come next and add to them.
    """
    everyone = [parameter for group in base.optimizer.param_groups for parameter in group["params"]]
    kept = [parameter.grad for parameter in everyone]
    for parameter in everyone:
        parameter.grad = None
    for update in updates:
        if not taken(update, parameters, base):
            update.write(gradients_to_fill(parameters))
        base()
    for parameter, gradient in zip(everyone, kept, strict=True):
        parameter.grad = gradient


def taken(update: Decodable, parameters: Mapping[str, Tensor], base: BaseStep) -> bool:
    """True if the next step of `base` takes `update` as it is, without gradients: SignSGD needs signs alone."""
    optimizer = base.optimizer
    return isinstance(optimizer, SignSGD) and optimizer.take(list(parameters.values()), update)
