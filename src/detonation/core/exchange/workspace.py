"""Workspace: the memory of messages, written again step after step, so that a step on an accelerator allocates none."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from detonation.core.integrity.guard import Guard
from detonation.core.link.link import Link
from detonation.core.schemes.scheme import Scheme


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
        buffers = self._buffers.setdefault(name, [])
        oldest = buffers.pop(0) if len(buffers) == self.depth > 0 else None
        if oldest is None or oldest.shape != torch.Size(shape):
            oldest = torch.empty(*shape, dtype=torch.uint8, device=device)
        if self.depth:
            buffers.append(oldest)
        return oldest


def workspace_for(scheme: Scheme, link: Link, on_device: bool) -> Workspace:
    """The workspace of a channel.

    Gradients leave at every step. A round is rare, and its messages take memory only while they travel. A communicator
    that outlives replicas may send a message once more, long after it has arrived here; one of simulated replicas, on
    a CPU, hands a message itself to others, who may still read it.
    """
    kept = on_device and scheme.signal == "gradients" and link.elastic is None
    return Workspace(scheme.round.delay + 1 if kept else 0)


def fresh(guard: Guard) -> Callable[..., Tensor] | None:
    """Makes new memory for messages in the place of a workspace, where no kernels seal them; takes a shape."""
    return None if guard.kernels else partial(torch.empty, dtype=torch.uint8, device=guard.usual.device)
