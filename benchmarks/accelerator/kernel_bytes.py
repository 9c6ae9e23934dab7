"""Bytes that each kernel of a step reads and writes per parameter, counted as the kernels run.

    python -m benchmarks.accelerator.kernel_bytes [--replicas 2]

Triton's interpreter runs the kernels of `demo` in signs on a CPU, and each address that a kernel
loads or stores counts once: what it reads again comes from a cache. Two sizes are run, and their
difference is divided by that of the parameters, so that tables of a fixed size do not count. The
scratch memory of the programs, which stays in a cache, does not count either, nor does the copy of
a gathered message: only a CPU makes it, because simulated replicas share it.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

SHAPES = [(128, 256), (384, 256)]
"""The parameters of the two sizes: whole rows, blocks and units of both selections."""
SELECTIONS = (1, 4)
FLOOR = 20
"""The gradient is read once; momentum and weight are read and written."""


@dataclass
class Seen:
    """The addresses of bytes that kernels load and store."""

    loaded: list[Any] = field(default_factory=list)
    stored: list[Any] = field(default_factory=list)
    scratch: list[tuple[int, int]] = field(default_factory=list)

    def bytes_of(self, addresses: list[Any]) -> int:
        """The number of different bytes outside of scratch memory."""
        if not addresses:
            return 0
        unique = np.unique(np.concatenate(addresses))
        for begin, end in self.scratch:
            unique = unique[(unique < begin) | (unique >= end)]
        return len(unique)


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Within it `seen` gets the addresses of the interpreter's loads and stores."""
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load
    store = InterpreterBuilder.create_masked_store

    def octets(pointers: Any, mask: Any) -> Any:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        first = np.unique(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])
        return (first[:, None] + np.arange(size, dtype=first.dtype)).ravel()

    def loaded(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        seen.loaded.append(octets(pointers, mask))
        return load(self, pointers, mask, *others)

    def stored(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        seen.stored.append(octets(pointers, mask))
        return store(self, pointers, value, mask, *others)

    with (
        patch.object(InterpreterBuilder, "create_masked_load", loaded),
        patch.object(InterpreterBuilder, "create_masked_store", stored),
    ):
        yield


def of_step(topk: int, replicas: int, shape: tuple[int, int]) -> dict[str, tuple[int, int]]:
    """Bytes read and written by each kernel of a step, in the order of launches."""
    import torch
    from benchmarks.gpu.common import stepper

    import detonation as dt
    from detonation.kernels.gpu import inspection, launches, launching

    scheme = dt.demo(topk=topk, precision="sign", error_feedback=False)
    made = stepper([shape], torch.device("cpu"), scheme, "triton", replicas=replicas)
    assert made is not None
    made.step()
    found: dict[str, tuple[int, int]] = {}

    def given(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        cached = ["scratch", "numbers", "columns"]
        if constants.get("JOIN"):
            cached.append("message")
        scratch = [named[name] for name in cached if name in named]
        places = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in scratch]
        seen = Seen(scratch=places)
        with watched(seen):
            launching.launch(kernel, programs, *arguments, **constants)
        name = kernel.__name__.removesuffix("_kernel")
        found[name] = seen.bytes_of(seen.loaded), seen.bytes_of(seen.stored)

    with ExitStack() as patches:
        for module in (launches, inspection):
            patches.enter_context(patch.object(module, "launch", given))
        made.step()
    return found


def per_parameter(topk: int, replicas: int) -> dict[str, tuple[float, float]]:
    """Bytes that each kernel reads and writes per parameter of a large model."""
    small, large = (of_step(topk, replicas, shape) for shape in SHAPES)
    parameters = [rows * columns for rows, columns in SHAPES]
    more = parameters[1] - parameters[0]
    return {
        name: (
            (large[name][0] - small[name][0]) / more,
            (large[name][1] - small[name][1]) / more,
        )
        for name in large
    }


def table(replicas: int) -> list[str]:
    """The lines of the table, as docs/gpu.md has them."""
    counted = [per_parameter(topk, replicas) for topk in SELECTIONS]
    heads = [f"{topk} of 64" for topk in SELECTIONS]
    lines = [f"| read/written | {' | '.join(heads)} |", "|---" * (1 + len(SELECTIONS)) + "|"]
    for name in counted[0]:
        cells = [f"{each[name][0]:.2f}/{each[name][1]:.2f}" for each in counted]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    sums = []
    for each in counted:
        read = sum(pair[0] for pair in each.values())
        written = sum(pair[1] for pair in each.values())
        sums.append(f"{read:.2f}/{written:.2f}")
    lines.append(f"| sum | {' | '.join(sums)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=2)
    args = parser.parse_args()
    os.environ["DETONATION_KERNELS"] = "triton"
    os.environ["TRITON_INTERPRET"] = "1"
    for line in table(args.replicas):
        print(line)


if __name__ == "__main__":
    main()
