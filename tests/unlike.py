"""Processes on processors of different kinds, as their libraries are told before torch is imported."""

import os
import subprocess
import sys
from pathlib import Path

from limits import LIMIT_S

KINDS = [
    {},
    {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"},
]
"""That of this machine, one without AVX2, and one with another library for products."""


def run_unlike(script, kinds, *arguments):
    """What each rank of `script` prints. Its first argument is its rank; `kinds` are the numbers of their `KINDS`."""
    told = "ATEN_CPU", "MKL_", "ONEDNN_", "OPENBLAS_"  # of a whole suite on another processor
    here = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = []
    for rank, kind in enumerate(kinds):
        command = [sys.executable, "-c", script, str(rank), *map(str, arguments)]
        ranks.append(subprocess.Popen(command, env=here | KINDS[kind] | {"PYTHONPATH": paths}, **pipes))
    said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), [text[-1500:] for _, text in said]
    return said
