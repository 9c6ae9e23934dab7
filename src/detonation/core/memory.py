"""Memory: what a replica has not told yet."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from detonation.core.flat.layout import Layout

Error = Literal["keep", "drop"]


@dataclass(frozen=True)
class Feedback:
    """How memory behaves: `residual = decay * residual + signal`, then `residual -= alpha * told`.

    decay: from 0 to 1. With 1 nothing is ever forgotten; below 1 the residual is a momentum of the signal.
    alpha: from 0 to 1, the part of what was told that is taken out; 1 in DeMo v1 and FlexDeMo, 0.2 best in DeMo v2.
    error: what happens to the difference between a coefficient and what a coarse precision says of it. "keep" takes out
    what was said, so that nothing is lost (error feedback); "drop" takes out the coefficient (DisTrO).
    """

    decay: float
    alpha: float = 1.0
    error: Error = "keep"

    def __post_init__(self) -> None:
        for name in ("decay", "alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be from 0 to 1")
        if self.error not in ("keep", "drop"):
            raise ValueError(f"error is {self.error!r}, must be 'keep' or 'drop'")


class Memory:
    """The fp32 residual of one replica, private to it: 4 bytes per local coordinate.

    Its padding stays zero: what a transform moves there belongs to no parameter and must not compete to be told.
    """

    def __init__(
        self, layout: Layout, feedback: Feedback, device: torch.device, residual: Tensor | None = None
    ) -> None:
        self.feedback = feedback
        self.residual = layout.zeros(device) if residual is None else residual  # [rows, chunk]
        self._layout, self._device = layout, device
        self._views = None if layout.tiled else layout.views(self.residual)

    def part(self, layout: Layout, first: int) -> "Memory":
        """The rows from `first` on as a memory with this `layout`, sharing them."""
        return Memory(layout, self.feedback, self._device, self.residual[first : first + layout.rows])

    def absorb(self, signals: Sequence[Tensor | None]) -> Tensor:
        """Adds a signal (one tensor a parameter; an absent one is zero) and returns the residual."""
        self.residual.mul_(self.feedback.decay)
        if self._views is None:
            return self.residual.add_(self._layout.flatten(signals, self.residual.device))
        pairs = [(v, s) for v, s in zip(self._views, signals, strict=True) if s is not None and s.numel()]
        if pairs:
            torch._foreach_add_([view for view, _ in pairs], [signal.to(torch.float32) for _, signal in pairs])
        return self.residual

    def absorb_where(self, fine: Tensor, signals: Sequence[Tensor | None]) -> Tensor:
        """The same where `fine` (`[]` bool) says so, else the residual stays as it is: decided where it lies."""
        self.residual.mul_(
            torch.full((), self.feedback.decay, device=fine.device).masked_fill_(fine.logical_not(), 1.0)
        )
        if self._views is None:
            flat = self._layout.flatten(signals, self.residual.device)
            return self.residual.add_(flat.masked_fill_(fine.logical_not(), 0.0))
        pairs = [(v, s) for v, s in zip(self._views, signals, strict=True) if s is not None and s.numel()]
        if pairs:  # times 0 as whole numbers, because 0 * NaN is NaN
            bits = torch._foreach_mul([s.to(torch.float32).view(torch.int32) for _, s in pairs], fine.to(torch.int32))
            torch._foreach_add_([view for view, _ in pairs], [b.view(torch.float32) for b in bits])
        return self.residual

    def release(self, told: Iterable[Tensor]) -> None:
        """Takes out what was told, from the first row on."""  # each [some rows, chunk]
        first = 0
        for part in told:
            self.residual[first : first + len(part)].sub_(part, alpha=self.feedback.alpha)
            first += len(part)
        self.residual.view(-1).index_fill_(0, self._padding, 0.0)

    def owe(self, more: Tensor) -> None:
        """Adds what is still to be told, too."""  # [rows, chunk]
        self.residual.add_(more).view(-1).index_fill_(0, self._padding, 0.0)

    @cached_property
    def _padding(self) -> Tensor:
        return self._layout.padding(self._device)
