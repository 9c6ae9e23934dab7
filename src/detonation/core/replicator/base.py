"""A replicator is one level of replication around the step of the base optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from detonation.core.flat.padding_rows import mark_used
from detonation.core.flat.tensors import cut_like, local, local_gradients, padding_row, whole_of
from detonation.core.link.link import Link
from detonation.core.memory import LocalState
from detonation.core.optim.base_step import BaseStep
from detonation.core.replicator.channel import Channel, Transfer


class Replicator(ABC):
    """Where a scheme meets the training step: gradients before the local step, parameters after it.

    Args:
        parameters: By name, in the order of the channel's layout.
    """

    acts_before = True
    """True where it acts in `before`; otherwise in `after`."""
    holds_padding = False
    """True if it keeps padding rows where they are, which its codec would move."""
    stepped: BaseStep | None = None
    """The optimizer whose steps all replicas must take alike; None where each steps by itself."""

    def __init__(self, parameters: Mapping[str, Tensor], channel: Channel) -> None:
        self.parameters = parameters
        self.channel = channel
        self.round = channel.scheme.round
        # whether gradients were sent, or are to be, in buckets, and their step has not come
        self.overlapping = False
        self.scheme = channel.scheme
        self.layout = channel.layout
        self.link = channel.link
        self.counts = channel.counts

    def before(self, step: int) -> None:
        """Runs before the local step."""
        return

    def after(self, step: int) -> None:
        """Runs after the local step."""
        return

    @abstractmethod
    def announce(self, step: int, at: int, name: str, in_buckets: bool) -> list[Transfer]:
        """Sends `Channel.announce` in the place of the message of step `at`, if there is one; all
        before it have left.

        Starts and waits for the same collectives as an ordinary step `at`, so that a replica that
        announces nothing meets it there. Nothing of the step happens.

        Args:
            step: The next step, up to `at`.
            name, in_buckets: See `Channel.announce`.

        Returns:
            The messages, which `discard` receives; none where none is sent at step `at`.
        """

    def discard(self, transfers: Sequence[Transfer]) -> None:
        """Receives an announcement, and what was sent before it."""
        if self.scheme.round.delay:  # otherwise `announce` has received it
            self.local_state()
            self.channel.discard(transfers)

    def drain(self) -> None:
        """Waits for messages in flight, up to the first that announces what this rank does not."""
        self.local_state()

    @abstractmethod
    def make_portable(self, step: int) -> None:
        """Brings the state after `step` steps to where another layout can go on from it."""

    @abstractmethod
    def synchronize(self, step: int) -> None:
        """Completes open rounds and transfers after `step` steps, so that the replicas hold the
        same weights."""

    @contextmanager
    def overlap(self, step: int) -> Iterator[None]:
        """Context in which backward sends the gradients of `step`, if the level supports it."""
        yield

    def refuse_overlap(self) -> None:
        """Raises `OverlapError` between `overlap` and the step that completes it."""
        return

    @abstractmethod
    def shared_weights(self) -> list[Tensor]:
        """One tensor per parameter that must be bitwise equal on all replicas between steps."""

    @abstractmethod
    def replicated(self) -> dict[str, Tensor]:
        """All tensors that must be bitwise equal on all replicas between steps, by name; to read.

        Shapes: local shapes.
        """

    @abstractmethod
    def repair(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces some of the tensors that `replicated` returned.

        Shapes: as `replicated`.
        """

    def forget_held_rows(self) -> None:
        """Looks again for the padding rows of its parameters, as some may move from now on."""
        return

    def part_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of other `tensors` of the model that each of its replicas holds on this rank.

        All of them, or pieces, where its parameters are pieces.
        """
        first = next(iter(self.parameters.values()), None)
        if first is not None:
            tensors = cut_like(first, tensors)
        return {name: local(tensor.detach()) for name, tensor in tensors.items()}

    @abstractmethod
    def local_state(self, alone: bool = False) -> LocalState:
        """The state that is private to this replica. Waits for messages in flight.

        Args:
            alone: Whether no other replica asks. Which parameters nobody used in the steps of these
                messages may then stay open.
        """


def release_used_rows(replicators: Sequence[Replicator], base: BaseStep) -> None:
    """Lets the padding rows move of which any replica has a gradient before a step. Collective."""
    asked: dict[Link, list[tuple[Replicator, str]]] = {}
    words: dict[Link, list[bool]] = {}
    for each in (each for each in replicators if each.holds_padding):
        found = zip(each.parameters.items(), local_gradients(each.parameters), strict=True)
        for (name, parameter), gradient in found:
            if (row := padding_row(parameter)) is not None:
                asked.setdefault(each.link, []).append((each, name))
                used = gradient is not None and bool(gradient[row].any())
                words.setdefault(each.link, []).append(used)
    for link, mine in words.items():
        device = asked[link][0][0].channel.runtime.device
        table = link.collect(torch.tensor(mine, dtype=torch.int64, device=device))
        for (replicator, name), used in zip(asked[link], table.any(0).tolist(), strict=True):
            if used:
                _use(replicator, name, base)


def use_rows(names: Collection[str], replicators: Sequence[Replicator], base: BaseStep) -> None:
    """Lets the padding rows of the embeddings `names` move, as the replicas of a training did."""
    for replicator in replicators:
        for name in replicator.parameters.keys() & set(names):
            _use(replicator, name, base)


def _use(replicator: Replicator, name: str, base: BaseStep) -> None:
    parameter: Any = replicator.parameters[name]
    whole: Any = whole_of(parameter)
    mark_used(whole)
    parameter.padding_row = whole.padding_row = None
    base.release(parameter)
    replicator.forget_held_rows()
