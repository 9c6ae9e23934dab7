"""Triton kernels compile for a GPU that is not here: benchmarks/accelerator/aot.py prints them all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]


def compiled(*command, **changed):
    """What a process of its own prints: in this one the interpreter stands in for the compiler."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | changed
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert not done.returncode, done.stderr[-2000:]
    return done.stdout


@pytest.mark.long  # no branch of its own
def test_kernels_compile_ahead_of_time_and_nothing_spills():
    kernels = [
        "decode_kernel",
        "inspect_kernel",
        "seal_kernel",
        "inspect_sum_kernel",
        "seal_sum_kernel",
    ]
    command = [sys.executable, "-m", "benchmarks.accelerator.aot", "--targets", "90"]
    command += ["--configurations", "random_sign 1/8", "random 1/16 bf16"]
    table = compiled(*command, "--kernels", *kernels)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]
    assert {row[1].split()[0] for row in rows} == set(kernels)
    for _, kernel, target, registers, local, shared, code in rows:
        assert target == "sm_90" and int(code) > 0, kernel
        assert int(registers) <= 255 and int(local) == 0 and int(shared) <= 48 * 1024, kernel


LINES_THAT_FUSE = ("total = tl.fma(", "found = tl.dot(")
"""Sums of few basis vectors, and products with the basis: "One arithmetic" in docs/design.md."""


@pytest.mark.parametrize(
    ("target", "configurations"),
    [
        ("100", ["demo 4/64 sign", "random_sign 1/8"]),
        *(
            pytest.param(target, [], marks=pytest.mark.long)
            for target in ("80", "90", "100", "120")
        ),
    ],
)
def test_nothing_is_fused_or_approximated_but_what_the_rules_say(target, configurations, tmp_path):
    """In the PTX, in which ptxas fuses nothing more (--fmad=false): a GPU multiplies and adds as the processors do.

    What every receiver computes, it adds up in an order of the source, never in one of the layout that the compiler
    chooses for a target: on all GPUs the norm of a message has the same bits, and with it the decision to refuse it.
    """
    command = [
        sys.executable,
        "-m",
        "benchmarks.accelerator.aot",
        "--arithmetic",
        "--targets",
        target,
    ]
    found, added = {}, set()
    command += ["--configurations", *configurations] if configurations else []
    cache = {
        "TRITON_CACHE_DIR": str(tmp_path)
    }  # that of the user may name the sources of another clone
    for line in compiled(*command, **cache).splitlines():
        compiled_for, kernel, instruction, place = line.split()
        path, _, number = place.rpartition(":")
        source = Path(path).read_text().splitlines()[int(number) - 1].strip()
        if instruction == "tt.reduce":
            added.add((kernel, source))
        else:
            found.setdefault(source, set()).add((compiled_for, kernel, instruction))
    assert {each for uses in found.values() for each, *_ in uses} == {target}
    assert {kernel for uses in found.values() for _, kernel, _ in uses} == {
        "encode_kernel",
        "decode_kernel",
    }
    assert {kernel for kernel, _ in added} == {"encode_kernel"}, added  # whose sums travel as bytes
    for source, uses in found.items():
        assert source.startswith(LINES_THAT_FUSE), (source, uses)
        assert all(instruction.startswith("fma.rn.f32") for *_, instruction in uses), (
            uses
        )  # no products of less


def test_a_second_launch_starts_what_the_jit_would_and_does_without_it():
    first, second = compiled(sys.executable, "-m", "benchmarks.accelerator.direct_launches").split()
    assert int(first) > 20 and int(second) == 0
