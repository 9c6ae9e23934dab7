"""Changes of a scheme that only an experiment needs: what else would the loss be?

`scheme.name=variants:NAME` takes the first kind. The second changes a training while it runs: `later:` and `every:`
settings of benchmarks/second_round.
"""

import dataclasses
import threading
from typing import Any, ClassVar

import torch
from torch import Tensor

import detonation as dt
from detonation.core.codec.codec import Codec, Selected
from detonation.core.schemes.scheme import GradientScheme


@dataclasses.dataclass(frozen=True)
class Guided:
    """The `topk` largest of each row, for `OneSupport`: no kernel selects them in its place."""

    topk: int
    chunk: int
    shared: bool = False
    period: int = 0

    @property
    def k(self) -> int:
        return self.topk

    def indices(self, coefficients: Tensor, step: int, seed: int) -> Tensor:
        return coefficients.abs().topk(self.topk, dim=1).indices.sort(1).values

    def for_rows(self, first: int, rows: int) -> "Guided":
        return self


@dataclasses.dataclass(frozen=True)
class OneSupport(Codec):
    """All replicas send the same coefficients: the largest at the step before, of their mean or of one in turn.

    Simulated replicas see each other's memories here, so this is what a real protocol could reach at best.
    """

    of_mean: bool = True
    seen: ClassVar[
        dict[int, dict[str, list[Tensor]]]
    ] = {}  # by step and replica, the rows in their order

    def shared_indices(self, rows: int, step: int, seed: int, device: torch.device) -> Tensor:
        if step not in self.seen:
            for old in [each for each in self.seen if each != step - 1]:
                del self.seen[old]
            self.seen[step] = {}
        self.seen[step][threading.current_thread().name] = []
        guides = [torch.cat(each) for _, each in sorted(self.seen.get(step - 1, {}).items())]
        if not guides:
            return torch.arange(self.selection.k).expand(rows, -1)
        guide = sum(guides[1:], guides[0]) if self.of_mean else guides[step % len(guides)]
        return self.selection.indices(guide, step, seed)

    def pick(self, coefficients: Tensor, shared: Any, out: Tensor | None = None) -> Selected:
        self.seen[max(self.seen)][threading.current_thread().name].append(coefficients.clone())
        return super().pick(coefficients, shared, out)


class InOneMessage(GradientScheme):
    """Its rows are selected together: `OneSupport` does not know which of them a bucket has."""

    @property
    def worth_overlapping(self) -> bool:
        return False


def one_support(of_mean: bool = True, topk: int = 1, decay: float = 0.95) -> dt.schemes.Scheme:
    """`demo` in signs by an all-gather, with one support for all replicas; the bytes of indices are still sent."""
    scheme = dt.demo(
        topk=topk, decay=decay, precision="sign", error_feedback=False, link="all-gather"
    )
    codec = OneSupport(
        scheme.codec.basis,
        Guided(topk, scheme.codec.selection.chunk),
        scheme.codec.precision,
        of_mean,
    )
    fields = {
        field.name: getattr(scheme, field.name)
        for field in dataclasses.fields(scheme)
        if field.init
    }
    return InOneMessage(**{**fields, "codec": codec})


def fewer_and_farther(optimizer: dt.Replicated) -> None:
    """From now on an eighth of the coordinates that were sent at a time, and eight times the learning rate."""
    ((_, scheme),) = optimizer.levels
    optimizer.reconfigure(
        dt.scheme(scheme.name, {**scheme.arguments, "rate": scheme.arguments["rate"] / 8})
    )
    step = optimizer.step

    def farther() -> None:  # the schedule sets each step's learning rate anew
        for group in optimizer.param_groups:
            group["lr"] *= 8
        step()

    optimizer.step = farther  # type: ignore[method-assign]


def memories_averaged(optimizer: dt.Replicated) -> None:
    """All replicas go on with the mean of their memories."""
    for replicator in optimizer._replicators or []:
        channel = replicator.channel
        assert channel.memory is not None
        total = channel.link._communicator.all_reduce(channel.memory.residual.clone())()
        channel.memory.residual.copy_(total).div_(channel.link.replicas)
