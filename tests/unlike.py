"""Processes on processors of different kinds, as their libraries are told before torch is imported.

Each kind has one interpreter, which has imported torch, and whose forks are the ranks.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from limits import LIMIT_S

KINDS = [
    {},
    {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE"},
]
"""That of this machine, one without AVX2, and one with another library for products."""

SERVER = """
import gc, json, os, sys, traceback
import worlds  # and with it all that a rank imports
gc.collect()
gc.freeze()
children = []
for line in sys.stdin:  # a rank, or none: what has become of those before
    wanted = json.loads(line)
    if wanted is None:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        children.clear()
        print(json.dumps(codes), flush=True)
        continue
    child = os.fork()
    if child:
        children.append(child)
        continue
    code = 1
    try:
        for number, path in enumerate(wanted["said"], 1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["-c", *wanted["arguments"]]
        exec(compile(wanted["script"], "<rank>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
"""


def run_unlike(script, kinds, *arguments):
    """What each rank of `script` prints. Its first argument is its rank; `kinds` are the numbers of their `KINDS`."""
    with tempfile.TemporaryDirectory() as folder:
        said = [
            [str(Path(folder, f"{stream}{rank}")) for stream in ("out", "err")]
            for rank in range(len(kinds))
        ]
        for rank, kind in enumerate(kinds):
            each = [str(rank), *map(str, arguments)]
            _ask(kind, {"script": script, "arguments": each, "said": said[rank]})
        codes = {kind: _codes(kind) for kind in {*kinds}}
        texts = [tuple(Path(path).read_text() for path in paths) for paths in said]
    ended = [codes[kind].pop(0) for kind in kinds]
    assert ended == [0] * len(kinds), [text[-1500:] for _, text in texts]
    return texts


@cache
def _server(kind):
    """The interpreter of that kind, in a session of its own."""
    told = "ATEN_CPU", "MKL_", "ONEDNN_", "OPENBLAS_"  # of a whole suite on another processor
    here = {name: value for name, value in os.environ.items() if not name.startswith(told)}
    root = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(root), str(root.parent), os.environ.get("PYTHONPATH", "")])
    env = here | KINDS[kind] | {"PYTHONPATH": paths}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], env=env, start_new_session=True, text=True, **pipes
    )
    atexit.register(_end, server)
    return server


def _ask(kind, what):
    server = _server(kind)
    server.stdin.write(json.dumps(what) + "\n")
    server.stdin.flush()


def _codes(kind):
    """The exit codes of its ranks, once all have ended."""
    _ask(kind, None)
    if not select.select([_server(kind).stdout], [], [], LIMIT_S)[0]:
        _end(_server(kind))  # and its ranks
        _server.cache_clear()
        raise AssertionError(f"ranks of kind {kind} still run after {LIMIT_S} s")
    return json.loads(_server(kind).stdout.readline())


def _end(server):
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()
