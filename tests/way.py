"""The way of a step through the code, and the size of the package: what `layers/test_way.py` holds to ceilings.

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

CEILINGS = {
    "demo": (61, 44, 22),
    "demo in signs": (67, 45, 22),
    "demo by owners": (169, 112, 31),
    "full + AdamW": (44, 33, 21),
    "loco + AdamW": (113, 72, 28),
    "diloco + AdamW": (62, 41, 24),
}
"""Python calls of one `optimizer.step()`, moves from one file to another, and files: at most. They only fall."""

SIZES = {
    "public names": 40,
    "verbs": 11,
    "recipe keys": 117,
    "private names of core that the application imports": 19,
    "words of README": 840,
    "words of docs": 39_381,
}
"""The size of the package, at most. The numbers only fall."""


@cache
def travelled(kind: str) -> tuple[int, int, int]:
    """Calls, moves between files, and files of the third `optimizer.step()` of two replicas."""
    return worlds.run_alone(_walk, 2, 1, *STEPS[kind])[0]


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
    mesh: DeviceMesh, scheme: str, adamw: bool, arguments: Mapping[str, Any]
) -> tuple[int, int, int]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    base = (
        torch.optim.AdamW(model.parameters()) if adamw else dt.SignSGD(model.parameters(), lr=1e-3)
    )
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.scheme(scheme, arguments))
    calls: list[tuple[str, str]] = []
    for step in range(3):  # the first one builds the levels, the second one fills caches
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 64)).square().mean().backward()
        calls.clear()
        with recorded(calls):
            optimizer.step()
        optimizer.zero_grad()
    files = [file for file, _ in calls]
    return len(calls), sum(a != b for a, b in pairwise(files)), len(set(files))


if __name__ == "__main__":
    if "--json" in sys.argv:
        print(json.dumps({kind: travelled(kind) for kind in CEILINGS}))
        sys.exit()
    print("calls / moves / files of a step, and the ceilings")
    for kind, ceiling in CEILINGS.items():
        print(
            f"  {kind:16}",
            *(f"{is_:4} / {most:<4}" for is_, most in zip(travelled(kind), ceiling, strict=True)),
        )
    for name, number in sizes().items():
        print(f"  {name:16} {number:6,} / {SIZES[name]:,}")
