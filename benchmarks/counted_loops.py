"""A kernel with loops of known lengths: the turns of each by arithmetic, and by the code that is played.

The assembler unrolls the inner loop by four. The first of its pieces runs with a guard that is false where four divides
the turns, and takes its time all the same: at most one instruction more for each turn of the outer loop.
"""

import torch
import triton
import triton.language as tl
from aot import compiled_for
from lane import play
from sass import Launch, disassembled, laid_out


@triton.jit
def nested_kernel(written, count, each, SIZE: tl.constexpr):
    item = tl.arange(0, SIZE)
    total = tl.zeros([SIZE], dtype=tl.float32)
    for first in range(tl.program_id(0), count, 7):
        for second in range(each // 3):
            total = tl.exp2(total + first * second)
    tl.store(written + item, total)


def powers(count: int, each: int, program: int) -> int:
    """The powers of two that lane 0 of a program takes, one in each turn of the inner loop."""
    launch = Launch(nested_kernel, 7, (torch.zeros(128), count, each), {"SIZE": 128, "warps": 4})
    compiled = compiled_for(nested_kernel, 90, launch.arguments, launch.constants)
    code = disassembled(compiled.asm["cubin"])
    constants, memory = laid_out(launch, compiled.src.signature, code.parameters_at)
    path = play(code, constants, program, memory)
    assert not path.unknown, path.unknown
    return sum(
        count
        for number, count in path.counts.items()
        if code.instructions[number].name == "MUFU.EX2"
    )


def main() -> None:
    for count, each, program in (
        (100, 30, 0),
        (100, 31, 6),
        (1000, 63, 3),
        (100, 42, 0),
        (5, 30, 6),
        (33, 2, 0),
    ):
        outer = len(range(program, count, 7))
        print(outer, outer * (each // 3), powers(count, each, program))


if __name__ == "__main__":
    main()
