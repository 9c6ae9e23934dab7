"""Workspace: the memory of messages, written again step after step, so that a step on an accelerator allocates none."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Workspace:
    """Buffers of messages, by name; new ones each time with a `depth` of 0.

    A message lies in its buffer until the collective that carries it has ended. The next one is encoded on the same
    stream, after that stream has waited for the collective; so there are as many buffers as messages may be in flight.

    Args:
        depth: The messages of one name that may be in flight together.
    """

    depth: int = 0
    _buffers: dict[Hashable, list[Tensor]] = field(default_factory=dict)

    def take(self, name: Hashable, shape: Sequence[int], device: torch.device) -> Tensor:
        """The buffer that was taken longest ago.

        Shapes: -> `shape` uint8, of any content.
        """
        if not self.depth:
            return torch.empty(*shape, dtype=torch.uint8, device=device)
        buffers = self._buffers.setdefault(name, [])
        oldest = buffers.pop(0) if len(buffers) == self.depth else None
        if oldest is None or oldest.shape != torch.Size(shape):
            oldest = torch.empty(*shape, dtype=torch.uint8, device=device)
        buffers.append(oldest)
        return oldest
