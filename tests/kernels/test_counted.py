"""Instructions are counted from machine code: `benchmarks/sass.py` prints what a step on an H100 would cost."""

import sys

import pytest
from test_compiled import BENCHMARKS, compiled

pytest.importorskip("triton")


def test_loops_of_known_lengths_are_counted_with_those_that_the_assembler_unrolled():
    lines = compiled(sys.executable, BENCHMARKS / "counted_loops.py").splitlines()
    found = [tuple(map(int, line.split())) for line in lines]
    assert [wanted for _, wanted, _ in found] == [150, 140, 3003, 210, 0, 0]
    for turns, wanted, counted in found:
        assert wanted <= counted <= wanted + turns
    assert found[3][2] - found[0][2] == 60  # 15 times 14 turns, and 15 times 10


@pytest.mark.long  # no branch of its own
def test_a_kernel_of_a_step_is_counted_without_a_branch_that_is_unknown():
    command = [
        sys.executable,
        BENCHMARKS / "sass.py",
        "--configurations",
        "demo 4/64, R=2",
        "--kernels",
        "scan_kernel",
    ]
    scan, total = [line.split(" | ") for line in compiled(*command).splitlines()[2:]]
    assert scan[1] == "scan" and not scan[4].strip() and not scan[-1].strip(" |")
    instructions, octets = int(scan[7].replace(",", "")), float(scan[8])
    assert (
        300 < instructions < 2000 and octets == 4
    )  # per 1,024 coordinates, and per coordinate: each is read once
    assert total[1] == "**sum**"
