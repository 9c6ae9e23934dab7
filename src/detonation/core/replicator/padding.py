"""Padding rows that move after all, because a replica has a gradient of them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from detonation.core.flat.padding_rows import mark_used
from detonation.core.flat.tensors import local_gradients, padding_row, whole_of
from detonation.core.link.link import Link
from detonation.core.optim.base_step import BaseStep
from detonation.core.replicator.base import Replicator


class PaddingRows:
    """The padding rows that `replicators` hold, until a replica has a gradient of them.

    The replicas ask each other in a step: in the first one, and in each one that follows as long
    as no replica has had a gradient of the whole parameter. Later gradients of a row wait for the
    next comparison of the replicas, which asks, too.

    Args:
        released: Called after rows were let move.
    """

    def __init__(
        self, replicators: Sequence[Replicator], base: BaseStep, released: Callable[[], object]
    ) -> None:
        self._base = base
        self._released = released
        self._rows: dict[Link, list[tuple[Replicator, str]]] = {}
        for each in (each for each in replicators if each.holds_padding):
            for name, parameter in each.parameters.items():
                if padding_row(parameter) is not None:
                    self._rows.setdefault(each.link, []).append((each, name))
        # for each row: whether this replica has had a gradient of the parameter, and of the row
        self._seen = {
            link: torch.zeros(
                len(rows), 2, dtype=torch.int64, device=rows[0][0].channel.runtime.device
            )
            for link, rows in self._rows.items()
        }
        self._asks = bool(self._rows)

    def look(self) -> None:
        """Notes the gradients of this replica, before an update takes their place."""
        for link, rows in self._rows.items():
            for seen, (each, name) in zip(self._seen[link], rows, strict=True):
                parameter = each.parameters[name]
                (gradient,) = local_gradients({name: parameter})
                if gradient is not None:
                    seen[0] = 1
                    seen[1] |= gradient[padding_row(parameter)].any().to(torch.int64)

    def before(self, step: int) -> None:
        """Asks, where a parameter has had no gradient before, once the gradients have left."""
        if self._asks:
            self.agree()

    def agree(self) -> None:
        """Lets the rows move of which any replica has had a gradient. Collective."""
        released = False
        self._asks = False
        for link, rows in self._rows.items():
            anywhere = link.collect(self._seen[link].view(-1)).any(0).view(-1, 2).tolist()
            for (replicator, name), (has_gradient, moves) in zip(rows, anywhere, strict=True):
                self._asks |= not has_gradient
                if moves and padding_row(replicator.parameters[name]) is not None:
                    _use(replicator, name, self._base)
                    released = True
        if released:
            self._released()


def held_rows(
    replicators: Sequence[Replicator], base: BaseStep, released: Callable[[], object]
) -> PaddingRows | None:
    """The padding rows that `replicators` hold; None where they hold none."""
    if any(each.holds_padding for each in replicators):
        return PaddingRows(replicators, base, released)
    return None


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
