"""What a launch of a Triton kernel costs the host, through triton's JIT and without it; no GPU is needed.

    python benchmarks/launch_cost.py [--configuration "demo 4/64"] [--turns 400]

The kernels of a step on OLMo2-1B over 8 shards, compiled for a GPU that is not there: the driver's own launch, some
microseconds more, is left out of both columns. Turns of the two alternate; medians.
"""

import argparse
import time
from collections import defaultdict
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from aot import CONFIGURATIONS, instead_of_launches, step

from detonation.kernels.gpu import launching


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--configuration", default="demo 4/64", choices=CONFIGURATIONS)
    parser.add_argument("--turns", type=int, default=400)
    args = parser.parse_args()
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def kept(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        given = (
            torch.empty(1, dtype=a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments
        )
        calls.append((kernel, (programs, *given), constants))

    with instead_of_launches(kept):
        step(*CONFIGURATIONS[args.configuration])
    spent: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for _ in range(args.turns):
        for number, (kernel, given, constants) in enumerate(calls):
            for direct in (False, True):
                with patch.object(launching, "_DIRECT", direct):
                    began = time.perf_counter()
                    launching.launch(kernel, *given, **constants)
                    spent[number, direct].append(time.perf_counter() - began)
    print("| kernel | arguments | constants | through the JIT, us | without it, us |")
    print("|---|---|---|---|---|")
    for number, (kernel, given, constants) in enumerate(calls):
        took = [f"{1e6 * median(spent[number, direct]):.1f}" for direct in (False, True)]
        print(
            "| "
            + " | ".join(map(str, [kernel.__name__, len(given) - 1, len(constants), *took]))
            + " |"
        )


if __name__ == "__main__":
    main()
