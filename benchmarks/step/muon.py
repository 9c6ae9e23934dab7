"""Operations and bytes of a step of Muon on 1, 4 and 8 shards: counted, not timed.

    python -m benchmarks.step.muon [--shards 1 4 8] [--hidden 128] [--layers 8]

Ranks are processes on this machine, and the matrices those of a Llama of this size in fp32.
*Products* are the operations of all matrix products in one step, over all ranks, and *to one* is
their ratio to those of one rank with whole matrices. *Busiest* is the share of the rank with the
most, times the ranks: 1 if all have as many. *Bytes* are sent by a rank on average, per parameter.
"owner" is what Muon does: one rank computes a matrix; "every rank" is what it did before: each rank
gathers and computes all of them. On accelerators "owner" sends bf16, half of the bytes.
"""

import argparse
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import detonation as dt
from detonation.cluster.launch import run_local
from detonation.muon import matrices

MOST = 1.15
"""The most that products may cost on any number of shards, to those on one."""
OWNER, EVERY_RANK = "owner", "every rank"


class Sent(TorchDispatchMode):
    """Counts the collectives that leave this rank, and their bytes to other ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.collectives, self.nbytes, self._rank, self._ranks = 0, 0, rank, ranks

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        name = function._schema.name
        if name == "c10d::alltoall_base_":
            self.collectives += 1
            to_others = sum(args[4]) - args[4][self._rank]
            self.nbytes += to_others * args[1].element_size()
        if name == "_c10d_functional::all_gather_into_tensor":
            self.collectives += 1
            self.nbytes += args[0].nbytes * (self._ranks - 1)
        return function(*args, **(kwargs or {}))


def shapes(hidden: int, layers: int) -> list[tuple[int, int]]:
    """The matrices of a Llama with a quarter of the heads for keys and values."""
    attention = [(hidden, hidden), (hidden // 4, hidden), (hidden // 4, hidden), (hidden, hidden)]
    mlp = [(3 * hidden, hidden), (3 * hidden, hidden), (hidden, 3 * hidden)]
    return (attention + mlp) * layers


def step(hidden: int, layers: int, way: str) -> dict[str, int]:
    """Counts a step on this rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    weights = []
    for shape in shapes(hidden, layers):
        whole = torch.randn(shape, generator=generator)
        weights.append(nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        weights[-1].grad = weights[-1].detach().clone()
    optimizer = dt.Muon(weights)
    take = {OWNER: matrices._take_by_owners, EVERY_RANK: on_every_rank}[way]
    sent = Sent(dist.get_rank(), dist.get_world_size())
    counter = FlopCounterMode(display=False)
    with patch.object(matrices, "_take_by_owners", take), sent, counter:
        optimizer.step()
    return {
        "products": counter.get_total_flops(),
        "collectives": sent.collectives,
        "nbytes": sent.nbytes,
    }


def symmetric_share(every: list[tuple[int, int]]) -> float:
    """The share of operations that a product saves if it computes one half of symmetric results.

    Those are the Gram matrix, and its square.
    """
    sides = [sorted(shape) for shape in every]
    halves = sum(short**2 * long + short**3 for short, long in sides)
    return halves / sum(matrices.operations(shape) for shape in every)


def on_every_rank(steps: list[Any]) -> None:
    for each in steps:
        matrices._take_on_every_rank(each.step)


def counted(shards: int, hidden: int, layers: int, way: str) -> dict[str, float]:
    """Counts a step on so many shards."""
    ranks = run_local(step, shards, [hidden, layers, way])
    products = [each["products"] for each in ranks]
    parameters = sum(a * b for a, b in shapes(hidden, layers))
    return {
        "products": sum(products),
        "busiest": max(products) * shards / sum(products),
        "collectives": max(each["collectives"] for each in ranks),
        "bytes": sum(each["nbytes"] for each in ranks) / shards / parameters,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    size = args.hidden, args.layers
    one = counted(1, *size, OWNER)["products"]
    print("| shards | computed by | products | to one | busiest | collectives | bytes |")
    print("|---|---|---|---|---|---|---|")
    ratios = []
    for shards in args.shards:
        for way in (OWNER, EVERY_RANK):
            found = counted(shards, *size, way)
            ratio = found["products"] / one
            if way == OWNER:
                ratios.append(ratio)
            print(
                f"| {shards} | {way} | {found['products']:.3g} | {ratio:.2f} "
                f"| {found['busiest']:.2f} | {found['collectives']} | {found['bytes']:.2f} |",
                flush=True,
            )
    saved = symmetric_share(shapes(*size))
    print(f"a product of one half of symmetric results would save {saved:.0%} of the operations")
    if max(ratios) > MOST:
        raise SystemExit(f"products cost {max(ratios):.2f} times those of one, at most {MOST}")


if __name__ == "__main__":
    main()
