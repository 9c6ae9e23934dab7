"""Tensor operations of a step on an accelerator: each is a launch, and launches bound the speed of small steps.

    python benchmarks/launches.py [--replicas 2 4 8]

OLMo2-1B's shapes over 8 shards, on the device `meta`: nothing is computed. Every operation but views counts, from the
gradients to the update in their place; the base optimizer does not. With overlap, gradients leave in buckets.
"""

import argparse
from collections import Counter

import torch
from memory import Mirror, Watch, accelerator
from torch import nn

import detonation as dt
from detonation.core.replicator.channel import Channel

SCHEMES = {
    "demo": dt.demo(),
    "demo, all-gather": dt.demo(link="all-gather"),
    "demo, owner": dt.demo(link="owner"),
    "demo, owner, sign": dt.demo(link="owner", precision="sign", error_feedback=False),
    "random": dt.random(),
    "random_sign": dt.random_sign(),
    "full": dt.full(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 4, 8])
    args = parser.parse_args()
    print("| scheme | replicas | buckets | operations | with overlap | most, with overlap |")
    print("|---|---|---|---|---|---|")
    for name, scheme in SCHEMES.items():
        for replicas in args.replicas:
            (_, plain), (channel, overlapped) = (operations(scheme, replicas, overlap) for overlap in (False, True))
            most = ", ".join(f"{what} {count}" for what, count in Counter(overlapped).most_common(8))
            cells = [name, replicas, len(channel.pipelines), len(plain), len(overlapped), most]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def olmo2_1b(shards: int = 8) -> list[tuple[int, ...]]:
    """The local shapes of OLMo2-1B: 16 layers of width 2048, feed-forward 8192, 100,352 tokens."""
    width, inner, tokens = 2048, 8192, 100_352
    layer = [(width // shards, width)] * 4 + [(width // shards,)] * 4  # attention and norms
    layer += [(inner // shards, width)] * 2 + [(width // shards, inner)]
    return [(tokens // shards, width), *layer * 16, (width // shards,), (tokens // shards, width)]


def operations(scheme: dt.Scheme, replicas: int, overlap: bool) -> tuple[Channel, list[str]]:
    """The channel, and the operations of its third step."""
    model = nn.ParameterList([torch.zeros(shape, device="meta") for shape in olmo2_1b()])
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, Mirror(replicas), scheme, kernels=False)
    channel = optimizer.build()[0].channel
    with accelerator():
        for step in range(3):
            gradients = [torch.zeros_like(parameter) for parameter in model]
            with Watch() as watch, torch.no_grad():
                if overlap:
                    transfer = channel.start(step)
                    for pipeline in channel.pipelines:
                        channel.send_bucket(transfer, pipeline, gradients)
                else:
                    transfer = channel.send(gradients, step)
                transfer.receive().write(gradients)
    return channel, watch.names


if __name__ == "__main__":
    main()
