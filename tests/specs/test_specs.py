"""Every scheme against its specification, bit for bit, under every option that it has."""

import ast
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import detonation as dt
import worlds
from detonation.cluster.network.simulated import simulate_replicas
from detonation.extend import AGGREGATIONS, PRECISIONS, SCHEMES
from specs import bases, gradients, page, rounds

STEPS = 7
SHAPES = {"0.weight": (40, 33), "0.bias": (33,), "1.weight": (5, 9), "1.bias": (3,)}
"""A matrix that fills tiles and one that does not; no size is a multiple of a chunk."""
BASES = {
    "sgd": (bases.sgd, partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "sign": (bases.sign_sgd, partial(dt.SignSGD, lr=0.01, weight_decay=0.1)),
    "adamw": (bases.adamw, partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)),
    "muon": (bases.of(partial(dt.Muon, lr=0.02)), partial(dt.Muon, lr=0.02)),
}
"""Each base optimizer as the specification and as the product has it."""


@dataclass(frozen=True)
class Case:
    """A row of the table: one scheme with some of its options.

    Args:
        carried: The link that `auto` chooses; the option or the specification's default else.
        quiet: The first replicas, as many as this, have gradients of zeros.
    """

    scheme: str
    options: dict[str, Any] = field(default_factory=dict)
    replicas: int = 2
    base: str = "sgd"
    carried: str | None = None
    quiet: int = 0

    def __str__(self) -> str:
        given = ",".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.scheme}-{given}-{self.replicas}-{self.base}-{self.quiet}"


def of_each(scheme: str, option: str, values: list[Any], **others: Any) -> list[Case]:
    """One case for each value of an option."""
    return [Case(scheme, {option: value, **others}) for value in values]


CODES = ["int8", "4bit", "2bit", "sign"]
GATHERED = "all-gather"

CASES = [
    Case("none", base="adamw"),
    Case("full", base="adamw"),
    Case("full", replicas=3),
    Case("full", {"precision": "bf16"}, 3),
    *[Case("full", {"precision": each}, carried=GATHERED) for each in CODES],
    *[Case("full", {"precision": each}, 3, carried="owner") for each in ["4bit", "2bit"]],
    *of_each("loco", "precision", CODES),
    Case("loco", {"precision": "bf16"}, 3, carried="all-reduce"),
    Case("loco", {"decay": 0.9, "link": "owner"}, 3),
    Case("loco", base="adamw"),
    Case("loco", {"link": "all-gather"}, 3),
    Case("loco", {"precision": "bf16", "link": "all-reduce"}),
    Case("demo"),
    Case("demo", base="sign"),
    Case("demo", {"topk": 3, "chunk": 16}, 3, "adamw"),
    Case("demo", {"topk": 9, "chunk": 16, "decay": 0.9}),
    Case("demo", {"topk": 3, "chunk": 10, "alpha": 0.2}, 3),
    Case("demo", {"topk": 4, "chunk": 100, "alpha": 0.0}),
    Case("demo", {"topk": 6, "chunk": 8, "tiles": True}),
    Case("demo", {"topk": 6, "chunk": 8, "tiles": True, "precision": "sign", "link": "owner"}, 3),
    Case("demo", {"precision": "fp32", "error_feedback": False}),
    *of_each("decoupled_adamw", "precision", ["bf16", *CODES], topk=3, chunk=16),
    *[
        Case("decoupled_adamw", {"aggregate": each, "chunk": 32}, 3, "adamw")
        for each in AGGREGATIONS
    ],
    Case("decoupled_adamw", {"link": "all-gather"}, 3, "adamw"),
    *of_each("demo", "precision", ["bf16", *CODES], topk=4, chunk=16),
    *of_each("demo", "precision", CODES, topk=4, chunk=16, error_feedback=False),
    *[Case("demo", {"aggregate": each, "topk": 5, "chunk": 32}, 3) for each in AGGREGATIONS],
    *[Case("demo", {"aggregate": "clipped_mean", "decay": 0.0}, 4, quiet=n) for n in (1, 2, 4)],
    Case("demo", {"link": "all-gather"}, 3),
    Case("demo", {"link": "owner"}, 2),
    Case("demo", {"link": "owner", "topk": 2, "precision": "4bit"}, 3),
    Case("demo", {"link": "owner", "topk": 4, "chunk": 16, "aggregate": "rescaled_mean"}, 3),
    Case("decoupled_adamw", base="adamw"),
    Case("decoupled_adamw", {"topk": 5, "chunk": 16, "decay": 0.9, "alpha": 0.5}, 3, "adamw"),
    Case("decoupled_adamw", {"topk": 5, "chunk": 8, "tiles": True, "link": "owner"}, 3, "adamw"),
    Case(
        "decoupled_adamw",
        {"precision": "sign", "error_feedback": False, "aggregate": "mean_nonzero"},
        base="adamw",
    ),
    Case("random"),
    Case("random", {"rate": 0.3, "decay": 0.9, "alpha": 0.2}, 3, "adamw"),
    Case("random", {"rate": 1.0, "decay": 0.5}),
    Case("random", {"rate": 1 / 4, "precision": "bf16"}, 3),
    *[Case("random", {"rate": 1 / 4, "precision": each}, carried=GATHERED) for each in CODES],
    Case("random", {"rate": 1 / 4, "precision": "2bit", "error_feedback": False}, carried=GATHERED),
    *[
        Case("random", {"rate": 1 / 4, "aggregate": each, "link": GATHERED}, 3)
        for each in AGGREGATIONS
    ],
    Case("random", {"link": "all-gather", "rate": 1 / 2}, 3),
    Case("random", {"link": "owner", "rate": 1 / 2}, 3),
    Case("random", {"link": "owner", "rate": 1 / 2, "precision": "2bit"}, 3),
    Case("random", {"link": "all-reduce", "precision": "bf16"}),
    Case("random_sign", base="sign"),
    Case("random_sign", {"rate": 1 / 2, "decay": 0.5, "alpha": 0.5}, 3, carried=GATHERED),
    Case("random_sign", {"error_feedback": True, "cycle": True, "link": "all-gather"}, 3),
    Case("random_sign", {"cycle": True}, base="sign"),
    Case("random_sign", {"link": "owner", "rate": 1 / 2, "error_feedback": True}, 3),
    Case("striding"),
    Case("striding", {"rate": 0.3, "decay": 0.9, "alpha": 0.2}, 3, "adamw"),
    Case("striding", {"rate": 1 / 4, "precision": "bf16"}, 3),
    *[Case("striding", {"rate": 1 / 4, "precision": each}, carried=GATHERED) for each in CODES],
    Case(
        "striding",
        {"rate": 1 / 4, "precision": "sign", "error_feedback": False},
        3,
        "sign",
        GATHERED,
    ),
    *[
        Case("striding", {"rate": 1 / 4, "aggregate": each, "link": GATHERED}, 3)
        for each in AGGREGATIONS
    ],
    Case("striding", {"link": "all-reduce"}),
    Case("striding", {"link": "owner", "rate": 1 / 2, "precision": "int8"}, 3),
    Case("diloco", {"every": 2}, base="adamw"),
    Case("diloco", {"every": 3, "outer_lr": 1.0, "outer_momentum": 0.9}, 3),
    Case("diloco", {"every": 2, "nesterov": False}),
    Case("diloco", {"every": 2, "outer_momentum": 0.0}),
    Case("diloco", {"every": 1, "precision": "bf16"}, 3),
    *[Case("diloco", {"every": 2, "precision": each}, carried=GATHERED) for each in CODES],
    Case("diloco", {"every": 2, "precision": "4bit"}, 3, carried="owner"),
    Case("local_sgd", {"every": 2}, base="adamw"),
    *[Case("local_sgd", {"every": 2, "precision": each}, carried=GATHERED) for each in CODES],
    Case("local_sgd", {"every": 3, "precision": "bf16"}, 3),
    *of_each("muloco", "precision", CODES, every=2, decay=0.9),
    Case("muloco", {"every": 2}, base="muon"),
    Case("muloco", {"every": 2, "precision": "fp32"}, base="muon", carried="all-reduce"),
    Case("muloco", {"every": 3, "precision": "bf16", "link": "all-reduce"}, 3),
    Case("muloco", {"every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "link": "owner"}, 3),
    *[
        Case("muloco", {"every": 2, "precision": "int8", "aggregate": each, "link": GATHERED}, 3)
        for each in AGGREGATIONS
    ],
    Case("sparta"),
    Case("sparta", {"rate": 1 / 4}, base="adamw"),
    Case("sparta", {"rate": 1.0}, 3),
    Case("sparta", {"rate": 1 / 4, "precision": "bf16"}, 3),
    *[Case("sparta", {"rate": 1 / 4, "precision": each}, carried=GATHERED) for each in CODES],
    *of_each("sparseloco", "precision", [*PRECISIONS], every=2, topk=5, chunk=64),
    Case("sparseloco", {"every": 2, "topk": 3, "chunk": 32, "decay": 0.5, "outer_lr": 0.7}, 3),
    *[
        Case("sparseloco", {"every": 2, "topk": 5, "chunk": 64, "aggregate": each}, 3)
        for each in AGGREGATIONS
    ],
    Case(
        "sparseloco", {"every": 2, "topk": 4, "chunk": 64, "aggregate": "mean", "link": "owner"}, 3
    ),
    Case("sparseloco", {"every": 3, "chunk": 512, "link": "all-gather"}, base="adamw"),
    Case("streaming_diloco", {"every": 4, "delay": 1}),
    Case(
        "streaming_diloco",
        {"every": 4, "delay": 2, "precision": "fp32"},
        3,
        "adamw",
        "all-reduce",
    ),
    Case("streaming_diloco", {"every": 4, "fragments": 2, "delay": 3, "keep": 0.5}, base="adamw"),
    Case("streaming_diloco", {"every": 3, "fragments": 2, "delay": 0, "keep": 1.0}),
    Case(
        "streaming_diloco",
        {"every": 2, "fragments": 2, "delay": 1, "unit": "block"},
    ),
    Case(
        "streaming_diloco",
        {"every": 2, "fragments": 1, "delay": 0, "outer_lr": 1.0, "outer_momentum": 0.0},
    ),
    *of_each("streaming_diloco", "precision", CODES, every=2, fragments=2, delay=1),
    Case(
        "streaming_diloco",
        {"every": 2, "fragments": 2, "delay": 1, "precision": "bf16", "link": "all-reduce"},
        3,
    ),
    Case("streaming_diloco", {"every": 2, "fragments": 2, "delay": 1, "link": "owner"}, 3),
    Case("streaming_diloco", {"every": 2, "fragments": 2, "delay": 1, "link": "all-gather"}, 3),
]
"""Option x value; a scheme's every option is in some row."""


def options_of(scheme: str) -> set[str]:
    return set(inspect.signature(SCHEMES[scheme]).parameters)


OURS = [name for name, function in SCHEMES.items() if function.__module__.startswith("detonation.")]


@pytest.mark.parametrize("scheme", OURS)
def test_every_option_of_a_scheme_is_in_a_row_of_the_table(scheme):
    assert scheme in SPECIFICATIONS, "write its specification in tests/specs"
    rows = [case.options for case in CASES if case.scheme == scheme]
    assert rows
    assert options_of(scheme) - {option for options in rows for option in options} == set()


VALUES = {
    "precision": set(PRECISIONS),
    "aggregate": set(AGGREGATIONS),
    "link": {"all-reduce", "all-gather", "owner"},
    "tiles": {True},
    "error_feedback": {False, True},
    "cycle": {True},
    "nesterov": {False},
    "unit": {"block"},
}
"""The values of options with few of them; a default is in every row that leaves the option out."""
IMPOSSIBLE = {("loco", "precision", "fp32")} | {
    (name, "link", "all-reduce")
    for name in ("random_sign", "demo", "decoupled_adamw", "sparseloco")
}
"""What schemes refuse: votes and selections of their own cannot be added by the network."""


@pytest.mark.parametrize("scheme", OURS)
def test_every_value_of_an_option_is_in_a_row_of_the_table(scheme):
    defaults = inspect.signature(SCHEMES[scheme]).parameters
    for option in options_of(scheme) & VALUES.keys():
        rows = [case for case in CASES if case.scheme == scheme]
        held = {case.options.get(option, defaults[option].default) for case in rows}
        if option == "link":
            default = LINKS.get(scheme, GATHERED)
            held = {case.options.get("link", case.carried or default) for case in rows}
        missing = {
            each for each in VALUES[option] - held if (scheme, option, each) not in IMPOSSIBLE
        }
        assert missing == set(), f"no row has {option} of {scheme} at {sorted(missing, key=str)}"


@lru_cache
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@lru_cache
def given(replicas: int, quiet: int = 0) -> list[list[dict[str, Tensor]]]:
    """Gradients by step, replica and name; some coordinates never have one."""
    generator = torch.Generator().manual_seed(1)

    def one() -> dict[str, Tensor]:
        found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        found["0.weight"][3:5] = 0
        return found

    found = [[one() for _ in range(replicas)] for _ in range(STEPS)]
    for of_replicas in found:
        for gradients_of_one in of_replicas[:quiet]:
            for gradient in gradients_of_one.values():
                gradient.zero_()
    return found


class Given(nn.Module):
    """A model of the given weights."""

    def __init__(self) -> None:
        super().__init__()
        for name, weight in weights().items():
            number, kind = name.split(".")
            if number not in dict(self.named_children()):
                self.add_module(number, nn.Module())
            self.get_submodule(number).register_parameter(kind, nn.Parameter(weight.clone()))


def trained(axis: Any, replica: int, replicas: int, case: Case) -> dict[str, Tensor]:
    """The weights of one replica, from the product."""
    model = Given()
    base = BASES[case.base][1](model.parameters())
    scheme = SCHEMES[case.scheme](**case.options)
    optimizer = dt.replicate(base, model, axis, scheme, kernels=False)
    for of_replicas in given(replicas, case.quiet):
        for name, parameter in model.named_parameters():
            parameter.grad = of_replicas[replica][name].clone()
        optimizer.step()
    if scheme.signal == "gradients":
        optimizer.synchronize()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def specified(case: Case) -> list[dict[str, Tensor]]:
    """The weights of each replica, from the specification."""
    function = SPECIFICATIONS[case.scheme]
    options = {key: value for key, value in case.options.items() if value != "auto"}
    if case.carried:
        options["link"] = case.carried
    gradients_of_all = given(case.replicas, case.quiet)
    found = function(weights(), gradients_of_all, BASES[case.base][0], **options)
    return found if isinstance(found, list) else [found] * case.replicas


SPECIFICATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        gradients.none,
        gradients.full,
        gradients.loco,
        gradients.demo,
        gradients.decoupled_adamw,
        gradients.random,
        gradients.random_sign,
        gradients.striding,
        rounds.diloco,
        rounds.local_sgd,
        rounds.streaming_diloco,
        rounds.muloco,
        rounds.sparta,
        rounds.sparseloco,
    )
}


LINKS = {
    name: inspect.signature(function).parameters["link"].default
    for name, function in SPECIFICATIONS.items()
    if "link" in inspect.signature(function).parameters
}
"""The collective that each specification has by default."""


@pytest.mark.parametrize("scheme", OURS)
def test_the_product_has_the_defaults_of_its_specification(scheme):
    """Of each option of both but the link, which the product chooses by bytes."""
    product = inspect.signature(SCHEMES[scheme]).parameters
    page = inspect.signature(SPECIFICATIONS[scheme]).parameters
    shared = (product.keys() & page.keys()) - {"link"}
    assert {name: product[name].default for name in shared} == {
        name: page[name].default for name in shared
    }


def differences(case: Case, found: list[dict[str, Tensor]]) -> list[str]:
    expected = specified(case)
    return [
        f"replica {replica}, {name}: {int((mine[name] != tensor).sum())} of {tensor.numel()},"
        f" by {float((mine[name] - tensor).abs().max()):g}"
        for replica, (mine, theirs) in enumerate(zip(found, expected, strict=True))
        for name, tensor in theirs.items()
        if not torch.equal(mine[name], tensor)
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_product_is_its_specification_bit_for_bit(case):
    found = simulate_replicas(
        lambda end: trained(end, end.replica, case.replicas, case), case.replicas
    )
    assert differences(case, found) == []


IN_WORLDS = [
    Case("full", base="adamw"),
    Case("full", {"precision": "4bit"}, 3, carried="owner"),
    Case("demo", {"topk": 3, "chunk": 16, "precision": "sign", "error_feedback": False}, 3, "sign"),
    Case("random", {"link": "owner", "rate": 1 / 2, "precision": "2bit"}, 3),
    Case("diloco", {"every": 2}, base="adamw"),
    Case("sparseloco", {"every": 2, "topk": 5, "chunk": 64}, 3),
]
"""Each collective; an all-reduce of two, as a network adds three in an order of its own."""


def trained_in_a_world(mesh: Any, case: Case) -> dict[str, list[Any]]:
    found = trained(mesh["replicate"], mesh.get_local_rank("replicate"), case.replicas, case)
    return {name: weight.tolist() for name, weight in found.items()}


@pytest.mark.usefixtures("lasting_worlds")
@pytest.mark.parametrize("case", IN_WORLDS, ids=str)
def test_real_replicas_are_their_specification_bit_for_bit(case):
    lists = worlds.run(trained_in_a_world, case.replicas, 1, case)
    found = [{name: torch.tensor(values) for name, values in each.items()} for each in lists]
    assert differences(case, found) == []


FOLDER = Path(__file__).parent
MOST_LINES = 30


@pytest.mark.parametrize("path", sorted(FOLDER.glob("[!t]*.py")), ids=lambda path: path.name)
def test_a_specification_is_short_and_imports_nothing_of_the_product(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *[each.name for each in node.names]]
            assert not any(name.split(".")[0] == "detonation" for name in names)
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1
            assert lines <= MOST_LINES, f"{node.name} has {lines} lines"


def test_the_page_of_algorithms_shows_the_specifications_as_they_are():
    assert page.PAGE.read_text() == page.page(), "run: python tests/specs/page.py"
    assert {*SPECIFICATIONS, "momentum", "outer_sgd", "Outer"} <= page.names()
