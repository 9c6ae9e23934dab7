"""The command `detonation`: parse, call, print."""

import json
import os
from typing import Any

import tyro
from tyro.conf import FlagCreatePairsOff

from detonation.cli.answers import explain, fail
from detonation.cli.arguments import Probe, Train, Verb
from detonation.cli.verbs import VERBS


def main(arguments: list[str] | None = None) -> int:
    """Runs one command line; returns 0 (also if stopped on request), 1 for a failure, 2 for bad input, 130 for Ctrl-C.

    A rank of a launcher's world ends here, without a return: see `end_now`.
    """
    verb: Any = tyro.cli(
        Verb,
        prog="detonation",
        description="Train PyTorch models over slow links: sharded inside the node, in touch between nodes.",
        args=arguments,
        config=(FlagCreatePairsOff,),
    )
    # Both are read when torch is imported, and only then.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "WARNING" if verb.debug else "ERROR")
    code = _run(verb)
    if isinstance(verb, Train | Probe) and _in_launched_world():
        from detonation.cluster.processes.exit import end_now

        end_now(code)
    return code


def _run(verb: Any) -> int:
    try:
        result = VERBS[type(verb)](verb)
    except KeyboardInterrupt:
        return fail(verb, "interrupted", 130)
    except Exception as error:
        return explain(verb, error)
    if verb.json and result is not None:
        print(json.dumps(result))
    return 1 if result is not None and result.get("good") is False else 0


def _in_launched_world() -> bool:
    from detonation.cluster.init import launched

    return launched(os.environ) is not None
