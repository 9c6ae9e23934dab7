"""A model of one's own for the command line: `examples/my_model.toml` names the function `gru`.

cd examples && detonation train my_model.toml
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import cross_entropy


@dataclass
class Output:
    """The result of `model(**batch)`: the mean loss in nats; for images also `logits`, to count right answers."""

    loss: Tensor


class Gru(nn.Module):
    """A recurrent language model. Each element of an `nn.ModuleList` is sharded by itself, as a unit."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, vocab)

    def forward(
        self, input_ids: Tensor, labels: Tensor
    ) -> Output:  # both [B, T] int64, as the data give them
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)[0]
        logits = self.head(hidden[:, :-1])
        return Output(cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))


def gru(vocab: int, width: int = 64, layers: int = 2) -> nn.Module:
    """The factory: its arguments are the keys of [model]; `vocab`, which the data know, is filled in."""
    return Gru(vocab, width, layers)
