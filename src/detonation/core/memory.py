"""A replica's private state: the memory of its unsent values, and the named tensors that a
checkpoint of this state holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch

from detonation.choices import first_names
from detonation.core.flat.layout import Layout
from detonation.core.flat.rows import Bucket, KeptRows

if TYPE_CHECKING:
    from torch import Tensor

STRIPS = 16
"""Number of parts in which signals are cut into tiles. Cutting makes two copies of each part, so
more parts need less memory for these copies.
"""


@dataclass(frozen=True)
class Feedback:
    """How the memory of unsent values changes at a step: `residual = decay * residual + signal`,
    then `residual -= alpha * sent`.

    Args:
        decay: From 0 to 1. With 1 nothing is ever forgotten; below 1 the residual is a momentum of
            the signal.
        alpha: From 0 to 1, the share of the sent values that is subtracted; 1 in DeMo v1 and
            FlexDeMo, 0.2 is best in DeMo v2.
        error_feedback: Whether the rounding error of a sent coefficient stays in the memory, so
            that nothing is lost. If False, the whole coefficient is subtracted (DisTrO).

    Raises:
        ValueError: A value is out of range.
    """

    decay: float
    alpha: float = 1.0
    error_feedback: bool = True

    def __post_init__(self) -> None:
        for name in ("decay", "alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be from 0 to 1")


class Memory:
    """The memory of what one replica has computed and not sent yet (the residual). The residual has
    one fp32 number for each local coordinate. No other replica sees these numbers.

    The padding of the residual stays zero. Values that a transform would write into the padding
    belong to no parameter, and must not compete for selection.
    """

    def __init__(
        self,
        layout: Layout,
        feedback: Feedback,
        device: torch.device,
        residual: Tensor | None = None,
    ) -> None:
        self.feedback = feedback
        if residual is None:
            residual = layout.zeros(device)
        self.residual = residual  # [rows, chunk]
        self._layout = layout
        self._device = device
        self._views: list[Tensor] = []
        if not layout.tiled:
            self._views = layout.views(self.residual)
        self._kept: WeakSet[KeptRows] = WeakSet()

    def of_rows(self, layout: Layout, first: int) -> Memory:
        """A memory of some of these rows, from row `first` on. `layout` describes the rows. Both
        memories share storage.
        """
        residual = self.residual[first : first + layout.rows]
        return Memory(layout, self.feedback, self._device, residual)

    def absorb(self, signals: Sequence[Tensor | None], bad: Tensor | None = None) -> Tensor:
        """Multiplies the residual by the decay, and adds the new signals (gradients, or changes of
        the parameters).

        Args:
            signals: One tensor per parameter; an absent tensor counts as zeros.
            bad: `[]` bool, if the device checks the signals. If it is True, the residual does not
                change.

        Shapes: one local shape per parameter -> the residual, `[rows, chunk]` fp32.
        """
        present = [s for s in signals if s is not None and s.numel()]
        if self._views and all(s.dtype == torch.float32 for s in present):
            self._absorb_in_place(signals, present, bad)
            return self.residual
        if bad is None:
            self.residual.mul_(self.feedback.decay)
        else:
            self.residual.mul_(self._decay.masked_fill(bad, 1.0))
        # the signals are copied first, to convert them to fp32 and, in a tiled layout, into tiles
        parts = [Bucket.whole(self._layout)]
        if self._layout.tiled:
            parts = Bucket.strips(self._layout, -(-self._layout.rows // STRIPS))
        for part in parts:
            flat = part.layout.flatten(part.cut(signals), self.residual.device)
            if bad is not None:
                flat.masked_fill_(bad, -0.0)  # adding -0.0 changes no bits
            self.residual[part.rows].add_(flat)
            del flat  # frees this copy before the next part of the signals is copied
        return self.residual

    def _absorb_in_place(
        self, signals: Sequence[Tensor | None], present: list[Tensor], bad: Tensor | None
    ) -> None:
        """Adds fp32 signals directly to the decayed residual, without a copy of the signals.

        If the device checks the signals, the host does not know yet whether they are `bad`
        (nonfinite or too large). In this case the sum is a new tensor, which the device copies to
        the residual only if `bad` is False.
        """
        if bad is None:
            to = self.residual
            if self.feedback.decay != 1:
                to.mul_(self.feedback.decay)
            views = self._views
        else:
            to = self.residual.mul(self.feedback.decay)
            views = self._layout.views(to)
        if present:
            added = [v for v, s in zip(views, signals, strict=True) if s is not None and s.numel()]
            torch._foreach_add_(added, present)
        if bad is not None:
            torch.where(bad, self.residual, to, out=self.residual)

    def release(self, sent: Iterable[Tensor]) -> None:
        """Subtracts the sent values, times `alpha`, from the residual.

        Shapes: consecutive rows from the first on, `[n, chunk]` each.
        """
        first = 0
        for part in sent:
            self.residual[first : first + len(part)].sub_(part, alpha=self.feedback.alpha)
            first += len(part)
            del part  # frees this part of the sent values before the next part is decoded
        if len(self._padding):
            self.residual.view(-1).index_fill_(0, self._padding, 0.0)

    def clear(self) -> None:
        """Sets the residual to zero, and drops the copies of its rows that `keep` made."""
        self.residual.zero_()
        for kept in self._kept:
            kept.forget()

    def keep(self, numbers: Tensor) -> KeptRows:
        """Copies the rows of some parameters, so that a step of these parameters can be undone; see
        `KeptRows`.

        Shapes: numbers `[rows]` int64.
        """
        kept = KeptRows(self.residual, numbers)
        self._kept.add(kept)
        return kept

    def scale(self, factor: float) -> None:
        """Multiplies the residual by `factor`."""
        self.residual.mul_(factor)

    def add(self, more: Tensor) -> None:
        """Adds `more` to the residual, except to its padding.

        Shapes: `[rows, chunk]`.
        """
        self.residual.add_(more).view(-1).index_fill_(0, self._padding, 0.0)

    @cached_property
    def _decay(self) -> Tensor:
        return torch.full((), self.feedback.decay, dtype=torch.float32, device=self._device)

    @cached_property
    def _padding(self) -> Tensor:
        return self._layout.padding(self._device)  # [padded] int64


def require_same_keys(what: str, current: Iterable[str], saved: Iterable[str]) -> None:
    """Raises `ValueError` if a saved state and the current state have different keys. The error
    calls the saved state `what`.

    >>> require_same_keys("the saved state", ["0.residual.weight"], [])
    Traceback (most recent call last):
    ValueError: the saved state belongs to another model or scheme: it differs in 0.residual.weight
    """
    if odd := sorted({*current} ^ {*saved}):
        raise ValueError(
            f"{what} belongs to another model or scheme: it differs in {first_names(odd)}"
        )


@dataclass(frozen=True)
class LocalState:
    """The state of one or several objects, as tensors that share memory with these objects.

    Args:
        flats: Flat matrices `[rows, chunk]`, by kind (`residual`, `anchor`, ...).
        others: Tensors that are not in the coordinates of a parameter, by name.
        loaded: Called after `load`.
    """

    layout: Layout
    flats: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    loaded: Callable[[], object] = lambda: None

    def named(self) -> dict[str, Tensor]:
        """Read-only tensors by name: for each flat one part per parameter, in the parameter's local
        shape, and then the tensors in `others`. The name of a part is "kind.parameter", such as
        "residual.weight".

        Shapes: -> one local shape per kind and parameter.
        """
        parts = {
            f"{kind}.{slot.name}": part
            for kind, flat in self.flats.items()
            for slot, part in zip(self.layout.slots, self.layout.parts(flat), strict=True)
        }
        return parts | dict(self.others)

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Copies the saved tensors, a result of `named`, back into the state."""
        # `torch.no_grad` as a decorator would load torch already when this module is imported
        with torch.no_grad():
            for kind, flat in self.flats.items():
                self.layout.write(
                    flat, [saved[f"{kind}.{slot.name}"] for slot in self.layout.slots]
                )
            for name, tensor in self.others.items():
                tensor.copy_(saved[name])
        self.loaded()
