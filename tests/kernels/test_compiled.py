"""The Triton kernels compile for a GPU that is not here: `benchmarks/aot.py` prints the table for all of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def compiled(*command):
    """What a process of its own prints: in this one the interpreter stands in for the compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout


def test_kernels_compile_ahead_of_time_and_nothing_spills():
    kernels = ["decode_kernel", "inspect_kernel", "seal_kernel", "inspect_sum_kernel", "seal_sum_kernel"]
    command = [sys.executable, BENCHMARKS / "aot.py", "--targets", "90"]
    command += ["--configurations", "random_sign 1/8", "random 1/16 bf16"]
    table = compiled(*command, "--kernels", *kernels)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert {row[1].split()[0] for row in rows} == set(kernels)
    for _, kernel, target, registers, local, shared, code in rows:
        assert target == "sm_90" and int(code) > 0, kernel
        assert int(registers) <= 255 and int(local) == 0 and int(shared) <= 48 * 1024, kernel


def test_a_second_launch_starts_what_the_jit_would_and_does_without_it():
    first, second = compiled(sys.executable, BENCHMARKS / "direct_launches.py").split()
    assert int(first) > 20 and int(second) == 0
