"""What the tests share: every scheme once, models with awkward parameters, and data that differs between ranks."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import detonation as dt
from detonation.core.codec.aggregate import AGGREGATIONS, Aggregation, aggregate
from detonation.core.codec.codec import Codec
from detonation.extend import DCT, TopK, outer_sgd

DEVICE = torch.device(os.environ.get("TEST_DEVICE", "cpu"))
"""Where the models and batches of the tests are; `make gpu` sets TEST_DEVICE=cuda."""
SCHEMES = {
    "full": dt.full(),
    "full-bf16": dt.full(precision="bf16"),
    "none": dt.none(),
    "loco": dt.loco(),
    "loco-sign-owner": dt.loco("sign", decay=0.9, link="owner"),
    "demo": dt.demo(topk=4, chunk=16),
    "demo-senders-bf16": dt.demo(topk=2, chunk=64, precision="bf16", aggregate="mean_nonzero"),
    "demo-alpha": dt.demo(topk=3, chunk=10, decay=0.9, alpha=0.2),
    "demo-published": dt.demo(
        topk=6, chunk=8, tiles=True, aggregate="mean_nonzero", link="all-gather"
    ),
    "demo-whole": dt.demo(topk=1, chunk=1000),
    "random": dt.schemes.random(rate=1 / 4),
    "random-odd": dt.schemes.random(rate=0.3, decay=0.95, precision="bf16"),
    "demo-sign": dt.demo(topk=4, chunk=64, precision="sign", error_feedback=False),
    "demo-bitmap-2bit": dt.demo(topk=9, chunk=16, precision="2bit"),
    "random-int8-clipped": dt.schemes.random(
        rate=1 / 2, precision="int8", aggregate="clipped_mean"
    ),
    "random-majority": dt.schemes.random(rate=1 / 2, precision="4bit", aggregate="majority_vote"),
    "random-sign": dt.random_sign(rate=1 / 8),
    "demo-tiles": dt.demo(topk=6, chunk=8, tiles=True),
    "demo-tiles-64-sign": dt.demo(topk=40, chunk=64, tiles=True, precision="sign", link="owner"),
    "demo-owner": dt.demo(topk=4, chunk=64, link="owner"),
    "random-sign-owner": dt.random_sign(rate=1 / 2, error_feedback=True, link="owner"),
    "striding": dt.schemes.striding(rate=1 / 16),
    "diloco": dt.diloco(every=3),
    "streaming": dt.schemes.streaming_diloco(
        every=4, fragments=3, delay=1, keep=0.5, precision="fp32"
    ),
    "local-sgd": dt.schemes.local_sgd(every=2, precision="int8"),
    "sparseloco": dt.schemes.sparseloco(every=2, topk=8, chunk=256),
    "demo-diloco": outer_sgd(3, 0.7, 0.5, basis=DCT(), selection=TopK(4, 64), decay=0.95),
    "decoupled-adamw": dt.schemes.decoupled_adamw(topk=4, chunk=16, decay=0.9),
    "muloco": dt.muloco(every=3),
    "muloco-2bit": dt.muloco(every=2, precision="2bit", decay=0.9),
    # not in 2 bits, which have no zero: the zeros of two replicas cancel in a mean, but have a length
    "muloco-rescaled": dt.muloco(2, 1.0, 0.0, "int8", aggregate="rescaled_mean"),
    "demo-rescaled": dt.demo(
        topk=9, chunk=16, precision="bf16", aggregate="rescaled_mean", link="owner"
    ),
    "sparta": dt.schemes.sparta(rate=1 / 4),
    "diloco-bf16": dt.diloco(every=2, precision="bf16"),
}
"""The table of laws: a new scheme is one line here."""

TALKING = {name: scheme for name, scheme in SCHEMES.items() if scheme.signal != "nothing"}
REGISTERED = {name: scheme for name, scheme in TALKING.items() if scheme.name != "unnamed"}
"""Those that their names make again."""
GRADIENT = {name: scheme for name, scheme in SCHEMES.items() if scheme.signal == "gradients"}
KINDS = [
    "full", "demo", "demo-owner", "demo-tiles-64-sign", "streaming", "sparseloco", "muloco-2bit",
    "sparta", "decoupled-adamw",
]  # fmt: skip
"""One of every kind of codec, link, round and memory: where what is tested next to a scheme is more than the scheme."""
WORLDS = [(2, 1), (2, 2), (4, 1), (1, 2)]
PRECISION_ERRORS = {"fp32": 0, "bf16": 0.004, "int8": 0.02, "4bit": 0.25, "2bit": 0.4, "sign": 0.65}
"""The second table of laws: the largest relative error (L2) on a Gaussian. A new precision is one line here."""


def values_of(codec: Codec, message: Tensor, rows: int) -> Tensor:
    """The values of a message without a header, as every receiver decodes them: `[rows, k]` fp32."""
    return codec.values(torch.split(message.unsqueeze(0), list(codec.lengths[rows]), 1), rows)[0]


class Menagerie(nn.Module):
    """Every awkward kind of parameter: 4-D, prime sizes, tied, frozen, unused, bf16 and, unsharded, a scalar."""

    def __init__(self, scalar: bool = False) -> None:
        super().__init__()
        self.kernel = nn.Conv2d(1, 5, 3)  # 4-D; 5 rows over 2 shards are uneven
        self.body = nn.ModuleList([nn.Linear(257, 31), nn.Linear(31, 257, bias=False)])
        self.tied = nn.Linear(31, 257, bias=False)
        self.tied.weight = self.body[1].weight
        self.single = nn.Parameter(torch.ones(1, 7))  # one row: empty on all shards but the first
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(11))
        # a unit of its own, because FSDP2 wants one dtype in each
        self.coarse = nn.ModuleList([nn.Linear(13, 3, dtype=torch.bfloat16)])
        self.scalar = nn.Parameter(torch.tensor(0.5)) if scalar else 0.5

    def forward(self, x: Tensor) -> Tensor:  # [batch, 257] -> [batch]
        hidden = self.body[0](x)
        out = self.body[1](hidden) + self.tied(hidden.sin())
        picture = self.kernel(out[:, :256].view(-1, 1, 16, 16)).sum((1, 2, 3))
        small = self.coarse[0](x[:, :13].bfloat16()).float().sum(1)
        return picture * self.scalar + small + (x[:, :7] * self.single).sum(1) + self.frozen.sum()


class Plain(nn.Module):
    """A small model whose shards divide evenly, for comparison with ordinary torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 32)])

    def forward(self, x: Tensor) -> Tensor:  # [batch, 32] -> [batch]
        return self.layers[1](self.layers[0](x).tanh()).square().mean(1)


class Padded(Plain):
    """Words beside it, among them padding, which never has a gradient. Over two shards it is on the second."""

    padding = 17

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(33, 32, padding_idx=self.padding)
        with torch.no_grad():
            self.words.weight[self.padding] = torch.arange(32) / 10

    def forward(self, x: Tensor) -> Tensor:  # [batch, 32] -> [batch]
        return super().forward(x + self.words((x > 0).sum(1)))


HEADS = "trunk", "a", "b", "c", "d"
"""The parts of `Heads`."""


class Heads(nn.Module):
    """Heads over a trunk, of which a batch uses some, and none uses the last."""

    def __init__(self) -> None:
        super().__init__()
        for part in HEADS:
            self.add_module(part, nn.Linear(24, 24))

    def forward(self, x, heads):  # [batch, 24] -> []
        hidden = self.trunk(x).tanh()
        return sum(
            (self.get_submodule(head)(hidden).square().mean() for head in heads), hidden.mean()
        )


def encode(scheme: dt.schemes.Scheme, flat: Tensor, step: int, seed: int) -> Tensor:
    return scheme.codec.encode(scheme.codec.select(flat, step, seed))


def decode(
    codec: Codec,
    messages: Sequence[Tensor],
    rows: int,
    step: int,
    seed: int,
    how: str | Aggregation,
) -> Tensor:
    """The update that `messages` make together."""  # [rows, chunk]
    indices = None
    if codec.selection.shared and codec.selection.k < codec.selection.chunk:
        indices = codec.selection.indices(torch.empty(rows, codec.selection.chunk), step, seed)
    aggregation = AGGREGATIONS[how] if isinstance(how, str) else how
    received = codec.received(messages, rows, indices, aggregation)
    return codec.basis.inverse(aggregate(received.whole(), aggregation, codec.selection.chunk))


def batch(rank: int, step: int, width: int) -> Tensor:
    """The batch of one rank at one step: pure, so that any process can compute any other's."""
    return torch.randn(4, width, generator=torch.Generator().manual_seed(1000 * step + rank)).to(
        DEVICE
    )  # [4, width]


def built(model: type[nn.Module], **arguments: object) -> nn.Module:
    torch.manual_seed(0)
    return model(**arguments).to(DEVICE)
