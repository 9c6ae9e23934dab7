"""The Triton kernels compiled ahead of time, without a GPU: registers, shared memory, spills and code of each.

    python benchmarks/aot.py [--targets 80 90] [--configurations demo ...]

Compiles as a launch on OLMo2-1B over 8 shards would, with ptxas from triton's wheel. Local memory is what a thread
keeps beyond its registers. Nothing runs, so nothing here says how fast a kernel is.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from launches import olmo2_1b
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import detonation as dt
from detonation.core.codec.basis import dct_matrix
from detonation.core.codec.codec import Codec
from detonation.core.codec.form import WHOLE
from detonation.core.engine.accelerated import coding_of, places_of
from detonation.kernels.gpu import inspection, launches

CONFIGURATIONS = {
    "demo 4/64": dt.demo(),
    "demo 4/64 bf16": dt.demo(precision="bf16"),
    "demo 4/64 sign": dt.demo(precision="sign", error_feedback=False),
    "demo 32/64": dt.demo(topk=32),
    "demo 32/64 2bit": dt.demo(topk=32, precision="2bit"),
    "demo 8/128": dt.demo(topk=8, chunk=128),
    "random 1/16": dt.random(),
    "random_sign 1/8": dt.random_sign(),
}
TYPES = {torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8", torch.bool: "i1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", type=int, default=[80, 90], help="compute capabilities, times ten")
    parser.add_argument("--configurations", nargs="+", default=list(CONFIGURATIONS), choices=CONFIGURATIONS)
    args = parser.parse_args()
    print("| configuration | kernel | target | registers | local memory | shared memory | code |")
    print("|---|---|---|---|---|---|---|")
    known: set[str] = set()
    for name in args.configurations:

        def compiled(kernel: Any, programs: int, *arguments: Any, name: str = name, **constants: Any) -> None:
            """Compiles in the place of a launch, and prints a line unless an equal kernel had one."""
            for target in args.targets:
                described = repr((kernel, target, sorted(constants.items())))
                if described not in known:
                    known.add(described)
                    print(line(name, kernel, target, arguments, constants), flush=True)

        with patch.object(launches, "launch", compiled), patch.object(inspection, "launch", compiled):
            launch_all(CONFIGURATIONS[name].codec, CONFIGURATIONS[name])


def launch_all(codec: Codec, scheme: dt.Scheme) -> None:
    """Every launch of a step: bf16 weights and gradients, messages of two replicas."""
    meta = torch.device("meta")
    shapes = {str(i): shape for i, shape in enumerate(olmo2_1b())}
    layout = codec.layout(shapes)
    slots = launches.Slots([s.row for s in layout.slots], [s.numel for s in layout.slots], layout.rows, meta)
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device=meta) for shape in shapes.values()]
    table = launches.Addresses(meta).update(tensors)
    coding, places = coding_of(launches, codec), places_of(launches, codec, layout.rows, WHOLE)
    matrix = dct_matrix(codec.selection.chunk, meta) if coding.basis == "dct" else torch.empty(1, 1, device=meta)
    coder = launches.Coder(coding, slots, matrix, matrix)
    nbytes = codec.nbytes(layout.rows)
    messages = torch.empty(2, -(-(64 + nbytes) // 4096) * 4096, dtype=torch.uint8, device=meta)
    status, usual = torch.empty((), dtype=torch.int64, device=meta), torch.empty(1, device=meta)
    feedback, memory = scheme.feedback, torch.empty(layout.rows, layout.chunk, device=meta)
    assert feedback is not None
    launches.Scanner([t.numel() for t in tensors], meta).first_beyond(tensors, 1e18)
    if codec.selection.shared:
        coder.rotations.rotate(coding, 2**40, 2**41, 3)
    exact = not feedback.error_feedback or coding.block == 1
    coder.encode(table, status, messages[:1, 64:], places, memory, feedback.decay, 1.0, exact, exact, False)
    inspector, limits = launches.Inspector(2, meta), launches.Limits(1e18, 1000.0, 0.9999)
    inspector.seal(messages, nbytes, 2**62, 2**61, 3, 2**40, status, 2**60)
    launches.align(messages, messages)
    inspector.inspect(messages, nbytes, coding, places, 2**62, 2**61, 3, 5, 100, usual, True, limits)
    name = "majority" if "majority" in repr(scheme.aggregation).lower() else "mean"
    for into in ("tensors", "signs") if exact else ("tensors", "signs", "release"):
        coder.decode(messages[:, 64:], places, 2, name, into, table, memory, 1.0, memory)


def line(name: str, kernel: Any, target: int, arguments: tuple[Any, ...], constants: dict[str, Any]) -> str:
    """A row of the table: one kernel for one target."""
    signature = {each: kind(value) for each, value in zip(kernel.arg_names, arguments, strict=False)}
    signature |= dict.fromkeys(constants, "constexpr")
    fixed = {(kernel.arg_names.index(each),): value for each, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, value in enumerate(arguments) if isinstance(value, Tensor)}
    found = triton.compile(
        ASTSource(kernel, signature, fixed, aligned),
        target=GPUTarget("cuda", target, 32),
        options={"num_warps": 8, "enable_fp_fusion": False},
    )
    registers, local = resources(found.asm["cubin"])
    into = f" ({constants['INTO']})" if "INTO" in constants else ""
    cells = [name, f"{kernel.__name__}{into}", f"sm_{target}", registers, local, found.metadata.shared]
    return "| " + " | ".join(map(str, [*cells, len(found.asm["cubin"])])) + " |"


def kind(value: Any) -> str:
    """The type of an argument, as triton names it."""
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i64" if abs(value) >= 2**31 else "i32"


def resources(binary: bytes) -> tuple[int, int]:
    """The registers of each thread of a compiled kernel, and its bytes of local memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    main()
