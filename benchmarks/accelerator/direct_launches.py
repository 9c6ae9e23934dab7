"""Launches on a GPU that is not there, in a process without Triton's interpreter."""

import torch
import triton
import triton.language as tl
from benchmarks.accelerator.fake_gpu import FakeGPU

from detonation.kernels.gpu import launching


@triton.jit(do_not_specialize=["step"])
def kernel(read, written, count, step, rate, SIZE: tl.constexpr, NAME: tl.constexpr):
    item = tl.arange(0, SIZE)
    value = tl.load(read + item, mask=item < count) * rate + step
    tl.store(written + item * count, value if NAME == "sum" else -value)


room = torch.zeros(256)
double = torch.zeros(16, dtype=torch.float64)
LAUNCHES = [
    (8, (room, room, count, step, 0.5), {"SIZE": size, "NAME": name})
    for count in (0, 1, 2, 16, 17, 2**31 - 1, 2**31, 2**33 + 3, -1, -(2**31), -(2**31) - 1)
    for step in (1, 2, 2**40)
    for size, name in ((16, "sum"), (32, "difference"))
]
LAUNCHES += [
    (8, (read, written, 5, 3, 0.5), {"SIZE": 16, "NAME": "sum"})
    for read in (room, room[1:], room[4:], double, double[1:], room.bfloat16())
    for written in (room, room[3:])
]
LAUNCHES += [(4, (room, room, 5, 3, rate), {"SIZE": 16, "NAME": "sum"}) for rate in (0.5, 1.0, 1)]


def main():
    started, seen, jit = [], [], kernel.run
    FakeGPU(90, lambda *launch: started.append(launch)).activate()
    kernel.run = lambda *args, **options: seen.append(args) or jit(*args, **options)
    for _ in range(2):
        seen.clear()
        for programs, (warps, arguments, constants) in enumerate(LAUNCHES, 1):
            launching.launch(kernel, programs, *arguments, warps=warps, **constants)
            ((function, grid, given),) = started
            started.clear()
            wanted = jit(
                *arguments,
                grid=(1,),
                warmup=True,
                **constants,
                num_warps=warps,
                enable_fp_fusion=False,
            )
            assert function is wanted.function, (arguments, constants)
            assert grid == (programs, 1, 1) and len(given) == 7
            assert all(
                one is other
                for one, other in zip(given, (*arguments, *constants.values()), strict=True)
            )
        print(len(seen), end=" ")


if __name__ == "__main__":
    main()
