"""The way of a step through the code, and what users meet: `layers/test_way.py` holds both to ceilings.

    .venv/bin/python tests/way.py

prints each measure beside its ceiling; with --json what a step of each kind makes, without the ceilings.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import detonation as dt
import worlds
from detonation import errors, extend, schemes
from detonation.cli.verbs import VERBS

ROOT = Path(__file__).parents[1]
SOURCE = Path(dt.__file__).parent
APPLICATION = "train", "cli", "report", "data", "models", "plan"

STEPS: dict[str, tuple[str, bool, Mapping[str, Any]]] = {
    "demo": ("demo", False, {}),
    "demo in signs": ("demo", False, {"precision": "sign", "error_feedback": False}),
    "demo by owners": ("demo", False, {"link": "owner"}),
    "full + AdamW": ("full", True, {}),
    "loco + AdamW": ("loco", True, {}),
    "diloco + AdamW": ("diloco", True, {"every": 1}),
}
"""Each kind of step that is walked: the name of its scheme, whether AdamW takes it (SignSGD otherwise), arguments."""

ROADS: dict[str, tuple[bool, bool]] = {
    "kernels": (True, False),
    "torch": (False, False),
    "overlap": (True, True),
}
"""Each road of a step: whether compiled kernels run, whether gradients leave during backward."""

# `unheard` is one call of ours for 30 of torch: of `Replicated.step`, and of `SignSGD.step`; `flags`
# compares for codes without writing bool, which torch does slowly
CEILINGS = {
    ("demo", "kernels"): (62, 45, 22),
    ("demo", "torch"): (115, 81, 32),
    ("demo", "overlap"): (89, 63, 25),
    ("demo in signs", "kernels"): (67, 46, 22),
    ("demo in signs", "torch"): (131, 85, 32),
    ("demo in signs", "overlap"): (94, 64, 25),
    ("demo by owners", "kernels"): (173, 110, 31),
    ("demo by owners", "torch"): (209, 134, 34),
    ("demo by owners", "overlap"): (200, 128, 33),
    ("full + AdamW", "kernels"): (44, 34, 21),
    ("full + AdamW", "torch"): (44, 34, 21),
    ("full + AdamW", "overlap"): (71, 51, 24),
    ("loco + AdamW", "kernels"): (95, 59, 28),
    ("loco + AdamW", "torch"): (95, 59, 28),
    ("loco + AdamW", "overlap"): (122, 76, 30),
    ("diloco + AdamW", "kernels"): (62, 42, 24),
    ("diloco + AdamW", "torch"): (62, 42, 24),
    ("diloco + AdamW", "overlap"): (69, 48, 25),
}
"""Python calls of one `optimizer.step()`, moves from one file to another, and files: at most.
A ceiling falls with the measure. It may move up when a message, a diagnostic or a plainer form needs it,
with one sentence why."""

SIZES = {
    "public names": 40,
    "verbs": 11,
    "recipe keys": 119,  # train.constant_batch; optimizer.embedding_lr_ratio
    "private names of core that the application imports": 21,  # `worker.py` became three files; bytes of
    # full synchronisation among the replicas of each step
    "words of README": 1_030,  # two rows of Muon in rounds, which have the lowest loss; the law at real sizes;
    # the gain at every rate of a link, and what a second learning rate changes in each row
    "words of docs": 58_300,  # Muon and `muloco` in the law of size;
    # two machines without a shared directory, stages that are saved one by one, what leads to NaN, heads in a node;
    # what does not fit among levels, resumes and trainers; costs of two replicas;
    # four sizes of our own law, and its prediction; two short sentences for one long one;
    # a cost that a law did not predict; in which outputs FSDP2 finds tensors; what
    # a check, a count and a skip do not cover;
    # the order of what comes between two steps;
    # which differences do not stay significant, memory of Muon in rounds;
    # what mixed precision changes; the law of rounds;
    # how `plan` counts a second learning rate, how to take one, and what it changes;
    # what dense codes cost on a CPU;
    # sentences that can be read alone; nouns that pronouns had replaced;
    # what a server does where nothing is new;
    # the self-test of an optimizer of your own, `vllm serve`;
    # what holds in partitions, set-up, unused and written weights; an elastic
    # tutorial; the specifications, which are code; the protocol of membership; from detonation 0.5;
    # serving while training, a constant batch, several stores; bytes of each kernel, losses and joins in the
    # table of faults; what a user of elastic runs meets next
}
"""What users meet, and what the application takes of core past its faces: at most."""


@cache
def travelled(kind: str, road: str) -> tuple[int, int, int]:
    """Calls, moves between files, and files of the third step of two replicas: from the loss on under
    overlap, of `optimizer.step()` otherwise."""
    return worlds.run_alone(_walk, 2, 1, *STEPS[kind], *ROADS[road])[0]


@cache
def sizes() -> dict[str, int]:
    """The measures of `SIZES` as they are."""
    pages = {*ROOT.glob("docs/**/*.md")} - {
        ROOT / "docs/recipe-reference.md"
    }  # a program writes that one
    return {
        "public names": len(dt.__all__),
        "verbs": len(VERBS),
        "recipe keys": len(
            re.findall(r"^\| `", (ROOT / "docs/recipe-reference.md").read_text(), re.MULTILINE)
        ),
        "private names of core that the application imports": len(private_imports()),
        "words of README": len((ROOT / "README.md").read_text().split()),
        "words of docs": sum(len(page.read_text().split()) for page in pages),
    }


def private_imports() -> list[tuple[str, str]]:
    """The files of the application (recipes, training, planning, command line, reports) and what each imports of core
    that no face offers to users."""
    public = {*dt.__all__, *extend.__all__, *errors.__all__, *schemes.__all__}
    found = []
    for path in sorted(path for room in APPLICATION for path in SOURCE.glob(f"{room}/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "detonation.core"
            ):
                found += [
                    (str(path.relative_to(SOURCE)), each.name)
                    for each in node.names
                    if each.name not in public
                ]
    return found


@contextmanager
def recorded(calls: list[tuple[str, str]]) -> Iterator[None]:
    """Appends the file and the name of each function of the package that is called within it."""
    root = f"{SOURCE}/"

    def profile(frame: FrameType, event: str, _: object) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if (
            event == "call"
            and file.startswith(root)
            and "comp>" not in name
            and "genexpr" not in name
        ):
            calls.append((file.removeprefix(root), name))

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def _walk(
    mesh: DeviceMesh,
    scheme: str,
    adamw: bool,
    arguments: Mapping[str, Any],
    kernels: bool,
    overlaps: bool,
) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    if adamw:
        base: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    else:
        base = dt.SignSGD(model.parameters(), lr=1e-3)
    chosen = dt.scheme(scheme, arguments)
    optimizer = dt.replicate(base, model, mesh["replicate"], chosen, kernels=kernels)
    calls: list[tuple[str, str]] = []
    for step in range(3):  # the first one builds the levels, the second one fills caches
        torch.manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(4, 64)).square().mean()
        calls.clear()
        if overlaps:
            with recorded(calls), optimizer.overlap():
                loss.backward()
        else:
            loss.backward()
        with recorded(calls):
            optimizer.step()
        optimizer.zero_grad()
    files = [file for file, _ in calls]
    return len(calls), sum(a != b for a, b in pairwise(files)), len(set(files))


if __name__ == "__main__":
    walked = {f"{kind}, {road}": travelled(kind, road) for kind, road in CEILINGS}
    if "--json" in sys.argv:
        print(json.dumps(walked))
        sys.exit()
    print("calls / moves / files of a step, and the ceilings")
    for (name, found), ceiling in zip(walked.items(), CEILINGS.values(), strict=True):
        pairs = zip(found, ceiling, strict=True)
        print(f"  {name:24}", *(f"{is_:4} / {most:<4}" for is_, most in pairs))
    for name, number in sizes().items():
        print(f"  {name:24} {number:6,} / {SIZES[name]:,}")
