"""Who may import whom: the table of the design, held to the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import detonation

SOURCE = Path(detonation.__file__).parent
CORE = [  # from the ground up: a module imports from lines above its own, or its own line's left
    ["tiles", "flat"],
    ["bits", "later", "envelope", "ledger", "poison", "verdict"],
    ["basis", "columns", "largest", "selection", "precision", "combine", "rounds"],
    ["codec"],
    ["memory", "scheme", "gradient_schemes", "parameter_schemes", "schemes", "buckets", "traffic", "owners"],
    ["pace", "wire", "lanes"],
    ["link"],
    ["guard", "drift"],
    ["plain", "blocked", "engine", "exchange", "private", "channel", "trial"],
    [
        "place",
        "closure",
        "signsgd",
        "signals",
        "muon",
        "pending",
        "outer",
        "replicator",
        "watch",
        "overlap",
        "gradient_replicator",
        "parameter_replicator",
        "build",
        "change",
        "replicate",
    ],
    ["checkpoint"],
]
MAY_IMPORT = {  # besides choices, which is a leaf
    "kernels": {"kernels"},
    "core": {"core", "kernels"},
    "cluster": {"cluster", "core"},
    "checkpoint": {"checkpoint", "core"},
    "models": {"models"},
    "data": {"data"},
    "report": {"report"},
    "plan": {"plan", "cluster", "core"},
    "train": {"train", "checkpoint", "cluster", "core", "data", "models", "plan", "report"},
    "cli": {"cli", "train", "checkpoint", "cluster", "data", "report"},
    "__main__": {"__main__", "cli"},
}
NO_NETWORK = [
    "tiles",
    "flat",
    "bits",
    "basis",
    "largest",
    "selection",
    "precision",
    "columns",
    "combine",
    "codec",
    "memory",
    "rounds",
    "schemes",
    "traffic",
    "pace",
    "buckets",
    "owners",
    "pending",
    "private",
    "later",
    "envelope",
    "ledger",
    "poison",
    "verdict",
    "guard",
]
FILES = sorted(path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, but for type checkers only."""
    found = set()
    for node in ast.walk(ast.parse((SOURCE / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", [p for p in FILES if len(p.parts) > 1 or p.stem == "__main__"], ids=str)
def test_packages_import_downwards(path):
    package = path.parts[0].removesuffix(".py")
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("detonation.")}
    assert ours - {"choices", "__version__"} <= MAY_IMPORT[package]


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[0] == "core" and p.stem != "__init__"], ids=str)
def test_core_modules_import_downwards(path):
    order = [name for line in CORE for name in line]
    below = set(order[: order.index(path.stem)])
    assert {name.split(".")[2] for name in imports(path) if name.startswith("detonation.core.")} <= below


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[0] == "core"], ids=str)
def test_core_needs_torch_alone_and_the_ground_knows_no_network(path):
    others = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names)
    assert others <= {"torch", "detonation"}
    if path.stem in NO_NETWORK:
        network = {name for name in imports(path) if name.startswith("torch.distributed")}
        unwrapping = {"torch.distributed.tensor", "torch.distributed.tensor.DTensor"}
        assert network == (unwrapping if path.stem == "flat" else set())


def test_no_star_imports():
    assert not [path for path in FILES for name in imports(path) if name.endswith(".*")]


def test_importing_the_package_does_not_import_torch():
    check = "import detonation, sys; assert 'torch' not in sys.modules; detonation.demo; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_every_public_name_is_there():
    assert all(getattr(detonation, name) is not None for name in detonation.__all__)
    with pytest.raises(AttributeError, match="no attribute 'demi'"):
        _ = detonation.demi


def test_without_the_extras_the_command_line_says_which_one_is_missing():
    hide = "import sys; sys.modules['tyro'] = None; from detonation.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the command line needs tyro: pip install 'detonation-torch[train]'\n"
