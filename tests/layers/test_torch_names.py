"""Private names of torch that the package uses are in one file, and the running torch has them."""

import ast
import re
import tomllib
from operator import attrgetter
from pathlib import Path

import pytest
import torch

import detonation

SOURCE = Path(detonation.__file__).parent
TORCH = Path(torch.__file__).parent
TABLE = tomllib.loads((Path(__file__).parent / "torch_names.toml").read_text())
OF_TORCH = {name for names in TABLE["names"].values() for name in names}
COMPILED = {path.rpartition(".")[2] for path in TABLE["compiled"]}
OF_OTHERS = {
    "_C": "torch: the module of its compiled names",
    "_exit": "os",
    "_getframe": "sys",
    "_decompressed_text": "pysword",
    "_optimizers": "accelerate",
    "_get_output_dir": "transformers",
    "_trial": "transformers",
    "_model_mapping": "transformers",
    "_keys_to_ignore_on_save": "transformers",
    "_METADATA_FILENAME": "lightning",
    "_device_mesh": "lightning",
    "_load_config": "torchtitan",
}
"""Private names of other libraries, whose extras have upper bounds or tests of their own."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_own_object(value: ast.expr) -> bool:
    """True for `self`, `cls` and `super()`."""
    if isinstance(value, ast.Call):
        value = value.func
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def private_names(source: str) -> set[str]:
    """Private names of other packages in a module: attributes, imports, names given to getattr."""
    found = set[str]()
    own = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            (own if is_own_object(node.value) else found).add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("detonation"):
            private_module = any(map(is_private, (node.module or "").split(".")))
            names = [alias.name for alias in node.names]
            found |= {name for name in names if private_module or is_private(name)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            name = node.args[1]
            has_default = len(node.args) > 2
            if isinstance(name, ast.Constant) and is_private(name.value) and not has_default:
                found.add(name.value)
    return found - own


def defined(name: str, source: str) -> bool:
    """True if a source or stub defines a function, a class or a variable of this name."""
    kinds = rf'(async )?(def|class) {name}\b|(self\.)?{name}\s*[:=]|"{name}"'
    return re.search(rf"^\s*({kinds})", source, re.MULTILINE) is not None


def missing(torch_directory: Path) -> list[str]:
    """Names of the table that the sources of a torch, installed or unpacked, do not define."""
    found = []
    for file, names in TABLE["names"].items():
        path = torch_directory / file
        source = path.read_text() if path.is_file() else ""
        found += [f"{file}: {name}" for name in names if not defined(name, source)]
    return found


def test_each_private_name_that_the_package_uses_is_in_the_table():
    sources = {
        path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")
    }
    known = OF_TORCH | COMPILED | OF_OTHERS.keys()
    unknown = {path: private_names(source) - known for path, source in sources.items()}
    assert {path: names for path, names in unknown.items() if names} == {}
    words = set(re.findall(r"\w+", "".join(sources.values())))
    assert sorted((OF_TORCH | COMPILED) - words) == [], "used nowhere"


def test_the_running_torch_has_each_name():
    assert missing(TORCH) == [], f"torch {torch.__version__} lacks them"


@pytest.mark.parametrize("path", TABLE["compiled"])
def test_the_running_torch_has_each_compiled_name(path):
    root, _, rest = path.partition(".")
    assert root == "torch"
    owner, _, name = rest.rpartition(".")
    owner = attrgetter(owner)(torch)
    assert hasattr(owner, name) or hasattr(owner(), name), f"torch {torch.__version__} lacks {path}"


def test_a_name_that_is_gone_is_named(tmp_path):
    state = "distributed/fsdp/_fully_shard/_fsdp_state.py"
    (tmp_path / state).parent.mkdir(parents=True)
    (tmp_path / state).write_text((TORCH / state).read_text().replace("_fsdp_param_group(", "_x("))
    assert f"{state}: _fsdp_param_group" in missing(tmp_path)
    assert f"{state}: _pre_forward" not in missing(tmp_path)


def test_a_new_private_name_in_the_package_is_seen():
    source = "from torch._x import Y, _z\ntorch._a(getattr(b, '_c'), self._d, other._e)\n"
    assert private_names(source) == {"Y", "_z", "_a", "_c", "_e"}
