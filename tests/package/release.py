"""What is long of the check before a release: the wheel in an empty environment, with a torch from the index.

    make release-check

Builds sdist and wheel, and installs the wheel with its extra `train`, with the oldest torch that it allows and
with torch 2.13. There it asks for help and versions, trains two replicas under torchrun, and verifies their checkpoint.
With torch 2.13, mypy and pyright read the README's loop. All of it lies in a temporary directory.
"""

import os
import re
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


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for environment in ("tools", *TORCHES):
            venv.create(folder / environment, with_pip=True, symlinks=True)
        tools = folder / "tools/bin"
        run(folder, tools / "pip", "install", "--quiet", "build", "twine", "mypy", "pyright")
        run(ROOT, tools / "python", "-m", "build", "--outdir", folder / "dist")
        run(folder, tools / "twine", "check", "--strict", *(folder / "dist").iterdir())
        (wheel,) = (folder / "dist").glob("*.whl")
        for torch in TORCHES:
            clean, out = folder / torch / "bin", f"run-{torch}"
            run(folder, clean / "pip", "install", "--quiet", f"torch=={torch}", f"{wheel}[train]")
            for arguments in (["--help"], ["--version"]):
                run(folder, clean / "detonation", *arguments)
            run(folder, clean / "torchrun", *LAUNCHED, "--out", out)
            run(folder, clean / "detonation", "verify", out)
        (folder / "loop.py").write_text(typed((ROOT / "README.md").read_text()))
        run(folder, tools / "mypy", "--strict", "--python-executable", clean / "python", "loop.py")
        run(folder, tools / "pyright", "--pythonpath", clean / "python", "loop.py")


if __name__ == "__main__":
    sys.exit(main())
