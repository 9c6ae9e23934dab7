"""Channel: memory, codec and link joined. A signal goes in, what all replicas agreed on comes out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.core.combine import Agreed
from detonation.core.engine import engine_for
from detonation.core.exchange import exchange_for
from detonation.core.flat import Layout
from detonation.core.link import Link
from detonation.core.memory import Memory
from detonation.core.private import Private
from detonation.core.scheme import Scheme


@dataclass(frozen=True)
class Sent:
    """A message on its way.

    update: waits for what all replicas agree on, `[rows, chunk]`, the same bits on each.
    write: the same into one tensor a parameter, without the way over a flat.
    told: what the update would be if all had told what this replica did; only for a scheme that looks ahead.
    """

    update: Callable[[], Tensor]
    write: Callable[[Sequence[Tensor]], None]
    told: Tensor | None


class Channel:
    """What one replica tells the others, one message a call: encode all, exchange once, apply all."""

    def __init__(
        self, scheme: Scheme, layout: Layout, link: Link, device: torch.device, seed: int, kernels: bool = True
    ) -> None:
        self.layout, self.link, self.device = layout, link, device
        self.memory = Memory(layout, scheme.feedback, device) if scheme.feedback else None
        self.engine = engine_for(scheme.codec, layout, self.memory, device, seed, kernels)
        self.exchange = exchange_for(scheme, link, layout.rows, device)
        self._lookahead = scheme.lookahead
        self._drops = scheme.feedback is None or scheme.feedback.error == "drop"  # then what others read is not needed

    def send(self, signals: Sequence[Tensor | None], step: int) -> Sent:
        """Takes in a signal (one tensor a parameter), sends what the codec makes of it, and takes it out of memory."""
        selected = self.engine.select(signals, step)
        prepared = self.exchange.prepare(selected)
        told = None
        if self._lookahead:
            # a copy: what is read of an uncompressed message is the buffer that the link is about to add into
            told = self.engine.update(Agreed.one(prepared.read().clone(), selected.columns))
        self.engine.release(selected, selected.values if self._drops else prepared.read())
        agreed = prepared.start()
        return Sent(lambda: self.engine.update(agreed()), lambda targets: self.engine.write(agreed(), targets), told)

    def private(self, flats: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> Private:
        """What memory and exchange must keep to go on, with a replicator's own `flats` and `others`."""
        memory = {"residual": self.memory.residual} if self.memory else {}
        return Private(self.layout, memory | dict(flats), self.exchange.state() | dict(others or {}))
