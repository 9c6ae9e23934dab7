"""Channel: memory, codec and link joined. A signal goes in, what all replicas agreed on comes out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.core.combine import Agreed
from detonation.core.engine import engine_for
from detonation.core.exchange import exchange_for
from detonation.core.flat import Layout
from detonation.core.link import Link
from detonation.core.memory import Memory
from detonation.core.schemes import Scheme
from detonation.core.traffic import check


@dataclass(frozen=True)
class Sent:
    """A message on its way.

    update: waits for what all replicas agree on, `[rows, chunk]`, the same bits on each, good until the next message.
    told: what the update would be if all had told what this replica did; only for a scheme that looks ahead.
    """

    update: Callable[[], Tensor]
    told: Tensor | None


class Channel:
    """What one replica tells the others, one message a call: encode all, exchange once, apply all.

    Raises `LargerThanDense` where the scheme would send more than full synchronisation.
    """

    def __init__(
        self, scheme: Scheme, layout: Layout, link: Link, device: torch.device, seed: int, kernels: bool = True
    ) -> None:
        check(scheme, layout, link.replicas)
        self.layout, self.link, self.device = layout, link, device
        self.memory = Memory(layout, scheme.feedback, device) if scheme.feedback else None
        self.engine = engine_for(scheme.codec, layout, self.memory, device, seed, kernels)
        self.exchange = exchange_for(scheme, link, layout.rows, device)
        self._lookahead = scheme.lookahead

    def send(self, signals: Sequence[Tensor | None], step: int) -> Sent:
        """Takes in a signal (one tensor a parameter), sends what the codec makes of it, and takes it out of memory."""
        selected = self.engine.select(signals, step)
        prepared = self.exchange.prepare(selected)
        told = None
        if self._lookahead:
            told = self.engine.update(Agreed.one(prepared.read, selected.columns)).clone()
        self.engine.release(selected, prepared.read)
        agreed = prepared.start()
        return Sent(lambda: self.engine.update(agreed()), told)

    def state(self) -> dict[str, list[Tensor]]:
        """The memory, if there is one, by parameter and sharing memory with it."""
        return {"residual": self.memory.views} if self.memory else {}
