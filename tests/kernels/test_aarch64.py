"""The C++ kernels of what replicas must compute alike have the same bits on aarch64, emulated, as on x86-64.

`apt-get install qemu-user g++-aarch64-linux-gnu` brings emulator and compiler; without them the test is skipped.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from detonation.core.codec.basis import dct_matrix
from detonation.kernels import native

MAIN = Path(__file__).with_name("alike.cpp")
FLAGS = [
    flag
    for flag in native._FLAGS
    if flag not in ("-shared", "-fPIC") and not flag.startswith("-march")
]
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
KINDS = {
    "this processor": (["g++", "-march=native"], []),
    "the oldest x86-64": (["g++", "-march=x86-64"], []),
    "aarch64": (["aarch64-linux-gnu-g++", "-static"], [EMULATOR]),
}


def hashes(kind, folder):
    """What the program prints, by kernel and case, compiled and run for one kind of processor."""
    (compiler, *flags), runner = KINDS[kind]
    program = folder / kind.replace(" ", "-")
    sources = ["-I", str(Path(native.__file__).parent), str(MAIN), "-o", str(program)]
    subprocess.run([compiler, *FLAGS, *flags, *sources], check=True, capture_output=True)
    basis = folder / "basis"
    basis.write_bytes(
        b"".join(
            dct_matrix(n, torch.device("cpu")).T.numpy().tobytes() for n in native.KERNEL_CHUNKS
        )
    )
    done = subprocess.run([*runner, program, basis], check=True, capture_output=True, text=True)
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.long  # an emulator; test_one_arithmetic.py has the oldest x86-64
@pytest.mark.skipif(platform.machine() != "x86_64", reason="it compares x86-64 with aarch64")
@pytest.mark.skipif(
    not (EMULATOR and shutil.which("aarch64-linux-gnu-g++")),
    reason="needs qemu and a cross compiler",
)
@pytest.mark.parametrize("other", ["aarch64", "the oldest x86-64"])
def test_kernels_have_the_same_bits_on(other, tmp_path):
    here, there = hashes("this processor", tmp_path), hashes(other, tmp_path)
    assert len(here) > 600 and len({*here.values()}) > 150  # a bitmap says what packed indices say
    assert {
        name for name in here if there.get(name) != here[name]
    } == set() and here.keys() == there.keys()
