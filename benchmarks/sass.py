"""What the kernels of a step would cost on an H100, counted from their machine code (SASS); no GPU is needed.

    python benchmarks/sass.py [--configurations "demo 4/64, R=2" ...] [--kernels encode_kernel ...] [--targets 90]

Each kernel of a step is compiled as its launch would (`aot.py`), and one lane of some of its programs is played with
the arguments of that launch (`lane.py`): the instructions counted are those that run, loops and branches included. A
row names the branches that depend on values and were taken as not taken. The parameters are 61 fp32 matrices of 4096 x
4096, scaled to 1e9; the optimizer is SignSGD, whose weights move by signs, or for `loco` and `muloco` another one,
which reads the update.

Columns: registers, spilled bytes, and shared memory; programs of so many warps that a multiprocessor holds at once;
warp instructions per 1,024 coordinates; bytes per coordinate that must move, and how many times as many are asked of
the first cache; ms to issue the instructions, and to move the bytes; the prediction; the time of the last program alone
(`tail`), which is part of it.

The model: an H100 has 132 multiprocessors at 1.755 GHz with four schedulers each, which issue one instruction a cycle,
and 85 % of 3.35 TB/s. A warp alone cannot issue faster than the stalls that the assembler has written into each
instruction: with W warps per scheduler an instruction takes max(1, stalls / W) cycles. The prediction is the larger of
issue and memory, plus the tail. It is a bound from below, and does not see: how long memory, shared memory and barriers
make a warp wait; caches (each byte is read once from memory); pipes that take an instruction every other cycle (most
integers) or share a port (loads from shared memory and their bank conflicts); how tensor cores issue; the last, partial
wave of programs; a clock below 1.755 GHz.

The floor is what any such step must move: the gradient is read, momentum and weights are read and written, 20 bytes;
16 where the update is written in the place of the gradient.
"""

import argparse
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["DETONATION_KERNELS"] = "triton"  # so that `meta` plays an accelerator

import torch
import triton
from aot import FAR, compiled_for, instead_of_launches, resources
from lane import Code, play
from launches import Recycling
from moved import bytes_of, label
from torch import Tensor, nn

import detonation as dt
from detonation.kernels.gpu import inspection, launching
from detonation.kernels.gpu.launching import Slots

SIGNS = {"precision": "sign", "error_feedback": False}
SCHEMES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "demo 1/64": (dt.demo, {"topk": 1}, True),
    "demo 4/64": (dt.demo, {}, True),
    "demo 4/64 sign": (dt.demo, SIGNS, True),
    "random_sign 1/8": (dt.random_sign, {}, True),
    "loco 4bit": (dt.loco, {}, False),
    "muloco 4bit": (dt.muloco, {}, False),
}
"""By name: the scheme, its arguments, and whether weights move by the signs of the update."""
CONFIGURATIONS = {
    f"{name}, R={replicas}{link}": (scheme, replicas, link)
    for name, scheme in SCHEMES.items()
    for replicas, link in ((1, ""), (2, ""), (8, " all-gather"), (8, " owner"))
}
SHAPES = [(4096, 4096)] * 61
NUMEL = 61 * 4096 * 4096
MULTIPROCESSORS, CLOCK, SCHEDULERS, BANDWIDTH = 132, 1.755e9, 4, 0.85 * 3.35e12
PLAYED = 3
"""The programs of a launch that are played, spread over all of them."""


@dataclass(frozen=True)
class Launch:
    """A launch that a step makes: its arguments by name, without constants."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def warps(self) -> int:
        """Of each program."""
        return self.constants.get("warps", 8)

    @property
    def named(self) -> dict[str, Any]:
        """The arguments and constants by name."""
        return dict(zip(self.kernel.arg_names, self.arguments, strict=False)) | self.constants


@dataclass(frozen=True)
class Cost:
    """What a launch costs: see the columns of the table, all for the coordinates of the launch."""

    registers: int
    local: int
    shared: int
    resident: int
    instructions: float
    moved: float
    asked: float
    issue_s: float
    memory_s: float
    tail_s: float
    unknown: int

    @property
    def predicted_s(self) -> float:
        """The larger of issue and memory, and the tail."""
        return max(self.issue_s, self.memory_s) + self.tail_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--configurations", nargs="+", default=list(CONFIGURATIONS), help="those that begin so"
    )
    parser.add_argument(
        "--kernels", nargs="+", default=[], help="the kernels to count; all when left out"
    )
    parser.add_argument(
        "--targets", nargs="+", type=int, default=[90], help="compute capabilities, times ten"
    )
    parser.add_argument(
        "--sums", action="store_true", help="print the table of docs/gpu.md: sums alone"
    )
    args = parser.parse_args()
    known: dict[str, Cost] = {}
    sums: dict[tuple[str, int], list[str]] = {}
    if not args.sums:
        print(
            "| configuration | kernel | target | registers | spilled | shared | resident | instructions | bytes "
            "| asked | issue, ms | memory, ms | predicted, ms | tail, us | of floor | unknown branches |"
        )
        print("|" + "---|" * 16)
    for name, (scheme, replicas, link) in CONFIGURATIONS.items():
        if not any(name.startswith(each) for each in args.configurations):
            continue
        launches = launches_of(*scheme, replicas, link.strip())
        launches = [
            each for each in launches if not args.kernels or each.kernel.__name__ in args.kernels
        ]
        floor = (20 if scheme[2] else 16) * 1e9 / BANDWIDTH
        for target in args.targets:
            costs = list[Cost]()
            for launch in launches:
                key = repr(
                    (
                        target,
                        launch.kernel.__name__,
                        launch.programs,
                        launch.constants,
                        described(launch),
                    )
                )
                if key not in known:
                    known[key] = counted(launch, target)
                costs.append(known[key])
                if not args.sums:
                    print(
                        row(
                            name,
                            label(launch.kernel.__name__, launch.named),
                            target,
                            costs[-1],
                            floor,
                        ),
                        flush=True,
                    )
            total = Cost(
                *[0] * 4,
                *(sum(getattr(each, what.name) for each in costs) for what in fields(Cost)[4:]),
            )
            took = sum(each.predicted_s for each in costs) * 1e9 / NUMEL
            if not args.sums:
                print(row(name, "**sum**", target, total, floor, took), flush=True)
            sums.setdefault((name.split(",")[0], target), []).append(
                f"{1e3 * took:.1f}/{took / floor:.1f}"
            )
    if args.sums:
        print("| predicted ms / of floor | R=1 | R=2 | R=8 | R=8, owners | measured |")
        print("|" + "---|" * 6)
        for (name, target), cells in sums.items():
            print(
                "| "
                + " | ".join([name if target == 90 else f"{name}, sm_{target}", *cells, ""])
                + " |"
            )


def described(launch: Launch) -> list[Any]:
    """The arguments of a launch, as far as its cost depends on them."""
    return [tuple(each.shape) if isinstance(each, Tensor) else each for each in launch.arguments]


def row(
    name: str, label: str, target: int, cost: Cost, floor: float, took: float | None = None
) -> str:
    """A line of the table. took: In place of the prediction of the cost, for a sum."""
    took = cost.predicted_s * 1e9 / NUMEL if took is None else took
    cells = [name, label, f"sm_{target}"]
    cells += [str(each or "") for each in (cost.registers, cost.local, cost.shared, cost.resident)]
    cells += [f"{cost.instructions / NUMEL * 1024:,.0f}", f"{cost.moved / NUMEL:.2f}"]
    cells += [f"{cost.asked / cost.moved:.1f}" if cost.moved else ""]
    cells += [f"{1e3 * each * 1e9 / NUMEL:.2f}" for each in (cost.issue_s, cost.memory_s)]
    cells += [
        f"{1e3 * took:.2f}",
        f"{1e6 * cost.tail_s:.0f}",
        f"{took / floor:.2f}",
        str(cost.unknown or ""),
    ]
    return "| " + " | ".join(cells) + " |"


def launches_of(
    make: Any, given: dict[str, Any], signs: bool, replicas: int, link: str
) -> list[Launch]:
    """The launches of a step: from the gradients to weights that moved, or to the update in the gradients' place."""
    found: list[Launch] = []

    def kept(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        found.append(Launch(kernel, programs, arguments, constants))

    scheme = make(**given, **({"link": link} if link else {}))
    model = nn.ParameterList([torch.zeros(shape, device="meta") for shape in SHAPES])
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    with instead_of_launches(kept), torch.no_grad(), remembering():
        channel = (
            dt.replicate(base, model, Recycling(replicas), scheme, kernels=True).build()[0].channel
        )
        gradients = [torch.empty_like(parameter) for parameter in model]
        channel.send(gradients, 0).receive().write(gradients)
        found.clear()
        update = channel.send(gradients, 1).receive()
        if signs and update.engine.can_apply_signs(update.received, gradients):
            update.engine.apply_signs(update.received, gradients, [(1.0, 1e-3)] * len(gradients))
        else:
            update.write(gradients)
    return found


@contextmanager
def remembering() -> Iterator[None]:
    """Keeps the numbers of the tables on which loops depend beside their tensors, which on `meta` have none."""
    build = Slots.__init__

    def uploaded(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor: Any = launching.uploaded(numbers, dtype, device)
        tensor.numbers = list(numbers)
        return tensor

    def built(
        slots: Any, starts: Sequence[int], numels: Sequence[int], rows: int, device: torch.device
    ) -> None:
        build(slots, starts, numels, rows, device)
        slots.starts.numbers, slots.numels.numbers = list(starts), list(numels)

    with patch.object(inspection, "uploaded", uploaded), patch.object(Slots, "__init__", built):
        yield


def counted(launch: Launch, target: int) -> Cost:
    """What a launch costs on one of `target`."""
    compiled = compiled_for(launch.kernel, target, launch.arguments, launch.constants)
    code = disassembled(compiled.asm["cubin"])
    registers, local = resources(compiled.asm["cubin"])
    constants, memory = laid_out(launch, compiled.src.signature, code.parameters_at)
    paths = [play(code, constants, program, memory) for program in sample(launch.programs)]
    instructions = sum(path.counts.total() for path in paths) / len(paths)
    unknown = sum(path.unknown.total() for path in paths)
    stalls = sum(spent(code, path.counts) for path in paths) / len(paths)
    asked = sum(
        octets(each.name) * path.counts[number] * 32 * launch.warps
        for path in paths for number, each in enumerate(code.instructions) if each.base in ("LDG", "STG")
    ) / len(paths)  # fmt: skip
    resident = resident_programs(registers, compiled.metadata.shared, launch.warps)
    at_once = min(resident, max(1.0, launch.programs / MULTIPROCESSORS)) * launch.warps / SCHEDULERS
    per_scheduler = launch.programs * launch.warps / MULTIPROCESSORS / SCHEDULERS
    per_scheduler = max(per_scheduler, launch.warps / SCHEDULERS)
    tail = 0.0
    for arrives in last_ones(launch):
        last = play(code, constants, 0, memory, arrives).counts
        more = (
            last.total() - paths[0].counts.total(),
            spent(code, last) - spent(code, paths[0].counts),
        )
        tail = max(tail, more[0] * launch.warps / SCHEDULERS, more[1])
    moved = bytes_of(launch.kernel.__name__, launch.named, launch.programs, NUMEL)
    return Cost(
        registers, local, compiled.metadata.shared, resident, launch.programs * launch.warps * instructions, moved,
        launch.programs * asked, per_scheduler * max(instructions, stalls / at_once) / CLOCK, moved / BANDWIDTH,
        tail / CLOCK, unknown,
    )  # fmt: skip


def spent(code: Code, counts: Counter[int]) -> int:
    """The cycles that a warp alone needs at least."""
    return sum(code.instructions[number].stall * count for number, count in counts.items())


def sample(programs: int) -> list[int]:
    """Some programs of a launch, spread evenly."""
    return sorted({(2 * each + 1) * programs // (2 * PLAYED) for each in range(PLAYED)})


def last_ones(launch: Launch) -> Iterator[Sequence[int]]:
    """What atomic additions find in the program that comes last, where a kernel has such a one."""
    if launch.kernel.__name__ in ("seal_kernel", "inspect_kernel", "inspect_sum_kernel"):
        yield [launch.named["parts"] - 1, -1]  # the last of a message, and not of all


def disassembled(binary: bytes) -> Code:
    """The machine code of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        return Code.parse(
            subprocess.run(
                [tool, "-hex", file.name], capture_output=True, text=True, check=True
            ).stdout
        )


def laid_out(
    launch: Launch, signature: dict[str, str], begin: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Constant memory with the parameters of a launch, and the words of the tables that it reads."""
    given = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
    constants, memory, at = (
        {0x0: 32 * launch.warps, 0xC: launch.programs, 0x28: 1 << 20},
        dict[int, int](),
        begin,
    )
    for number, (name, kind) in enumerate(signature.items()):
        if kind == "constexpr":
            continue
        size = 8 if kind.startswith("*") or kind[1:] == "64" else 4
        at += -at % size
        value = given[name]
        if isinstance(value, Tensor):
            place = FAR + (number << 36)
            for index, word in enumerate(getattr(value, "numbers", [])):
                memory[place + 8 * index] = word & 0xFFFFFFFF
                memory[place + 8 * index + 4] = word >> 32 & 0xFFFFFFFF
            value = place
        if name.startswith("address"):
            value = FAR
        if isinstance(value, int):
            constants[at] = value & 0xFFFFFFFF
            if size == 8:
                constants[at + 4] = value >> 32 & 0xFFFFFFFF
        at += size
    return constants, memory


def octets(name: str) -> int:
    """The bytes that each lane moves."""
    found = re.search(r"\.(128|64|[US]?16|[US]?8)\b", name.replace(".E.", "."))
    return int(found[1].lstrip("US")) // 8 if found else 4


def resident_programs(registers: int, shared: int, warps: int) -> int:
    """The programs that a multiprocessor of an H100 holds at once."""
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = 65536 // SCHEDULERS // of_warp * SCHEDULERS // warps
    return min(by_registers, 64 // warps, 32, 228 * 1024 // (shared + 1024))


if __name__ == "__main__":
    main()
