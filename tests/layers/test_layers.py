"""Who may import whom: one line per folder, held to the source."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import detonation
from detonation.core.schemes.scheme import SCHEMES

# A folder may import from the folders on its line, and from all that those may import in the same package.
# It may not import upwards: a line names only folders above it. A file at the root of a package is a room of its own
# where it has a line, and belongs to the line of the package otherwise. `choices`, `link_speed`, `plugins`, `version`,
# `whole_files` and `interrupts` are open to all.
# The last column: what a folder may import of torch.distributed (nothing, its DTensor alone, or anything).
OPEN = "choices", "interrupts", "link_speed", "plugins", "version", "whole_files"
NONE, DTENSOR, ANY = "nothing", "DTensor", "anything"
HOUSE = {
    "choices": ("", NONE),
    "link_speed": ("", NONE),
    "plugins": ("", NONE),
    "version": ("", NONE),
    "whole_files": ("", NONE),
    "interrupts": ("", NONE),
    "kernels": ("", NONE),
    "kernels/gpu": ("", NONE),
    "core/base_error": ("", NONE),
    "core/flat": ("core/base_error", DTENSOR),
    "core/round": ("", NONE),
    "core/runtime": ("core/round", NONE),
    "core/compute": ("core/flat core/runtime kernels", NONE),
    "core/codec": ("core/flat core/round core/runtime core/compute", NONE),
    "core/memory": ("core/flat core/round core/runtime core/compute", NONE),
    "core/optim": ("core/flat core/round core/runtime core/compute", ANY),
    "core/integrity": ("core/codec core/memory core/optim", NONE),
    "core/schemes": ("core/integrity", NONE),
    "core/engine": ("core/integrity", NONE),
    "core/link": ("core/schemes core/engine", ANY),
    "core/exchange": ("core/link", NONE),
    "core/replicator": ("core/exchange", NONE),
    "core/agreement": ("core/replicator", DTENSOR),
    "core/optimizer": ("core/agreement", ANY),
    "core": ("core/optimizer", NONE),
    "muon": ("core", ANY),
    "gates": ("core", NONE),
    "engines/triton": ("core kernels", NONE),
    "engines": ("core kernels", NONE),
    "wire": ("core", ANY),
    "cluster/interface": ("core", NONE),
    "cluster/position": ("cluster/interface core", NONE),
    "cluster/devices": ("cluster/position core", NONE),
    "cluster/processes": ("cluster/devices core", ANY),
    "cluster/init": ("cluster/processes core", ANY),
    "cluster/network": ("cluster/init core", ANY),
    "cluster/shares": ("", NONE),
    "cluster/quorum": ("cluster/processes", ANY),
    "cluster/survive": (
        "cluster/network cluster/init cluster/shares cluster/quorum core",
        ANY,
    ),
    "cluster": ("cluster/network cluster/survive wire core", ANY),
    "checkpoint/files": ("core", DTENSOR),
    "checkpoint": ("checkpoint/files wire gates core", ANY),
    "log": ("checkpoint cluster/network core", NONE),
    "feed/token": ("core", NONE),
    "feed/frames": ("feed/token log cluster/position cluster/interface core", NONE),
    "feed/weights": ("feed/token checkpoint core", DTENSOR),
    "feed": ("feed/weights feed/frames muon log checkpoint cluster core", DTENSOR),
    "models": ("", NONE),
    "data": ("", NONE),
    "report/words": ("", NONE),
    "report/read": ("report/words", NONE),
    "report/terminal": ("report/words", NONE),
    "report/figures": ("report/read", NONE),
    "report/page": ("report/terminal report/figures", NONE),
    "report": ("report/page", NONE),
    "plan": ("report/words cluster wire core", ANY),
    "integrations": ("checkpoint cluster core", ANY),
    "train/recipe": ("cluster/init wire muon core models data", NONE),
    "train/output": ("train/recipe gates cluster data report", NONE),
    "train/loop": ("train/output gates checkpoint cluster wire core data models", ANY),
    "train/choice": ("train/loop plan checkpoint cluster core", ANY),
    "train/run": ("train/choice plan checkpoint log feed cluster core", ANY),
    "train/verbs": ("train/run plan checkpoint log feed cluster core data models report", ANY),
    "train": ("train/verbs", NONE),
    "schemes": ("core", NONE),
    "extend": ("core", NONE),
    "errors": ("feed checkpoint log cluster core", NONE),
    "testing": ("cluster/network core", NONE),
    "cli": ("train checkpoint log feed cluster data report", NONE),
    "__main__": ("cli", NONE),
}
KERNELS_THROUGH = "core/compute/kernel_library.py"
"""The only file of core that imports kernels; the rooms of `engines` are made of them."""

MOST_FILES, MOST_LINES, FEWEST_LINES = 9, 600, 20  # named steps take lines
SHORT = {
    "core/base_error.py": "the base class of all errors, which every room of core and the rooms below it may import",
    "version.py": "the version, for all that may not import the package's face",
}
"""Files below the least number of lines, each with its reason."""

SOURCE = Path(detonation.__file__).parent
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
FOLDERS = sorted({Path(path).parent.as_posix() for path in FILES} - {"."})
MODULES = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in FILES}
FACE = "detonation/__init__.py"
INSIDE = [path for path in FILES if path != "__init__.py"]


def room(path: str) -> str:
    """The line of the table that a file belongs to."""
    stem, folder = path.removesuffix(".py"), Path(path).parent.as_posix()
    return stem if stem in HOUSE else folder


@cache
def below(name: str) -> frozenset[str]:
    """All rooms that `name` may import from; a package on a line stands for all rooms in it."""
    package = name.split("/")[0]
    found = {name, *(other for other in HOUSE if other.startswith(f"{name}/"))}
    for other in HOUSE[name][0].split():
        if other.split("/")[0] == package:
            found |= {room for room in below(other) if room.split("/")[0] == package}
        else:
            found |= {room for room in HOUSE if room == other or room.startswith(f"{other}/")}
    return frozenset(found)


@cache
def imports(path: str) -> frozenset[str]:
    """Every import of a file, anywhere in it: `module` where a module is imported, `module:name` where a name is."""
    found: set[str] = set()
    here = ["detonation", *Path(path).parent.parts]
    for node in ast.walk(ast.parse((SOURCE / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                found.add(
                    inner
                    if inner.removeprefix("detonation.") in MODULES
                    else f"{module}:{alias.name}"
                )
    return frozenset(found)


def ours(path: str) -> dict[str, str]:
    """The rooms that a file imports from, each with one import of it; the face counts as one."""
    found = {}
    for name in imports(path):
        module = name.partition(":")[0]
        if module == "detonation":
            found[FACE] = name
        elif module.startswith("detonation."):
            inner = module.removeprefix("detonation.").replace(".", "/")
            found[
                room(f"{inner}/__init__.py" if f"{inner}/__init__.py" in FILES else f"{inner}.py")
            ] = name
    return found


def test_every_folder_has_a_line_and_every_line_is_there():
    assert {*FOLDERS} <= HOUSE.keys()
    assert {name for name in HOUSE if f"{name}.py" not in FILES and name not in FOLDERS} == set()


def test_a_line_names_only_folders_above_it():
    order = list(HOUSE)
    assert all(
        order.index(other) < order.index(name) for name in HOUSE for other in HOUSE[name][0].split()
    )


def test_a_room_of_core_with_a_face_is_imported_through_it():
    """A face is an `__init__.py` that imports from its folder: others need not know the files in it."""
    dotted = {
        folder: f"detonation.{folder.replace('/', '.')}."
        for folder in FOLDERS
        if folder.startswith("core/")
    }
    faces = {
        folder: within
        for folder, within in dotted.items()
        if any(name.startswith(within) for name in imports(f"{folder}/__init__.py"))
    }
    assert {"core/agreement", "core/codec", "core/link", "core/schemes"} <= faces.keys()
    for path in INSIDE:
        files = tuple(
            within for folder, within in faces.items() if not path.startswith(f"{folder}/")
        )
        names = {name for name in imports(path) if ":" in name}
        assert {name for name in names if name.startswith(files)} == set(), path


def test_folders_import_downwards():
    for path in INSIDE:
        allowed = {*below(room(path)), *OPEN, FACE}
        assert {other: name for other, name in ours(path).items() if other not in allowed} == {}, (
            path
        )


def test_nobody_inside_imports_the_face():
    assert [path for path in INSIDE if FACE in ours(path)] == []


def test_core_imports_no_room():
    for path in INSIDE:
        if path.startswith("core/"):
            assert {name.split("/")[0] for name in ours(path)} <= {
                "core",
                "kernels",
                "choices",
                "plugins",
                "version",
            }, path


def test_the_kernels_have_one_door():
    through = {
        path
        for path in INSIDE
        if "kernels" in ours(path) and not path.startswith(("kernels/", "engines/"))
    }
    assert through == {KERNELS_THROUGH}


def test_the_network_stays_in_its_rooms():
    for path in INSIDE:
        network = {
            name for name in imports(path) if name.split(":")[0].startswith("torch.distributed")
        }
        may = HOUSE[room(path)][1]
        unwrapping = {name for name in network if name.split(":")[0] == "torch.distributed.tensor"}
        assert network <= {NONE: set(), DTENSOR: unwrapping, ANY: network}[may], path


def test_core_needs_torch_alone():
    for path in FILES:
        if path.startswith("core/"):
            others = {name.split(":")[0].split(".")[0] for name in imports(path)} - set(
                sys.stdlib_module_names
            )
            assert others <= {"torch", "detonation"}, path


def test_no_star_imports():
    assert not [path for path in FILES for name in imports(path) if name.endswith(":*")]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_holds_few_files_and_says_what_is_in_it(folder):
    assert (
        len([path for path in SOURCE.joinpath(folder).glob("*.py") if path.stem != "__init__"])
        <= MOST_FILES
    )
    said = ast.get_docstring(ast.parse(SOURCE.joinpath(folder, "__init__.py").read_text())) or ""
    assert len(said) >= 40 and "TODO" not in said


def test_a_file_is_neither_long_nor_short():
    for path in INSIDE:
        lines = len((SOURCE / path).read_text().splitlines())
        assert lines <= MOST_LINES, path
        if Path(path).stem != "__init__":
            assert (lines < FEWEST_LINES) == (path in SHORT), path


def test_each_name_occurs_once():
    """Public classes, functions, constants and files, but for `main` and the type variable `T`."""
    names = [Path(path).stem for path in FILES if Path(path).stem != "__init__"]
    assert sorted({f"{name}.py" for name in names if names.count(name) > 1}) == []
    where: dict[str, list[str]] = {}
    for path in INSIDE:
        for node in ast.parse((SOURCE / path).read_text()).body:
            for name in defined(node):
                if not name.startswith("_") and name not in {"T", "main"}:
                    where.setdefault(name, []).append(path)
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module defines; an overload defines none."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        if "overload" in map(ast.unparse, node.decorator_list):
            return []
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []


def test_importing_the_package_does_not_import_torch():
    check = "import detonation, sys; assert 'torch' not in sys.modules; detonation.demo; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_every_public_name_is_there():
    assert all(getattr(detonation, name) is not None for name in detonation.__all__)
    with pytest.raises(AttributeError, match=r"'demi': import schemes from detonation.schemes$"):
        _ = detonation.demi


def test_names_of_the_package_0_5_point_to_the_page_about_it():
    names = "prepare_detonation Optimizers DeToSGD DeToAdamW DeMoReplicator FullReplicator"
    names += " NoReplicator RandomReplicator StridingReplicator SlicingReplicator"
    for name in names.split():
        page = "docs/tutorials/from-detonation-0.5.md"
        with pytest.raises(ImportError, match=rf"^{name} belongs to the package .*: {page} says"):
            exec(f"from detonation import {name}")
        assert name in (SOURCE.parents[1] / page).read_text()


def test_every_scheme_is_in_its_face():
    assert {*detonation.schemes.__all__} == {"Scheme", *SCHEMES}
    assert all(getattr(detonation, name, SCHEMES[name]) is SCHEMES[name] for name in SCHEMES)


def test_every_public_name_has_an_example_that_runs():
    """pytest runs the doctests of the package, so an example is one."""
    named = {name: getattr(detonation, name) for name in detonation.__all__}
    named |= {name: getattr(detonation.schemes, name) for name in detonation.schemes.__all__}
    things = {
        name: thing for name, thing in named.items() if isinstance(thing, type) or callable(thing)
    }
    assert things.keys() == named.keys() - {"__version__", "errors", "schemes"}
    assert [name for name, thing in things.items() if ">>> " not in (thing.__doc__ or "")] == []


def test_every_error_of_the_library_is_public_and_has_one_base():
    """Of core and checkpoint, which users of the library call; the command line shows its own errors itself."""
    found = {
        node.name
        for path in FILES
        if path.startswith(("core/", "checkpoint/"))
        for node in ast.walk(ast.parse((SOURCE / path).read_text()))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    }
    assert {
        "Mismatch",
        "LargerThanDense",
        "Desync",
        "OverlapError",
        "NonFiniteGradient",
        "BadPeer",
    } < found
    assert found <= {*detonation.errors.__all__}
    for name in found:
        base, builtin, *_ = getattr(detonation.errors, name).__mro__[1:]
        named = (base, builtin.__module__) == (detonation.errors.DetonationError, "builtins")
        assert name == "DetonationError" or named


def test_without_the_extras_the_command_line_says_which_one_is_missing():
    hide = "import sys; sys.modules['tyro'] = None; from detonation.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: the command line needs tyro: pip install '.[train]' in a clone\n"
