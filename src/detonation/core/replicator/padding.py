"""Keeps the padding rows of embeddings unchanged until a replica has a gradient for them."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from detonation.core.flat.padding_rows import mark_used
from detonation.core.flat.tensors import local_gradients, padding_row, whole_of
from detonation.core.link import Link
from detonation.core.optim import BaseStep
from detonation.core.replicator.base import Replicator


class PaddingRows:
    """Keeps the padding rows of embeddings in `replicators` unchanged, until any replica has a
    nonzero gradient for a row. Such a row is then released: it moves like other rows.

    In the first step the replicas exchange which padding rows have had a nonzero gradient. They
    repeat this exchange in each step until every embedding with a padding row has had a gradient on
    some replica. Afterwards the exchange runs only when replicas compare their weights
    (`verify_every`).

    Args:
        released: Called after rows were released.
    """

    def __init__(
        self, replicators: Sequence[Replicator], base: BaseStep, released: Callable[[], object]
    ) -> None:
        self._base = base
        self._released = released
        self._rows: dict[Link, list[tuple[Replicator, str]]] = {}
        for each in replicators:
            if not each.holds_padding:
                continue
            for name, parameter in each.parameters.items():
                if padding_row(parameter) is not None:
                    self._rows.setdefault(each.link, []).append((each, name))
        # two flags per padding row: its embedding had a gradient; the row's gradient was nonzero
        self._seen = {
            link: torch.zeros(
                len(rows), 2, dtype=torch.int64, device=rows[0][0].channel.runtime.device
            )
            for link, rows in self._rows.items()
        }
        self._asks = bool(self._rows)

    def look(self) -> None:
        """Records which padding rows have nonzero gradients on this replica. Must be called before
        the agreed update replaces the gradients."""
        for link, rows in self._rows.items():
            for seen, (each, name) in zip(self._seen[link], rows, strict=True):
                parameter = each.parameters[name]
                row = padding_row(parameter)
                (gradient,) = local_gradients({name: parameter})
                if gradient is not None:
                    seen[0] = 1
                    if row is not None:  # `row` is None if `agree` has released the padding row
                        seen[1] |= gradient[row].any()

    def before(self, step: int) -> None:
        """Calls `agree` as long as some embedding with a padding row has had no gradient on any
        replica. Runs after gradients were sent.
        """
        if self._asks:
            self.agree()

    def agree(self) -> None:
        """Releases the padding rows for which any replica has had a nonzero gradient, so that these
        rows move from now on. Collective.
        """
        released = False
        self._asks = False
        for link, rows in self._rows.items():
            seen = link.collect(self._seen[link].view(-1))
            anywhere = seen.any(0).view(-1, 2).tolist()
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
    """Returns the `PaddingRows` of `replicators`; None if no replicator must keep padding rows of
    embeddings unchanged."""
    if any(each.holds_padding for each in replicators):
        return PaddingRows(replicators, base, released)
    return None


def use_rows(names: Collection[str], replicators: Sequence[Replicator], base: BaseStep) -> None:
    """Lets the padding rows of the embeddings `names` move from now on. Called when a run is
    continued or replayed in which the replicas had already released these rows.
    """
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
