"""The rule of a step, from a gradient to the update that all replicas agree on, in ordinary torch.

    memory  = decay * memory + gradient          select
    sent    = the largest of basis(memory)
    memory  = memory - alpha * inverse(sent)     subtract
    update  = inverse(mean of what all sent)     update, after the exchange (`core.exchange`)
    weights = base optimizer(update)             `Replicated`

Every engine is held to it by tests; `ReferenceEngine` runs it as it stands, in blocks of rows where
that saves memory.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from detonation.core.codec.aggregate import Aggregation, Coefficients, Mean, aggregate
from detonation.core.codec.basis import DCT
from detonation.core.codec.codec import Codec, Selected
from detonation.core.flat.layout import Layout
from detonation.core.memory import Memory


class Rule:
    """The arithmetic of one replica's step on the rows of a flat.

    Args:
        codec: The basis, the selection and the precision.
        memory: What was not sent yet; None for a scheme without one.
        seed: Of the random selections; the same on all replicas.
    """

    def __init__(
        self, codec: Codec, layout: Layout, memory: Memory | None, seed: int, device: torch.device
    ) -> None:
        self.codec, self.layout, self.memory, self._seed, self.device = (
            codec,
            layout,
            memory,
            seed,
            device,
        )

    def select(
        self,
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Selected:
        """Adds signals to the decayed memory, and selects the coefficients to send.

        Args:
            bad: `[]` bool: where it is True the memory does not change.
            out: Where the values may go; new memory when left out.

        Shapes: one local shape per parameter -> values `[rows, k]`.
        """
        flat = (
            self.memory.absorb(signals, bad)
            if self.memory
            else self.layout.flatten(signals, self.device)
        )
        return self.codec.select(flat, step, self._seed, out)

    def subtract(self, sent: Iterable[Coefficients]) -> None:
        """Takes what was sent out of the memory, as every receiver reads it.

        Args:
            sent: Of this replica's message, one block of rows after the other.
        """
        if self.memory:
            self.memory.release(self.update(rows, Mean()) for rows in sent)

    def update(self, sent: Coefficients, aggregation: Aggregation) -> Tensor:
        """The update: the coefficients that all replicas sent, as one, in the coordinates of the
        parameters.

        Of few coefficients the inverse is a sum over them (docs/design.md: one arithmetic).

        Shapes: -> `[rows, chunk]` fp32; its padding is undefined.
        """
        basis, chunk = self.codec.basis, self.codec.selection.chunk
        if isinstance(basis, DCT) and isinstance(aggregation, Mean) and sent.is_sparse(chunk):
            return basis.inverse_sparse(*sent.joined(), chunk)
        return basis.inverse(aggregate(sent, aggregation, chunk))
