"""The rule of a step in plain torch: from a gradient to the update that all replicas apply.

    memory  = decay * memory + gradient          select
    sent    = the largest of basis(memory)
    memory  = memory - alpha * inverse(sent)     subtract
    update  = inverse(mean of what all sent)     update, after the exchange (`core.exchange`)
    weights = base optimizer(update)             `Replicated`

Tests compare every engine with this rule. `ReferenceEngine` runs it unchanged, in blocks of rows if
that saves memory.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from detonation.core.codec import DCT, Aggregation, Codec, Coefficients, Mean, Selected, aggregate
from detonation.core.flat.layout import Layout
from detonation.core.memory import Memory


class Rule:
    """The arithmetic of one replica's step on the rows of a flat.

    Args:
        codec: Basis, selection and precision.
        memory: Momentum that was not sent yet; None for a scheme without a memory.
        seed: Seed of random selections, the same on all replicas.
    """

    def __init__(
        self, codec: Codec, layout: Layout, memory: Memory | None, seed: int, device: torch.device
    ) -> None:
        self.codec = codec
        self.layout = layout
        self.memory = memory
        self._seed = seed
        self.device = device

    def select(
        self,
        signals: Sequence[Tensor | None],
        step: int,
        bad: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Selected:
        """Adds signals to the decayed memory of unsent values, and selects the coefficients to
        send.

        Args:
            bad: `[]` bool: if it is True, the memory does not change.
            out: Memory for the values; by default new memory.

        Shapes: one local shape per parameter -> values `[rows, k]`.
        """
        if self.memory:
            flat = self.memory.absorb(signals, bad)
        else:
            flat = self.layout.flatten(signals, self.device)
        return self.codec.select(flat, step, self._seed, out)

    def subtract(self, sent: Iterable[Coefficients]) -> None:
        """Subtracts the sent coefficients, as every receiver decodes them, from the memory of
        unsent values.

        Args:
            sent: Coefficients of this replica's message, one block of rows after the other.
        """
        if self.memory:
            self.memory.release(self.update(rows, Mean()) for rows in sent)

    def update(self, sent: Coefficients, aggregation: Aggregation) -> Tensor:
        """Aggregates the coefficients of all replicas to the update of the parameters.

        If few coefficients were sent, the inverse transform is computed as a sum over these
        coefficients (docs/design.md: one arithmetic).

        Shapes: -> `[rows, chunk]` fp32; its padding is undefined.
        """
        basis = self.codec.basis
        chunk = self.codec.selection.chunk
        if isinstance(basis, DCT) and isinstance(aggregation, Mean) and sent.is_sparse(chunk):
            return basis.inverse_sparse(*sent.joined(), chunk)
        return basis.inverse(aggregate(sent, aggregation, chunk))
