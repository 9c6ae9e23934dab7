"""Channel: memory, codec and link joined. A signal goes in, what all replicas agreed on comes out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.core.codec import Selected
from detonation.core.exchange import Waiter, exchange_for
from detonation.core.flat import Layout
from detonation.core.link import Link
from detonation.core.memory import Memory
from detonation.core.schemes import Scheme
from detonation.core.traffic import check


@dataclass(frozen=True)
class Sent:
    """A message on its way: `update` waits for what all replicas agree on, `[rows, chunk]`, the same bits on each.

    told: what the update would be if all had told what this replica did; only for a scheme that looks ahead.
    """

    update: Waiter
    told: Tensor | None


class Channel:
    """What one replica tells the others, one message a call: encode all, exchange once, apply all.

    Raises `LargerThanDense` where the scheme would send more than full synchronisation.
    """

    def __init__(self, scheme: Scheme, layout: Layout, link: Link, device: torch.device, seed: int) -> None:
        check(scheme, layout, link.replicas)
        self.layout, self.link, self.device = layout, link, device
        self.memory = Memory(layout, scheme.feedback, device) if scheme.feedback else None
        self.exchange = exchange_for(scheme, link, layout.rows, device)
        self._scheme, self._codec, self._seed = scheme, scheme.codec, seed

    def send(self, signals: Sequence[Tensor | None], step: int) -> Sent:
        """Takes in a signal (one tensor a parameter), sends what the codec makes of it, and takes it out of memory."""
        flat = self.memory.absorb(signals) if self.memory else self.layout.flatten(signals, self.device)
        selected = self._codec.select(flat, step, self._seed)
        prepared = self.exchange.prepare(selected)
        told = self._parameters(prepared.read, selected).clone() if self._scheme.lookahead else None
        if self.memory:
            out = selected.values if self.memory.feedback.error == "drop" else prepared.read
            self.memory.release(self._parameters(out, selected))
        agreed = prepared.start()
        return Sent(lambda: self._codec.basis.inverse(agreed()), told)

    def _parameters(self, values: Tensor, selected: Selected) -> Tensor:
        return self._codec.basis.inverse(self._codec.spread(values, selected.columns))
