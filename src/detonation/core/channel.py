"""Channel: memory, codec and link joined. A signal goes in, what all replicas agreed on comes out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from detonation.core.codec import Message
from detonation.core.flat import Layout
from detonation.core.link import Link
from detonation.core.memory import Memory
from detonation.core.schemes import Scheme
from detonation.core.traffic import check, kind


class Channel:
    """What one replica tells the others, one message a call: encode all, exchange once, apply all.

    Raises `LargerThanDense` where the scheme would send more than full synchronisation.
    """

    def __init__(self, scheme: Scheme, layout: Layout, link: Link, device: torch.device, seed: int) -> None:
        check(scheme, layout, link.replicas)
        self.layout, self.link, self.device = layout, link, device
        self.memory = Memory(layout, scheme.feedback, device) if scheme.feedback else None
        self._scheme, self._seed = scheme, seed

    def send(self, signals: Sequence[Tensor | None], step: int) -> Callable[[], Tensor]:
        """Takes in a signal (one tensor a parameter) and sends what the codec makes of it.

        The waiter returns the update, `[rows, chunk]`, bitwise the same on every replica.
        """
        flat = self.memory.absorb(signals) if self.memory else self.layout.flatten(signals, self.device)
        message = self._scheme.codec.encode(flat, step, self._seed)
        if self.memory:
            self.memory.release(self._decode([message], step))
        if kind(self._scheme) == "all-reduce":
            total = self.link.reduce(message.values)
            return lambda: self._decode([Message(total().to(torch.float32) / self.link.replicas)], step)
        everyone = self.link.gather(message.parts)
        return lambda: self._decode([Message(*parts) for parts in everyone()], step)

    def _decode(self, messages: Sequence[Message], step: int) -> Tensor:
        return self._scheme.codec.decode(messages, self.layout.rows, step, self._seed, self._scheme.combine)
