"""Figures of the package's shape, read from its source: names, docstrings, files and functions.

    python benchmarks/house.py [--check]

Prints one line per figure and the places that miss its goal; `--check` exits 1 where one does. Imports no torch.
"""

import argparse
import ast
import io
import re
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef


@dataclass
class Module:
    """One parsed file. comments: by line number. public: names that are defined at the top, without underscore."""

    path: Path
    comments: dict[int, str] = field(default_factory=dict)
    public: dict[str, ast.stmt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        text = (SOURCE / self.path).read_text(encoding="utf-8")
        self.tree, self.lines = ast.parse(text), len(text.splitlines())
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.comments = {
            token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT
        }
        self.functions = [node for node in ast.walk(self.tree) if isinstance(node, Function)]
        self.public = {
            name: node
            for node in self.tree.body
            for name in defined(node)
            if not name.startswith("_")
        }

    def place(self, node: ast.stmt) -> str:
        return f"{self.path}:{node.lineno}"

    def docstrings(self) -> Iterator[tuple[ast.stmt, str]]:
        """Of modules, classes, functions and constants: every statement that is a string."""
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node, node.value.value


def defined(node: ast.stmt) -> list[str]:
    """Names that a statement at the top of a module defines; type variables are left out."""
    if isinstance(node, Documented):
        return [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    if (
        targets
        and node.value is not None
        and re.match(r"(TypeVar|ParamSpec)\(", ast.unparse(node.value))
    ):
        return []
    names = [
        name
        for target in targets
        for name in (target.elts if isinstance(target, ast.Tuple) else [target])
    ]
    return [name.id for name in names if isinstance(name, ast.Name)]


def exported(modules: dict[str, Module]) -> dict[str, tuple[str, bool]]:
    """Classes and functions of `detonation.__all__`: the place of each, and whether its docstring has an example."""
    import detonation

    face = [
        node for node in ast.walk(modules["detonation"].tree) if isinstance(node, ast.ImportFrom)
    ]
    home = {alias.asname or alias.name: node.module for node in face for alias in node.names}
    found = {}
    for name in set(detonation.__all__) - {"__version__", "errors", "schemes"}:
        places = [(path, module) for path, module in modules.items() if name in module.public]
        if not places:
            found[name] = (f"{name} is not defined", False)
            continue
        module = next((module for path, module in places if path == home.get(name)), places[0][1])
        node = module.public[name]
        example = isinstance(node, Documented) and "Example" in (ast.get_docstring(node) or "")
        found[name] = (f"{module.place(node)} {name}", example)
    return dict(sorted(found.items()))


def twice(places: dict[str, list[str]]) -> list[str]:
    return [
        f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1
    ]


def parsed() -> dict[str, Module]:
    """Every module of the package by its dotted name."""
    paths = sorted(path.relative_to(SOURCE) for path in (SOURCE / "detonation").rglob("*.py"))
    return {
        ".".join(path.with_suffix("").parts).removesuffix(".__init__"): Module(path)
        for path in paths
    }


def names(modules: dict[str, Module]) -> Iterator[tuple[str, object, bool, list[str]]]:
    """Figures of names and docstrings: what is counted, the number, whether it meets its goal, and the places."""
    public = exported(modules)
    without = [place for place, example in public.values() if not example]
    yield "public names with an Example", percent(len(without), len(public)), not without, without
    defining, files = defaultdict(list), defaultdict(list)
    for module in modules.values():
        for name, node in module.public.items():
            defining[name].append(module.place(node))
        if not module.path.stem.startswith("__"):
            files[module.path.stem].append(str(module.path))
    for kind, places in (("public names", defining), ("file names", files)):
        found = twice(places)
        yield f"{kind} that occur twice", len(found), not found, found
    texts = [(m.place(node), text) for m in modules.values() for node, text in m.docstrings()]
    vague = [
        f"{place} {text[:60]!r}"
        for place, text in texts
        if re.match(r"\s*(What|Those|Whether)\b", text)
    ]
    yield (
        f"docstrings, of {len(texts)}, that begin with What, Those or Whether",
        len(vague),
        not vague,
        vague,
    )


def sizes(modules: dict[str, Module]) -> Iterator[tuple[str, object, bool, list[str]]]:
    """Figures of folders, files and functions, in the same form."""
    files = [module for module in modules.values() if module.path.stem != "__init__"]
    folders: dict[Path, int] = defaultdict(int)
    for module in files:
        folders[module.path.parent] += 1
    full = [f"{folder}: {count}" for folder, count in folders.items() if count > 9]
    counts = f"{statistics.median(folders.values()):g} (median), {max(folders.values())} (most)"
    yield f"files per folder, of {len(folders)} folders", counts, not full, full
    large = [f"{module.path}: {module.lines}" for module in files if module.lines > 300]
    yield f"files over 300 lines, of {len(files)}", len(large), not large, large
    small = [f"{module.path}: {module.lines}" for module in files if module.lines < 20]
    yield "files under 20 lines", len(small), True, small
    lengths = [
        ((f.end_lineno or f.lineno) - f.lineno + 1, f"{m.place(f)} {f.name}")
        for m in files
        for f in m.functions
    ]
    long = [f"{place}: {length}" for length, place in sorted(lengths, reverse=True) if length > 50]
    yield f"functions over 50 lines, of {len(lengths)}", len(long), True, long
    yield (
        "90th percentile of function length",
        statistics.quantiles([n for n, _ in lengths], n=10)[-1],
        True,
        [],
    )
    comments, lines = (
        sum(each) for each in ((len(m.comments) for m in files), (m.lines for m in files))
    )
    yield "comments per 100 lines", f"{100 * comments / lines:.1f}", True, []


def percent(missing: int, count: int) -> str:
    return f"{100 * (count - missing) / max(1, count):.1f} % of {count}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    check = parser.parse_args().check
    sys.path.insert(0, str(SOURCE))
    modules, missed = parsed(), 0
    for label, figure, met, places in (*names(modules), *sizes(modules)):
        missed += not met
        print(f"{'     ' if met else 'MISS '}{label}: {figure}")
        for place in places:
            print(f"         {place}")
    return int(check and missed > 0)


if __name__ == "__main__":
    sys.exit(main())
