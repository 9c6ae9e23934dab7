"""The ruler of the source: density, complexity, width and imports of `src/`, from its syntax alone.

    .venv/bin/python tests/ruler.py

prints each measure with its ceiling, and the functions and modules that decide the measure.
`layers/test_ruler.py` fails where a measure is above its ceiling.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "detonation"
PACKAGE = "detonation"
KERNELS = "kernels/gpu/"
"""The folder of what Triton compiles: its functions are one long block by nature."""

MOST_COLUMNS = 100
MOST_COGNITIVE = 15

CEILINGS: dict[str, float] = {
    # hooks, overflows, late padding rows and replaced parameters are exact or refused; a fault of
    # set-up on one machine is told to all; decisions of the membership are pure functions; texts of
    # strangers are parsed within bounds, and a full disk ends no elastic run; several stores keep the
    # keys of a run, a step keeps its examples, one rank of a node computes a matrix of Muon, and
    # late gradients do not keep others waiting; a newcomer's group is made while others train, a
    # program that is no store is told from one, plain torch sorts in a network of its own, and
    # kernels find what is not finite as they encode (core: Muon, late gradients, the network); codes
    # are encoded block by block, a step on an accelerator makes 65 calls of Python for 262,
    # replicas and ranks that meet nobody say why, strangers' connections to gloo are dropped, a
    # newcomer whose state cannot come is postponed, its shards keep one pace, and a run that was
    # killed has a page, small messages wait for one latency also on an elastic axis and in plans,
    # and optimizers refuse what no step could use, and register a self-test (core: codes, calls);
    # groups are compared, a log belongs to a run, one checkpoint is loaded by its path, frozen weights are
    # compared, a follower waits for its trainer, and each message names its object and a remedy;
    # `plan` compares with a baseline that has two learning rates, and recipes can have them; what a step
    # on kernels needs is made once, and found without a call (core: derived, kept runs); sums of tensor
    # parallelism, late updates of empty shards and shared units of FSDP2 (core);
    # codes are looked up in pairs, and leave the memory as a kernel writes them (core too);
    # a run and a plan name both learning rates, and `plan` carries the cost of rounds by a law;
    # unused parameters of shards without rows are those of their neighbours (core);
    # a load names options that it replaced, Muon refuses misspelt keys, complex matrices and late bad
    # values, `shard` refuses what is no policy, and names of the package 0.5 point to their page;
    # a replay knows the order of what came between two steps, and weights that no replicated
    # optimizer trains are compared and logged (core: counts of completions, this comparison);
    # shards of a node are compared and mended one by one, one step applies an update to all parts (core), a log
    # that another replica has taken over is whole, a first step without gradients is told, and
    # `check_scheme` checks the contracts of a scheme's parts; a replica joins with what the loop wrote (core), and
    # records of a run are on the disk before a checkpoint; the state that is saved after a loss that is not finite
    # is whole, a validation survives a loss, and streams, epochs and logs are told apart over resumes; the answer
    # whether a replica joins now is given in one place; an exported classifier names its classes and its pictures,
    # generates as its base does and pads as its texts, folders of images are read whole or refused by name, logs of
    # shards are replayed to one end, and a step without another shard names the loss (core: one hook of an axis);
    # a follower tells that it waits, and a rank that is busy ends with the reason of a refused start; rounds of
    # levels that do not fit, other sizes of levels in a load, a second optimizer and labels that nobody shifts
    # are refused by name, and owners of a level load into other shards (core: which levels fit, their sizes);
    # streams have the texts of their files and tell other files, texts that are no text and data that differ are
    # named, a state that leads to NaN is no checkpoint, JSON is strict, a loss at a save fails the save alone, and
    # ranks of a node that use different parameters are refused (core: this comparison)
    "tokens of src": 355_800,
    "tokens of core": 95_250,
    "tokens per line of code": 9.0,
    "nodes per statement": 7.9,
    "packed assignments per 1,000 statements": 0.9,
    "conditional expressions per 1,000 statements": 2.9,
    "lines over 100 columns": 0,
    "cognitive complexity of src": 8_820,  # for the same reasons
    "functions of core over cognitive 15": 0,
    "functions of src over cognitive 15, without kernels": 0,
    "own modules that one module imports, at most": 15,
    "modules that core names in strings": 0,
    "hasattr and getattr in core": 17,
    "names of elastic in core": 18,  # a replica joins before a step, and at no other call
    "names of tape in core": 0,
    "names of balance in core": 14,
    "names of closeness in core": 12,
    "names of trained in core": 31,  # weights that no replicated optimizer trains
}
"""Each measure, at most. A ceiling falls with the measure. It may move up when a message, a diagnostic
or a plainer form needs it, with one sentence why.

Moved up on 2026-11-28, for silent wrong weights and for runs on several machines: missing gradients,
written weights, agreements by turns, partitions, interfaces, one opener for files, exact `extra` (tokens,
complexity; tape and trained, which carry what others wrote), for named steps (tokens), and for entry
points, the declared axis, the test of a transport, and seams that say what
attaches (tokens), branches in place of conditional expressions (complexity), and, for weights that were
wrong in silence, gradients with memory of their own, options of every kind, and the optimizer's state in
logs (tokens, complexity; two questions to torch's own objects)."""

FEATURES = {
    "elastic": ("link/elastic_communicator.py",),
    "tape": (),
    "balance": (),
    "closeness": (),
    "trained": ("optimizer/trained.py", "optimizer/reconfigure.py"),
}
"""Features that attach to core at a seam, each with the files of core that are about the feature."""

_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.COMMENT,
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_NAME = re.compile(rf"{PACKAGE}(\.\w+)+(:\w+)?")


class Module(NamedTuple):
    """A source file: its path below the package, its text and its syntax."""

    path: str
    text: str
    tree: ast.Module

    @property
    def in_core(self) -> bool:
        return self.path.startswith("core/")

    def tokens(self) -> Iterator[tokenize.TokenInfo]:
        """All tokens but comments and layout."""
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _LAYOUT:
                yield token


class Function(NamedTuple):
    """A function, and how hard its flow is to follow."""

    path: str
    name: str
    line: int
    cognitive: int


@cache
def modules() -> tuple[Module, ...]:
    """All modules of the package, in the order of their paths."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text()
        found.append(Module(path.relative_to(SOURCE).as_posix(), text, ast.parse(text)))
    return tuple(found)


@cache
def functions() -> tuple[Function, ...]:
    """All functions of the package, the most complex first."""
    found = [
        Function(module.path, node.name, node.lineno, cognitive(node))
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, _FUNCTIONS)
    ]
    return tuple(sorted(found, key=lambda function: -function.cognitive))


@cache
def measures() -> dict[str, float]:
    """The measures of `CEILINGS` as they are."""
    core = [module for module in modules() if module.in_core]
    hard = [function for function in functions() if function.cognitive > MOST_COGNITIVE]
    found = {
        "tokens of src": sum(map(_tokens, modules())),
        "tokens of core": sum(map(_tokens, core)),
        **_density(modules()),
        "lines over 100 columns": sum(map(_wide_lines, modules())),
        "cognitive complexity of src": sum(function.cognitive for function in functions()),
        "functions of core over cognitive 15": sum(f.path.startswith("core/") for f in hard),
        "functions of src over cognitive 15, without kernels": sum(
            not f.path.startswith(KERNELS) for f in hard
        ),
        "own modules that one module imports, at most": max(len(own_imports(m)) for m in modules()),
        "modules that core names in strings": sum(map(_named_modules, core)),
        "hasattr and getattr in core": sum(map(_questions, core)),
    }
    for feature, rooms in FEATURES.items():
        outside = [m for m in core if m.path.removeprefix("core/") not in rooms]
        found[f"names of {feature} in core"] = sum(_mentions(m, feature) for m in outside)
    return found


def cognitive(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Cognitive complexity (SonarSource): each break in the flow counts one, and one more for each
    level of nesting. Conditional expressions and conditions of comprehensions count, too."""
    return sum(_cost(statement, 0) for statement in function.body)


def own_imports(module: Module) -> set[str]:
    """The modules of this package that a module imports, anywhere in it."""
    parts = [PACKAGE, *module.path.removesuffix(".py").split("/")]
    folder = parts[:-1]
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = folder[: len(folder) - node.level + 1] if node.level else []
            found.add(".".join([*above, *([node.module] if node.module else [])]))
    return {name for name in found if name.split(".")[0] == PACKAGE}


def _cost(node: ast.AST, depth: int) -> int:
    if isinstance(node, ast.If):
        return _cost_of_if(node, depth)
    if isinstance(node, ast.IfExp):
        return 1 + depth + _cost_of_all(ast.iter_child_nodes(node), depth + 1)
    if isinstance(node, _LOOPS):
        inside = [*node.body, *node.orelse]
        before = [child for child in ast.iter_child_nodes(node) if child not in inside]
        return 1 + depth + _cost_of_all(before, depth) + _cost_of_all(inside, depth + 1)
    if isinstance(node, ast.ExceptHandler):
        return 1 + depth + _cost_of_all(node.body, depth + 1)
    if isinstance(node, (ast.Lambda, *_FUNCTIONS)):
        return _cost_of_all(ast.iter_child_nodes(node), depth + 1)
    own = 0
    if isinstance(node, ast.comprehension):
        own = len(node.ifs) * (1 + depth)
    elif isinstance(node, ast.BoolOp):
        own = 1
    return own + _cost_of_all(ast.iter_child_nodes(node), depth)


def _cost_of_if(node: ast.If, depth: int) -> int:
    """An `if` with its chain of `elif`, each of which costs one, and its `else`."""
    cost = 1 + depth + _cost(node.test, depth) + _cost_of_all(node.body, depth + 1)
    rest = node.orelse
    while len(rest) == 1 and isinstance(rest[0], ast.If):
        cost += 1 + _cost(rest[0].test, depth) + _cost_of_all(rest[0].body, depth + 1)
        rest = rest[0].orelse
    if rest:
        cost += 1 + _cost_of_all(rest, depth + 1)
    return cost


def _cost_of_all(nodes: Iterable[ast.AST], depth: int) -> int:
    return sum(_cost(node, depth) for node in nodes)


def _density(all_modules: Iterable[Module]) -> dict[str, float]:
    """What one line of code and one statement carry."""
    statements = nodes = packed = conditional = lines = tokens = 0
    for module in all_modules:
        lines += len(_lines_of_code(module))
        tokens += _tokens(module)
        for node in ast.walk(module.tree):
            nodes += not isinstance(node, (ast.Load, ast.Store, ast.Del, ast.alias))
            statements += isinstance(node, ast.stmt) and not _is_text(node)
            packed += isinstance(node, ast.Assign) and _is_packed(node)
            conditional += isinstance(node, ast.IfExp)
    return {
        "tokens per line of code": tokens / lines,
        "nodes per statement": nodes / statements,
        "packed assignments per 1,000 statements": 1000 * packed / statements,
        "conditional expressions per 1,000 statements": 1000 * conditional / statements,
    }


def _lines_of_code(module: Module) -> set[int]:
    """The lines with a token on them that is not part of a docstring."""
    texts: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.stmt) and _is_text(node):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found: set[int] = set()
    for token in module.tokens():
        found.update(range(token.start[0], token.end[0] + 1))
    return found - texts


def _is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _is_packed(node: ast.Assign) -> bool:
    """Whether an assignment writes several names, each from an expression of its own."""
    return isinstance(node.value, ast.Tuple) and isinstance(node.targets[0], ast.Tuple)


def _tokens(module: Module) -> int:
    return sum(1 for _ in module.tokens())


def _wide_lines(module: Module) -> int:
    return sum(len(line) > MOST_COLUMNS for line in module.text.splitlines())


def _named_modules(module: Module) -> int:
    """Strings that name a module of the package, as an import by string needs."""
    strings = (n.value for n in ast.walk(module.tree) if isinstance(n, ast.Constant))
    return sum(isinstance(value, str) and bool(_NAME.fullmatch(value)) for value in strings)


def _questions(module: Module) -> int:
    """Calls of `hasattr` and `getattr`."""
    called = [node.func for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    return sum(isinstance(f, ast.Name) and f.id in ("hasattr", "getattr") for f in called)


def _mentions(module: Module, feature: str) -> int:
    """Identifiers that name a feature; comments and strings do not count."""
    names = (token.string for token in module.tokens() if token.type == tokenize.NAME)
    return sum(feature in name.lower() for name in names)


def _show(name: str, number: float) -> str:
    return f"  {name:54} {number:>9,.10g} / {CEILINGS[name]:,}"


if __name__ == "__main__":
    for measure, is_ in measures().items():
        print(_show(measure, round(is_, 2)))
    print("functions over cognitive complexity 15:")
    for found in functions():
        if found.cognitive > MOST_COGNITIVE:
            print(f"  {found.cognitive:4} {found.path}:{found.line} {found.name}")
    print("modules that import more than 15 of their own:")
    for each in sorted(modules(), key=lambda module: -len(own_imports(module))):
        if len(own_imports(each)) > 15:
            print(f"  {len(own_imports(each)):4} {each.path}")
