"""What is long of the check before a release: the wheel in an empty environment, with a torch from the index.

    make release-check
    make release-check RELEASE="--torch 2.13.0 --keep dist"

Builds sdist and wheel, and installs the wheel with its extra `train`, with the oldest torch that it allows and
with torch 2.13. There it asks for help and versions, trains two replicas under torchrun, and verifies their checkpoint.
With torch 2.13 it does the same in an environment of uv, if uv is in PATH, and with the sdist;
mypy and pyright read the README's loop. All files are in a temporary directory; `--keep DIR` copies
the sdist and the wheel that passed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCHES = ("2.10.0", "2.13.0")
"""The oldest, which pyproject.toml names, and the one that `make` installs."""
SHORT = (
    "--shards",
    "1",
    "--steps",
    "4",
    "--set",
    "train.log_every=2",
    "train.validation_batches=1",
)
LAUNCHED = (
    "--standalone",
    "--nproc-per-node",
    "2",
    "-m",
    "detonation",
    "train",
    "quick-lm",
    *SHORT,
)
PROGRAM = """from collections.abc import Iterable

{imports}
from torch import Tensor, nn


def train(model: nn.Module, loader: Iterable[Tensor]) -> None:
{loop}"""


def run(folder: Path, *command: object) -> None:
    """Runs a command, which must end with 0, without the sources of this directory in its path."""
    print("+", *command, flush=True)
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=plain | {"OMP_NUM_THREADS": "1"},
        check=True,
    )


def typed(readme: str) -> str:
    """The loop of the README as a program whose model and data have types."""
    (block,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    imports, _, loop = block.partition("\n\n")
    return PROGRAM.format(imports=imports, loop=textwrap.indent(loop, "    "))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", nargs="+", default=TORCHES)
    parser.add_argument("--keep", type=Path)
    return parser.parse_args()


def with_pip(folder: Path, name: str) -> tuple[Path, list[object]]:
    """A new environment: its programs, and the command that installs into it."""
    venv.create(folder / name, with_pip=True, symlinks=True)
    programs = folder / name / "bin"
    return programs, [programs / "pip", "install", "--quiet"]


def with_uv(folder: Path, name: str) -> tuple[Path, list[object]]:
    run(folder, "uv", "venv", "--quiet", "--python", sys.executable, name)
    programs = folder / name / "bin"
    return programs, ["uv", "pip", "install", "--quiet", "--python", programs / "python"]


def try_out(folder: Path, programs: Path, out: str) -> None:
    """Asks for help and version, trains two replicas, and verifies their checkpoint."""
    for word in ("--help", "--version"):
        run(folder, programs / "detonation", word)
    run(folder, programs / "torchrun", *LAUNCHED, "--out", out)
    run(folder, programs / "detonation", "verify", out)


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    tools, install = with_pip(folder, "tools")
    run(folder, *install, "build", "twine", "mypy", "pyright")
    run(ROOT, tools / "python", "-m", "build", "--outdir", folder / "dist")
    run(folder, tools / "twine", "check", "--strict", *(folder / "dist").iterdir())
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return sdist, wheel


def check(folder: Path, torches: list[str]) -> None:
    sdist, wheel = build(folder)
    for torch in torches:
        programs, install = with_pip(folder, f"pip-{torch}")
        run(folder, *install, f"torch=={torch}", f"{wheel}[train]")
        try_out(folder, programs, f"run-{torch}")
    run(folder, *install, "--no-deps", "--force-reinstall", sdist)
    run(folder, programs / "detonation", "verify", f"run-{torch}")
    if shutil.which("uv"):
        of_uv, install = with_uv(folder, f"uv-{torch}")
        run(folder, *install, f"torch=={torch}", f"{wheel}[train]")
        try_out(folder, of_uv, f"run-uv-{torch}")
    else:
        print("uv is not in PATH: its environment is left out", flush=True)
    (folder / "loop.py").write_text(typed((ROOT / "README.md").read_text()))
    tools = folder / "tools/bin"
    python = programs / "python"
    run(folder, tools / "mypy", "--strict", "--python-executable", python, "loop.py")
    run(folder, tools / "pyright", "--pythonpath", python, "loop.py")


def main() -> None:
    chosen = arguments()
    with tempfile.TemporaryDirectory() as name:
        check(Path(name), list(chosen.torch))
        if chosen.keep:
            shutil.copytree(Path(name) / "dist", chosen.keep, dirs_exist_ok=True)


if __name__ == "__main__":
    sys.exit(main())
