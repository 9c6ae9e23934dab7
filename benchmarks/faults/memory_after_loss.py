"""Should memories begin empty after a loss of all replicas and a replay of the log, or as the checkpoint has them?

    python -m benchmarks.faults.memory_after_loss

Replicas train, and what they have still to send is compared with what they had some steps before, when a checkpoint was
saved: the mean over replicas, of which law 1 speaks. Who begins with an empty memory is wrong by all of it, which is 1;
who keeps that of the checkpoint lacks what came since, and sends again what was sent since.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import detonation as dt
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.link.communicator import Communicator
from detonation.core.schemes.scheme import Scheme

SCHEMES = {
    "`demo()`": dt.demo(),
    '`demo(precision="sign", error_feedback=False)`': dt.demo(
        precision="sign", error_feedback=False
    ),
    "`demo(topk=1, ..., decay=0.95)`": dt.demo(
        topk=1, precision="sign", error_feedback=False, decay=0.95
    ),
    "`random()`": dt.schemes.random(),
    "`random_sign()`": dt.random_sign(),
    "`loco()`": dt.loco(),
}
REPLICAS, SAVED, AFTER = 4, 200, (1, 5, 20, 100)


def memories(axis: Communicator, scheme: Scheme) -> dict[int, Tensor]:
    """What one replica has to send when the checkpoint is saved (0), and some steps later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    teacher = nn.Linear(64, 64)
    optimizer = dt.replicate(dt.SignSGD(model.parameters(), lr=1e-3), model, axis, scheme)
    generator, found = torch.Generator().manual_seed(100 + axis.replica), {}
    for step in range(1 - SAVED, max(AFTER) + 1):
        inputs = torch.randn(16, 64, generator=generator)
        (model(inputs) - teacher(inputs).tanh()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, *AFTER):
            memory = optimizer.build()[0].channel.memory
            assert memory is not None
            found[step] = memory.residual.double()
    return found


def errors(scheme: Scheme) -> Sequence[float]:
    """The distance of the memory at the checkpoint from that of `AFTER` steps later, in norms of the latter."""
    everyone = simulate_replicas(lambda axis: memories(axis, scheme), REPLICAS)
    mean = {step: torch.stack([each[step] for each in everyone]).mean(0) for step in (0, *AFTER)}
    return [float((mean[step] - mean[0]).norm() / mean[step].norm()) for step in AFTER]


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.set_num_threads(1)
    print(
        "| kept, by steps since the checkpoint (empty: 1) | " + " | ".join(map(str, AFTER)) + " |"
    )
    print("|---" * (1 + len(AFTER)) + "|")
    for name, scheme in SCHEMES.items():
        print(
            f"| {name} | " + " | ".join(f"{each:.2f}" for each in errors(scheme)) + " |", flush=True
        )


if __name__ == "__main__":
    main()
