"""Which optimizers take steps with the same bits on which kinds of processor.

    python benchmarks/alike.py

Prints a table for the docs. Each column is a process that is told before it imports torch which instructions it may
use; "equal" means that three steps end with the bits of the first column, on vectors of 1 to 262,144 numbers and on
matrices.
"""

import argparse
import os
import subprocess
import sys

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

import detonation as dt
from detonation.core.agreement.selftest import _ramp
from detonation.core.flat.tensors import digest

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
}
SIZES = [(1,), (7,), (31,), (100,), (4097,), (262_144,), (64, 96), (300, 129)]


def ended(kind: type[Optimizer], arguments: dict[str, object]) -> str:
    """A hash of the weights after three steps."""
    weights = [torch.nn.Parameter(_ramp(torch.Size(size).numel(), torch.device("cpu")).view(size)) for size in SIZES]
    made = kind([{"params": weights, "lr": 1e-3, "weight_decay": 0.1, **arguments}])
    for step in range(3):
        for weight in weights:
            gradient = _ramp(weight.numel() + 11 * step, torch.device("cpu"))[11 * step :]
            weight.grad = (gradient * (step + 0.7)).view(weight.shape)
        made.step()
    return digest(weights)[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hashes", action="store_true", help="print those of this process alone, one a line")
    if parser.parse_args().hashes:
        torch.set_num_threads(1)
        print(*(ended(*made) for made in OPTIMIZERS.values()), sep="\n")
        return
    found = []
    for kind in KINDS.values():
        command = [sys.executable, __file__, "--hashes"]
        done = subprocess.run(command, env=os.environ | kind, capture_output=True, text=True, check=True)
        found.append(done.stdout.split())
    print(f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}\n")
    print("| optimizer |", " | ".join(list(KINDS)[1:]), "|")
    print("|---" * len(KINDS) + "|")
    for name, first, *others in zip(OPTIMIZERS, *found, strict=True):
        print(f"| `{name}` |", " | ".join("equal" if other == first else "differs" for other in others), "|")


if __name__ == "__main__":
    main()
