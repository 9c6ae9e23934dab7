"""The Triton kernels compiled ahead of time, without a GPU: registers, shared memory, spills and code of each.

    python -m benchmarks.accelerator.aot [--targets 80 90] [--configurations demo ...] [--kernels encode_kernel ...]

Compiles what a step on OLMo2-1B over 8 shards launches (bf16 weights and gradients, two replicas, or eight through
owners), by triton's JIT as a launch would: an integer of 1 is a constant, and the compiler knows which numbers and
addresses 16 divides. ptxas is that of triton's wheel. Local memory is what a thread keeps beyond its registers: arrays,
and what is spilled. Nothing runs, so nothing here says how fast a kernel is.

With --arithmetic it prints instead which line of the sources makes a kernel's PTX multiply and add at once, or
approximate, and which adds fp32 numbers in an order that the compiler chooses: "TARGET KERNEL INSTRUCTION FILE:LINE".
"""

import argparse
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["DETONATION_KERNELS"] = "triton"  # so that `meta` plays an accelerator

import torch
import triton
from benchmarks.accelerator.fake_gpu import FakeGPU
from benchmarks.accelerator.launches import Recycling, olmo2_1b
from benchmarks.accelerator.memory import accelerator
from torch import Tensor, nn
from triton.runtime.jit import MockTensor

import detonation as dt
from detonation.kernels.gpu import inspection, launches

CONFIGURATIONS: dict[str, tuple[dt.schemes.Scheme, int]] = {
    "demo 4/64": (dt.demo(), 2),
    "demo 4/64, owners": (dt.demo(), 8),
    "demo 4/64 bf16": (dt.demo(precision="bf16"), 2),
    "demo 4/64 4bit": (dt.demo(precision="4bit"), 2),
    "demo 4/64 2bit": (dt.demo(precision="2bit"), 2),
    "demo 4/64 sign": (dt.demo(precision="sign", error_feedback=False), 2),
    "demo 4/64 clipped": (dt.demo(aggregate="clipped_mean"), 2),
    "demo 1/64": (dt.demo(topk=1), 2),
    "demo 1/64 sign": (dt.demo(topk=1, precision="sign", error_feedback=False), 2),
    "demo 8/64": (dt.demo(topk=8), 2),
    "demo 32/64": (dt.demo(topk=32), 2),
    "demo 8/128": (dt.demo(topk=8, chunk=128), 2),
    "loco 4bit": (dt.loco(), 2),
    "random 1/16": (dt.schemes.random(), 2),
    "random 1/16 bf16": (dt.schemes.random(precision="bf16"), 2),
    "random 1/16 int8": (dt.schemes.random(precision="int8"), 2),
    "random 1/16 4bit": (dt.schemes.random(precision="4bit"), 2),
    "random_sign 1/8": (dt.random_sign(), 2),
    "random_sign 1/8, owners": (dt.random_sign(), 8),
    "striding 1/16": (dt.schemes.striding(), 2),
    "full": (dt.full(), 2),
}
GPU = FakeGPU(90).activate()
FAR = 1 << 40
"""An address in memory, as any of a GPU."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--targets", nargs="+", type=int, default=[80, 90], help="compute capabilities, times ten"
    )
    parser.add_argument(
        "--configurations", nargs="+", default=list(CONFIGURATIONS), choices=CONFIGURATIONS
    )
    parser.add_argument(
        "--kernels", nargs="+", default=[], help="the kernels to compile; all when left out"
    )
    parser.add_argument(
        "--arithmetic", action="store_true", help="print what rounds otherwise than one by one"
    )
    args = parser.parse_args()
    if not args.arithmetic:
        print(
            "| configuration | kernel | target | registers | local memory | shared memory | code |"
        )
        print("|---|---|---|---|---|---|---|")
    known: set[tuple[str, int]] = set()
    said: set[str] = set()
    for name in args.configurations:

        def compiled(
            kernel: Any, programs: int, *arguments: Any, name: str = name, **constants: Any
        ) -> None:
            """Compiles in the place of a launch, and prints a line unless an equal kernel had one."""
            for target in args.targets:
                if args.kernels and kernel.__name__ not in args.kernels:
                    continue
                found = compiled_for(kernel, target, arguments, constants)
                if (found.hash, target) not in known:
                    known.add((found.hash, target))
                    if not args.arithmetic:
                        print(line(name, found, target, constants), flush=True)
                    for each in (
                        (*arithmetic(found.asm["ptx"]), *sums(found.asm["ttgir"]))
                        if args.arithmetic
                        else ()
                    ):
                        if (text := f"{target} {found.name} {each}") not in said:
                            said.add(text)
                            print(text, flush=True)

        with instead_of_launches(compiled):
            step(*CONFIGURATIONS[name])


def instead_of_launches(act: Callable[..., None]) -> AbstractContextManager[Any]:
    """Context in which `act` gets what each launch would start."""
    stack = ExitStack()
    for module in (launches, inspection):
        stack.enter_context(patch.object(module, "launch", act))
    stack.enter_context(accelerator())
    return stack


def step(
    scheme: dt.schemes.Scheme,
    replicas: int,
    shapes: Sequence[tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Every launch of a step: from the gradients to the gradients, and to weights that move by signs.

    Args:
        shapes: Of the parameters; those of OLMo2-1B when left out.
    """
    model = nn.ParameterList(
        [torch.zeros(shape, device="meta", dtype=dtype) for shape in shapes or olmo2_1b()]
    )
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    channel = (
        dt.replicate(base, model, Recycling(replicas), scheme, kernels=True).build()[0].channel
    )
    gradients = [torch.empty_like(parameter) for parameter in model]
    with torch.no_grad():
        update = channel.send(gradients, 0).receive()
        update.engine.write(update.received, gradients)
        update = channel.send(gradients, 1).receive()
        if move := update.engine.sign_mover(update.received, gradients):
            move([(1.0, 1e-3)] * len(gradients))


def line(name: str, found: Any, target: int, constants: dict[str, Any]) -> str:
    """A row of the table: one kernel for one target."""
    registers, local = resources(found.asm["cubin"])
    role = (
        constants.get("INTO")
        or constants.get("KIND")
        or ("reply" if constants.get("AGGREGATION") else "")
    )
    label = f"{found.name} ({role})" if role else found.name
    cells = [
        name,
        label,
        f"sm_{target}",
        registers,
        local,
        found.metadata.shared,
        len(found.asm["cubin"]),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def compiled_for(
    kernel: Any, target: int, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> Any:
    """`kernel` as a launch with these arguments compiles it."""
    options = dict(constants)
    warps = options.pop("warps", 8)
    GPU.target = target
    given = [
        MockTensor(each.dtype) if isinstance(each, Tensor) else each for each in arguments
    ]  # aligned
    named = zip(kernel.arg_names, given, strict=False)
    given = [
        FAR if name.startswith("address") else each for name, each in named
    ]  # those of `meta` are 0
    return kernel.run(
        *given, grid=(1,), warmup=True, **options, num_warps=warps, enable_fp_fusion=False
    )


_ODD = re.compile(
    r"\b((?:fma|mad\.r|mma|wgmma|tcgen05)[.\w:]*|\w+[.\w]*(?:\.approx|\.full|\.ftz)[.\w]*)"
)


def arithmetic(ptx: str) -> list[str]:
    """Each instruction that multiplies and adds at once, or approximates, and the line that it is from.

    >>> arithmetic('.loc 1 22 5\\n fma.rn.f32 %f1, %f2, %f3, %f4;\\n mad.lo.s32 %r1, %r2, 4, 1;\\n.file 1 "a.py"')
    ['fma.rn.f32 a.py:22']
    """
    files, found, at = dict(re.findall(r'\.file\s+(\d+) "([^"]+)"', ptx)), list[str](), "?"
    for each in ptx.splitlines():
        if place := re.match(r"\s*\.loc\s+(\d+) (\d+)", each):
            at = f"{files.get(place[1], place[1])}:{place[2]}"
        elif not each.lstrip().startswith((".", "//")) and (odd := _ODD.search(each)):
            found.append(f"{odd[1]} {at}")
    return [*dict.fromkeys(found)]


def sums(ttgir: str) -> list[str]:
    """Each sum of fp32 numbers in an order that follows from their layout among threads, and the line that it is from.

    >>> lines = '#loc1 = loc("a.py":22:5)', '#loc2 = loc("triton/language/standard.py":7:1)'
    >>> lines += '#loc = loc(callsite(#loc2 at #loc1))', '"tt.reduce"(%s) ({', 'arith.addf %1, %2', '}) : f32 loc(#loc)'
    >>> sums("\\n".join(lines))
    ['tt.reduce a.py:22']
    """
    places = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, re.MULTILINE))

    def spelled(at: str) -> str:
        return re.sub(r"#loc\d*", lambda found: spelled(found[0]), places[at])

    found = list[str]()
    for each in ttgir.split('"tt.reduce"(')[1:]:
        body, _, after = each.partition("}) : ")
        if "arith.addf" in body and (at := re.search(r" loc\((#loc\d*)\)", after)):
            own = [
                place
                for place in re.findall(r'"([^"]+)":(\d+):', spelled(at[1]))
                if "/language/" not in place[0]
            ]
            found.append("tt.reduce " + ":".join(own[0]))
    return [*dict.fromkeys(found)]


def resources(binary: bytes) -> tuple[int, int]:
    """The registers of each thread of a compiled kernel, and its bytes of local memory."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    main()
