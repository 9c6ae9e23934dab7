"""Which optimizers take steps with the same bits on which kinds of processor.

    python -m benchmarks.faults.alike

Prints a table for the docs. Each column is a process that is told before it imports torch which instructions it may
use; "equal" means that three steps end with the bits of the first column, on vectors of 1 to 262,144 numbers and on
matrices; "singly" that they do so where each operation is rounded by itself. `--cost` prints the processor time of a
step in both ways.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

import detonation as dt
from detonation.core.agreement.self_tests import _ramp
from detonation.core.flat.tensors import digest
from detonation.gates.single_rounding import SingleRounding

KINDS: dict[str, dict[str, str]] = {
    "this processor": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX2, MKL for all": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "no AVX2": {
        "ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
}  # fmt: skip
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, object]]] = {
    "SignSGD": (dt.SignSGD, {}),
    "SignSGD, momentum": (dt.SignSGD, {"momentum": 0.9}),
    "SGD": (SGD, {}),
    "SGD, momentum": (SGD, {"momentum": 0.9, "nesterov": True}),
    "AdamW(fused=True)": (AdamW, {"fused": True}),
    "Adam(fused=True)": (Adam, {"fused": True}),
    "AdamW": (AdamW, {}),
    "AdamW(foreach=True)": (AdamW, {"foreach": True}),
    "Muon": (dt.Muon, {}),
    **{
        name: (getattr(torch.optim, name), {})
        for name in ("NAdam", "RAdam", "RMSprop", "Adagrad", "Adamax")
    },
}
SIZES = [(1,), (7,), (31,), (100,), (4097,), (262_144,), (64, 96), (300, 129)]


def ended(kind: type[Optimizer], arguments: dict[str, object], context: type = nullcontext) -> str:
    """A hash of the weights after three steps, each within `context`."""
    weights = [
        torch.nn.Parameter(_ramp(torch.Size(size).numel(), torch.device("cpu")).view(size))
        for size in SIZES
    ]
    decay = 0.0 if kind is torch.optim.Adamax else 0.1
    made = kind([{"params": weights, "lr": 1e-3, "weight_decay": decay, **arguments}])
    for step in range(3):
        for weight in weights:
            gradient = _ramp(weight.numel() + 11 * step, torch.device("cpu"))[11 * step :]
            weight.grad = (gradient * (step + 0.7)).view(weight.shape)
        with context():
            made.step()
    return digest(weights)[:16]


def cost() -> None:
    """Prints milliseconds of processor time per step of 1.6 million parameters, in torch's way and singly rounded."""
    torch.set_num_threads(1)
    for name in ("SGD, momentum", "AdamW", "Muon"):
        kind, arguments = OPTIMIZERS[name]
        weights = [
            torch.nn.Parameter(_ramp(512 * 512, torch.device("cpu")).view(512, 512))
            for _ in range(6)
        ]
        made = kind([{"params": weights, "lr": 1e-3, **arguments}])
        taken: dict[type, list[float]] = {nullcontext: [], SingleRounding: []}
        for _ in range(15):
            for context, seconds in taken.items():
                for weight in weights:
                    weight.grad = _ramp(512 * 512, torch.device("cpu")).view(512, 512)
                begun = time.process_time()
                with context():
                    made.step()
                seconds.append(time.process_time() - begun)
        plain, singly = (1000 * statistics.median(seconds) for seconds in taken.values())
        print(
            f"{name}: {plain:.1f} ms, singly rounded {singly:.1f} ms ({singly / plain:.1f} times)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hashes", action="store_true", help="print those of this process alone, one a line"
    )
    parser.add_argument("--cost", action="store_true", help="print the processor time of steps")
    args = parser.parse_args()
    if args.cost:
        cost()
        return
    if args.hashes:
        torch.set_num_threads(1)
        print(
            *(f"{ended(*made)} {ended(*made, SingleRounding)}" for made in OPTIMIZERS.values()),
            sep="\n",
        )
        return
    found = []
    for kind in KINDS.values():
        command = [sys.executable, __file__, "--hashes"]
        done = subprocess.run(
            command, env=os.environ | kind, capture_output=True, text=True, check=True
        )
        found.append([line.split() for line in done.stdout.splitlines()])
    print(f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}\n")
    print("| optimizer |", " | ".join(list(KINDS)[1:]), "|")
    print("|---" * len(KINDS) + "|")
    for name, first, *others in zip(OPTIMIZERS, *found, strict=True):
        print(f"| `{name}` |", " | ".join(_alike(first, other) for other in others), "|")


def _alike(first: list[str], other: list[str]) -> str:
    return "equal" if first[0] == other[0] else "singly" if first[1] == other[1] else "differs"


if __name__ == "__main__":
    main()
