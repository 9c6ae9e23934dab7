"""Tensor operations of a step on an accelerator: each is a launch, and launches bound the speed of small steps.

    python -m benchmarks.accelerator.launches [--replicas 2 4 8] [--kernels]

OLMo2-1B's shapes over 8 shards, on the device `meta`: nothing is computed. Every operation but views counts, from the
gradients to the update in their place; the base optimizer does not. With overlap, gradients leave in buckets. With
`--kernels` the Triton kernels do the step (they are counted, not run). Memory that is only allocated is no launch;
allocations are counted beside, but for the buffers into which the communicator receives.
"""

import argparse
import os
from collections import Counter
from collections.abc import Callable
from importlib import import_module

import torch
from benchmarks.accelerator.memory import Mirror, Watch, accelerator
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes as no_watch

import detonation as dt
from detonation.core.replicator.channel import Channel

SCHEMES = {
    "demo": dt.demo(),
    "demo, all-gather": dt.demo(link="all-gather"),
    "demo, owner": dt.demo(link="owner"),
    "demo, owner, sign": dt.demo(link="owner", precision="sign", error_feedback=False),
    "random": dt.schemes.random(),
    "random_sign": dt.random_sign(),
    "full": dt.full(),
}


ALLOCATES = {"empty", "empty_like", "new_empty", "empty_strided"}
"""Operations that take memory from torch's allocator, and start nothing on a device."""
VIEWS = {"_unsafe_view"}
"""Operations that start nothing either, and which torch does not count among its views."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument(
        "--kernels", action="store_true", help="count the launches of the Triton kernels"
    )
    args = parser.parse_args()
    if args.kernels:
        os.environ["DETONATION_KERNELS"] = "triton"
    print(
        "| scheme | replicas | buckets | operations | with overlap | allocations | most, with overlap |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, scheme in SCHEMES.items():
        for replicas in args.replicas:
            (_, plain, _), (channel, overlapped, allocated) = (
                operations(scheme, replicas, overlap, args.kernels) for overlap in (False, True)
            )
            most = ", ".join(
                f"{what} {count}" for what, count in Counter(overlapped).most_common(8)
            )
            cells = [
                name,
                replicas,
                len(channel.pipelines),
                len(plain),
                len(overlapped),
                allocated,
                most,
            ]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def olmo2_1b(shards: int = 8) -> list[tuple[int, ...]]:
    """The local shapes of OLMo2-1B: 16 layers of width 2048, feed-forward 8192, 100,352 tokens."""
    width, inner, tokens = 2048, 8192, 100_352
    layer = [(width // shards, width)] * 4 + [(width // shards,)] * 4  # attention and norms
    layer += [(inner // shards, width)] * 2 + [(width // shards, inner)]
    return [(tokens // shards, width), *layer * 16, (width // shards,), (tokens // shards, width)]


class Recycling(Mirror):
    """A communicator that receives into the same memory at every step."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self._buffers: dict[int, torch.Tensor] = {}

    def all_gather(self, mine: torch.Tensor) -> Callable[[], torch.Tensor]:
        arrived = self._buffers.get(mine.numel())
        if arrived is None:
            with no_watch():
                arrived = mine.new_empty(self._replicas, mine.numel())
            self._buffers[mine.numel()] = arrived
        return lambda: arrived

    def all_to_all(self, mine: torch.Tensor) -> Callable[[], torch.Tensor]:
        arrived = self._buffers.get(-mine.numel())
        if arrived is None:
            with no_watch():
                arrived = torch.empty_like(mine)
            self._buffers[-mine.numel()] = arrived
        return lambda: arrived.view(self._replicas, -1)


def operations(
    scheme: dt.schemes.Scheme, replicas: int, overlap: bool, kernels: bool = False
) -> tuple[Channel, list[str], int]:
    """The channel, the operations of its third step, and its allocations.

    Args:
        kernels: Whether the Triton kernels do the step, where DETONATION_KERNELS lets `meta` play an accelerator.
    """
    model = nn.ParameterList([torch.zeros(shape, device="meta") for shape in olmo2_1b()])
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, Recycling(replicas), scheme, kernels=kernels)
    channel = optimizer.build()[0].channel
    with accelerator():
        launched = (
            import_module("detonation.kernels.gpu.launching").launch_counts
            if kernels
            else Counter()
        )
        for step in range(3):
            if (
                not step or not kernels
            ):  # kernels find gradients by their addresses, which stay where they were
                gradients = [torch.zeros_like(parameter) for parameter in model]
            launched.clear()
            with Watch() as watch, torch.no_grad():
                if overlap:
                    transfer = channel.start(step)
                    for pipeline in channel.pipelines:
                        channel.send_bucket(transfer, pipeline, pipeline.bucket.cut(gradients))
                else:
                    transfer = channel.send(gradients, step)
                update = transfer.receive()
                update.engine.write(update.received, gradients)
    found = [name for name in watch.names if name not in ALLOCATES | VIEWS]
    launches = [*found, *(name for name, count in launched.items() for _ in range(count))]
    return channel, launches, sum(name in ALLOCATES for name in watch.names)


if __name__ == "__main__":
    main()
