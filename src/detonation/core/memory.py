"""Memory: the part of a replica's signals that it has not sent yet."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from detonation.core.flat.layout import Layout


@dataclass(frozen=True)
class Feedback:
    """How memory behaves: `residual = decay * residual + signal`, then `residual -= alpha * sent`.

    Args:
        decay: From 0 to 1. With 1 nothing is ever forgotten; below 1 the residual is a momentum of the signal.
        alpha: From 0 to 1, the share of the sent values that leaves; 1 in DeMo v1 and FlexDeMo, 0.2 is best in DeMo v2.
        error_feedback: Whether the difference between a coefficient and its rounded value stays, so that nothing is
            lost; False takes the whole coefficient out (DisTrO).

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
    """The fp32 residual of one replica, private to it: 4 bytes per local coordinate.

    Its padding stays zero: values that a transform moves there belong to no parameter and must not compete to be sent.
    """

    def __init__(
        self, layout: Layout, feedback: Feedback, device: torch.device, residual: Tensor | None = None
    ) -> None:
        self.feedback = feedback
        self.residual = layout.zeros(device) if residual is None else residual  # [rows, chunk]
        self._layout, self._device = layout, device
        self._views = None if layout.tiled else layout.views(self.residual)

    def of_rows(self, layout: Layout, first: int) -> "Memory":
        """The rows from `first` on as a memory with this `layout`, sharing them."""
        return Memory(layout, self.feedback, self._device, self.residual[first : first + layout.rows])

    def absorb(self, signals: Sequence[Tensor | None], finite: Tensor | None = None) -> Tensor:
        """Decays the residual and adds a signal.

        Args:
            signals: One tensor per parameter; an absent one is zero.
            finite: On a device that decides by itself, `[]` bool: where it is False the residual stays as it is.

        Shapes: one local shape per parameter -> the residual, `[rows, chunk]` fp32.
        """
        if finite is None:
            self.residual.mul_(self.feedback.decay)
        else:
            decay = torch.full((), self.feedback.decay, dtype=torch.float32, device=finite.device)
            self.residual.mul_(decay.masked_fill_(finite.logical_not(), 1.0))
        if self._views is None:
            flat = self._layout.flatten(signals, self.residual.device)
            return self.residual.add_(flat if finite is None else flat.masked_fill_(finite.logical_not(), 0.0))
        pairs = [(v, s) for v, s in zip(self._views, signals, strict=True) if s is not None and s.numel()]
        if not pairs:
            return self.residual
        added = [signal.to(torch.float32) for _, signal in pairs]
        if finite is not None:  # times 0 as whole numbers, because 0 * NaN is NaN
            bits = torch._foreach_mul([signal.view(torch.int32) for signal in added], finite.to(torch.int32))
            added = [each.view(torch.float32) for each in bits]
        torch._foreach_add_([view for view, _ in pairs], added)
        return self.residual

    def release(self, sent: Iterable[Tensor]) -> None:
        """Takes out the sent values.

        Shapes: consecutive rows from the first on, `[some rows, chunk]` each.
        """
        first = 0
        for part in sent:
            self.residual[first : first + len(part)].sub_(part, alpha=self.feedback.alpha)
            first += len(part)
        self.residual.view(-1).index_fill_(0, self._padding, 0.0)

    def add(self, more: Tensor) -> None:
        """Adds values that are still to be sent.

        Shapes: `[rows, chunk]`.
        """
        self.residual.add_(more).view(-1).index_fill_(0, self._padding, 0.0)

    @cached_property
    def _padding(self) -> Tensor:
        return self._layout.padding(self._device)  # [padded] int64
