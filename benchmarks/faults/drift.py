"""How far two replicas that round differently drift apart, with and without alignment.

    python -m benchmarks.faults.drift --steps 100000

Prints a table for the docs. Two simulated replicas train one small network, each on batches of its own; the second
moves a part of its weights by a unit in the last place in every step. Distances are of the weights, relative to their
norm; the tolerance is that of a comparison, by the rounding alone.
"""

import argparse
import time

import torch
from torch import Tensor, nn

import detonation as dt
from detonation.cluster.network.simulated import SimulatedCommunicator, simulate_replicas
from detonation.gates.closeness import tolerance

WIDTH, HIDDEN, BATCH = 16, 32, 16
ODD = {torch.float32: 0.5, torch.bfloat16: 2.0**-12}
"""The part of the weights that the second replica rounds otherwise in a step: in bf16 few results lie near a tie."""


def nudge(weight: Tensor, step: int, bias: float) -> None:
    """Moves some numbers by a unit in the last place: up with the probability `bias`, otherwise down."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.rand(weight.shape, generator=generator)
    part = ODD[weight.dtype]
    to = torch.full_like(weight, torch.inf)
    moved = torch.where(drawn < part * bias, weight.nextafter(to), weight.nextafter(-to))
    weight.copy_(torch.where(drawn < part, moved, weight))


def trained(
    dtype: torch.dtype, steps: int, bias: float, aligned: bool
) -> list[tuple[float, list[list[Tensor]]]]:
    """Of each replica: the mean loss of the last tenth, and its weights a hundred times on the way."""
    torch.manual_seed(0)
    teacher = torch.randn(WIDTH, 1)

    def act(communicator: SimulatedCommunicator) -> tuple[float, list[list[Tensor]]]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)).to(dtype)
        base = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        safety = dt.Safety(verify_every=1000 if aligned else 0, equal="close")
        optimizer = dt.replicate(base, model, communicator, dt.full(), safety=safety)
        optimizer.set_up()
        if not aligned:
            optimizer._consensus.gates.clear()
        generator = torch.Generator().manual_seed(2 + communicator.replica)
        total, found, parameters = 0.0, list[list[Tensor]](), list(model.parameters())
        for step in range(steps):
            x = torch.randn(BATCH, WIDTH, generator=generator)
            loss = (model(x.to(dtype)).float() - (x @ teacher).tanh()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for number, weight in enumerate(parameters) if communicator.replica else ():
                    nudge(weight, 10 * step + number, bias)
            if step >= steps - steps // 10:
                total += float(loss.detach())
            if (step + 1) % max(1, steps // 100) == 0:
                found.append([weight.detach().clone() for weight in parameters])
        return total / (steps // 10), found

    return simulate_replicas(act, 2)


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    """The distance of the weights, relative to their norm."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(one, other, strict=True)]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((difference / sum(float(a.square().sum()) for a, _ in pairs)) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print(
        f"{torch.__version__}, {steps:,} steps, two replicas of {WIDTH}-{HIDDEN}-1, full + AdamW\n"
    )
    print(
        "| weights | second rounds | alignment | largest distance | at the end | tolerance | losses | seconds |"
    )
    print("|---" * 8 + "|")
    for bias, name in ((1.0, "up alone"), (0.5, "up and down")):
        for dtype in (torch.float32, torch.bfloat16):
            most = tolerance(1.0, 0.0, torch.finfo(dtype).eps)
            for aligned in (True, False):
                began = time.perf_counter()
                first, second = trained(dtype, steps, bias, aligned)
                far = [apart(*pair) for pair in zip(first[1], second[1], strict=True)]
                losses = f"{first[0]:.5f}, {second[0]:.5f}"
                row = [
                    str(dtype)[6:],
                    name,
                    "yes" if aligned else "no",
                    f"{max(far):.1e}",
                    f"{far[-1]:.1e}",
                ]
                row += [f"{most:.1e}", losses, f"{time.perf_counter() - began:.0f}"]
                print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
