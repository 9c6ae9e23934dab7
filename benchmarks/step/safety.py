"""The cost of headers, inspection and fingerprints: CPU time of one rank, by scheme, over a loopback communicator.

    python -m benchmarks.step.safety [--parameters 10000000] [--replicas 2]

No network: each replica receives the message that it sent. A step is everything between a gradient and an updated
weight; the guard's part of it (status, seal, open) is timed separately. Medians; one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.agreement import desync
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.integrity.guard import Guard
from detonation.core.link.link import Link

SCHEMES = [dt.demo(link="all-gather"), dt.demo(topk=32, link="all-gather"),
           dt.demo(precision="sign", error_feedback=False), dt.schemes.random(), dt.random_sign(),
           dt.full()]  # fmt: skip
GUARDED: dict[str, Any] = {
    "inspect": ReferenceEngine,
    **dict.fromkeys(("seal", "open", "seal_sum", "open_sum"), Guard),
}
"""The functions that are timed, and where each is looked up."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| scheme | step, ms | guard, ms | share | guard without the finite check, ms |")
    print("|---|---|---|---|---|")
    for scheme in SCHEMES:
        row(scheme, args.parameters, args.replicas, args.rounds)
    weight = torch.randn(args.parameters)
    link = Link(LoopbackCommunicator(args.replicas))
    times = [
        timed(lambda: desync.differences(link, {"w": weight}, weight.device))
        for _ in range(args.rounds)
    ]
    print(
        f"\nfingerprint: {statistics.median(times) * 1e3 / args.parameters * 1e6:.3f} ms per million parameters"
    )


def row(scheme: dt.schemes.Scheme, parameters: int, replicas: int, rounds: int) -> None:
    model = torch.nn.Linear(parameters // 1024, 1024, bias=False)
    optimizer = dt.replicate(
        dt.SignSGD(model.parameters(), lr=1e-3), model, LoopbackCommunicator(replicas), scheme
    )
    spent: dict[str, float] = dict.fromkeys(GUARDED, 0.0)
    originals = {name: getattr(home, name) for name, home in GUARDED.items()}
    for name, function in originals.items():
        made = counted(function, name, spent)
        is_static = isinstance(vars(GUARDED[name]).get(name), staticmethod)
        setattr(GUARDED[name], name, staticmethod(made) if is_static else made)
    model.weight.grad = torch.randn_like(model.weight)
    gradient = model.weight.grad.clone()
    steps, guards, others = [], [], []
    for turn in range(rounds + 1):
        model.weight.grad.copy_(gradient)
        spent.update(dict.fromkeys(GUARDED, 0.0))
        step = timed(optimizer.step)
        if turn:  # the first step sets up
            steps.append(step)
            guards.append(sum(spent.values()))
            others.append(guards[-1] - spent["inspect"])
    for name, function in originals.items():
        is_static = isinstance(vars(GUARDED[name]).get(name), staticmethod)
        setattr(GUARDED[name], name, staticmethod(function) if is_static else function)
    step, guard, other = (statistics.median(times) * 1e3 for times in (steps, guards, others))
    shown = ", ".join(
        f"{k}={scheme.arguments[k]}" for k in ("topk", "precision") if k in scheme.arguments
    )
    print(
        f"| {scheme.name}({shown}) | {step:.1f} | {guard:.2f} | {guard / step:.1%} | {other:.2f} |",
        flush=True,
    )


def counted(function: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """`function`, whose CPU time is added to `spent[name]`."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        began = time.process_time()
        try:
            return function(*arguments, **options)
        finally:
            spent[name] += time.process_time() - began

    return wrapped


def timed(function: Callable[[], Any]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    function()
    return time.process_time() - began


if __name__ == "__main__":
    main()
