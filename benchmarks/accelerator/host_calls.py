"""Python calls of the host in one step on an accelerator, by whose code they are.

    python -m benchmarks.accelerator.host_calls [--tensors 113] [--list]

The device `meta` plays the accelerator, and two replicas train by `demo` in signs, with kernels.
The fourth step is counted. Each resumption of a generator is a call; functions in C are none, and
neither are comprehensions, which Python 3.12 inlines. What plays the network and the readback
counts apart. A launch is one call, because nothing is launched.
"""

import argparse
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from benchmarks.accelerator import launches, memory

import detonation as dt

STEPS = 3
"""Steps before the one that is counted."""
OWNERS = {"detonation": "this library", "torch": "torch", "benchmarks": "the played network"}
"""The owner of a file, by a folder of its path."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensors", type=int, default=113)
    parser.add_argument("--list", action="store_true", help="each call, in order, by its depth")
    args = parser.parse_args()
    os.environ["DETONATION_KERNELS"] = "triton"
    calls = calls_of_a_step(args.tensors)
    if args.list:
        for depth, code in calls:
            print("  " * depth + code.co_qualname, Path(code.co_filename).name)
    for owner, count in Counter(owner_of(code) for _, code in calls).most_common():
        print(f"{owner:20} {count:4}")
    print(f"{'in all':20} {len(calls):4}")


def owner_of(code: CodeType) -> str:
    """Whose code a call runs; what dataclasses generate belongs to this library."""
    if code.co_filename.startswith("<"):
        return "this library"
    parts = Path(code.co_filename).parts
    return next((OWNERS[part] for part in reversed(parts) if part in OWNERS), "standard library")


def calls_of_a_step(tensors: int) -> list[tuple[int, CodeType]]:
    """The Python calls of the fourth step of a model of so many tensors; see `calls_of`."""
    model = torch.nn.ParameterList([torch.zeros(640, device="meta") for _ in range(tensors)])
    return calls_of(model, torch.zeros_like)


def calls_of(
    model: torch.nn.ParameterList, gradient: Callable[[torch.Tensor], torch.Tensor]
) -> list[tuple[int, CodeType]]:
    """The Python calls of the fourth step, with their depths, in order.

    Args:
        gradient: Makes the gradient of a parameter.
    """
    base = dt.SignSGD(model.parameters(), lr=1e-3)
    scheme = dt.demo(precision="sign", error_feedback=False)
    optimizer = dt.replicate(base, model, launches.Recycling(2), scheme, kernels=True)
    calls: list[tuple[int, CodeType]] = []
    with memory.accelerator():
        optimizer.build()
        for parameter in model:
            parameter.grad = gradient(parameter)
        for _ in range(STEPS):
            optimizer.step()
        before = sys.getprofile()
        gc.collect()
        gc.disable()  # a collection would count the finalizers of other code
        sys.setprofile(recorder(calls))
        try:
            optimizer.step()
        finally:
            sys.setprofile(before)
            gc.enable()
    return calls


def recorder(calls: list[tuple[int, CodeType]]) -> Callable[[FrameType, str, Any], None]:
    """A profiler that appends the depth and the code of each call of Python."""
    depth = 0

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        if event == "call" and "comp>" not in frame.f_code.co_name:
            calls.append((depth, frame.f_code))
            depth += 1
        elif event == "return" and "comp>" not in frame.f_code.co_name:
            depth -= 1

    return profile


if __name__ == "__main__":
    main()
