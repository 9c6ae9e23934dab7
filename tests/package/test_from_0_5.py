"""What docs/tutorials/from-detonation-0.5.md says of the package detonation 0.5.2, against that package.

It has the import name of this one, so it runs in processes of its own, from a folder:

    pip install --no-deps --target FOLDER detonation==0.5.2 einops mltiming
    DETONATION_0_5=FOLDER python -m pytest tests/package/test_from_0_5.py
"""

import functools
import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from before.trained import STEPS, gradient
from torch import nn

import detonation as dt
from detonation import plugins
from detonation.cluster.network.simulated import simulate_replicas
from detonation.extend import SCHEMES
from detonation.testing import check_scheme

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorials/from-detonation-0.5.md").read_text()
SLICING = ROOT / "examples/slicing"
FOLDER = os.environ.get("DETONATION_0_5", "")
needs_0_5 = pytest.mark.skipif(
    not FOLDER, reason="DETONATION_0_5 names no folder with that package"
)
LR = 0.1
MATRIX, VECTOR, LONG = (64, 128), (64,), (4096,)
SIXTEENTH = {"compression_rate": 1 / 16}


def case(replicator, shape=MATRIX, optimizer="DeToSGD", arguments=None, **options):
    return {
        "replicator": replicator,
        "arguments": arguments or {},
        "optimizer": optimizer,
        "shape": shape,
        "options": {"lr": LR, **options},
    }


LOUD = {"detonation_sign": False}
CASES = {
    "demo": case("DeMoReplicator", **LOUD),
    "demo, flat": case("DeMoReplicator", LONG, **LOUD),
    "demo, signs": case("DeMoReplicator"),
    "demo, AdamW": case("DeMoReplicator", optimizer="DeToAdamW", **LOUD),
    "full": case("FullReplicator", **LOUD),
    "full, signs": case("FullReplicator"),
    "none": case("NoReplicator"),
    "random": case("RandomReplicator", LONG, arguments=SIXTEENTH, **LOUD),
    "striding": case("StridingReplicator", VECTOR, arguments=SIXTEENTH, **LOUD),
    "slicing": case("SlicingReplicator", VECTOR, arguments=SIXTEENTH, **LOUD),
    "every second": case("FullReplicator", replicate_every=2),
    "weight decay": case("FullReplicator", detonation_weight_decay=0.1),
}


@pytest.fixture(autouse=True)
def slicing_is_installed(tmp_path, monkeypatch):
    """The package in examples/slicing as if it were installed."""
    project = tomllib.loads((SLICING / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "detonation_slicing-1.0.dist-info"
    metadata.mkdir()
    name = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(name)
    points = project["entry-points"]["detonation.schemes"]
    lines = [f"{key} = {value}" for key, value in points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[detonation.schemes]", *lines, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(SLICING)
    forget()
    yield
    forget()


def forget():
    plugins.plugin_names.cache_clear()
    plugins.plugins.cache_clear()
    SCHEMES.pop("slicing", None)
    sys.modules.pop("slicing", None)


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """By case the weights of both replicas of 0.5.2 after each step."""
    out = tmp_path_factory.mktemp("before")
    program = Path(__file__).with_name("before") / "trained.py"
    done = subprocess.run(
        [sys.executable, "-I", program, FOLDER, out],
        input=json.dumps(CASES),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not done.returncode, done.stderr[-2000:]
    ranks = [torch.load(out / f"{rank}.pt") for rank in range(2)]
    return {name: [rank[name] for rank in ranks] for name in CASES}


def scheme_here(name):
    """The scheme that the page writes for a replicator or an optimizer of 0.5.2."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}("))
    here = row.split(" | ")[1]
    expression = re.search(r"dt\.[a-z_.]+\([^`]*\)(?=`)", here)
    return eval(expression[0], {"dt": dt})


def weights_here(scheme, shape, base):
    """Of both replicas after each step, as in `before/trained.py`."""

    def act(axis):
        model = nn.ParameterList([torch.zeros(shape)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of AdamW under a momentum
            optimizer = dt.replicate(base(model.parameters()), model, axis, scheme)
        found = []
        for step in range(STEPS):
            model[0].grad = gradient(shape, axis.replica, step)
            optimizer.step()
            found.append(model[0].detach().clone())
        return found

    return simulate_replicas(act, 2)


SGD = functools.partial(torch.optim.SGD, lr=LR)
SGD_OF_A_MOMENTUM = functools.partial(torch.optim.SGD, lr=LR**2)
SIGNS = functools.partial(dt.SignSGD, lr=LR)
ADAMW = functools.partial(torch.optim.AdamW, lr=LR, eps=1e-8 / LR)
EQUAL = [
    ("demo", "DeMoReplicator", SGD_OF_A_MOMENTUM),
    ("demo, flat", "prepare_detonation", SGD_OF_A_MOMENTUM),
    ("demo, AdamW", "DeToAdamW", ADAMW),
    ("full", "FullReplicator", SGD),
    ("full, signs", "FullReplicator", SIGNS),
    ("none", "NoReplicator", SIGNS),
]


@needs_0_5
@pytest.mark.parametrize(("name", "old", "base"), EQUAL, ids=[name for name, *_ in EQUAL])
def test_the_moves_are_the_same_within_rounding(before, name, old, base):
    found = weights_here(scheme_here(old), CASES[name]["shape"], base)
    for mine, theirs in zip(found, before[name], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@needs_0_5
def test_signs_differ_only_where_the_update_rounds_to_zero(before):
    found = weights_here(scheme_here("DeMoReplicator"), MATRIX, SIGNS)[0]
    loud = weights_here(scheme_here("DeMoReplicator"), MATRIX, SGD)[0]
    theirs, update = before["demo, signs"][0], loud[0]
    differ = (found[0] - theirs[0]).abs() > LR
    assert differ.float().mean() < 1e-3
    assert (update[differ].abs() < 1e-5).all()


def first_moves(before, name, old, shape):
    """Of the first step: theirs, and here."""
    ours = weights_here(scheme_here(old), shape, SGD_OF_A_MOMENTUM)
    return before[name][0], ours[0]


@needs_0_5
def test_random_moves_alike_where_both_send(before):
    theirs, ours = first_moves(before, "random", "RandomReplicator", LONG)
    both = (theirs[0] != 0) & (ours[0] != 0)
    assert 0 < both.sum() < 256 == (theirs[0] != 0).sum() == (ours[0] != 0).sum()
    torch.testing.assert_close(ours[0][both], theirs[0][both], rtol=1e-4, atol=1e-6)


@needs_0_5
def test_striding_moves_on_here_and_stood_still_before(before):
    theirs, ours = first_moves(before, "striding", "StridingReplicator", VECTOR)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-6)
    assert [(each != 0).sum() for each in theirs] == [4, 4, 4]
    assert [(each != 0).sum() for each in ours] == [4, 8, 12]


@needs_0_5
def test_slicing_sends_its_window_here_and_sent_zeros_before(before):
    theirs, ours = first_moves(before, "slicing", "SlicingReplicator", VECTOR)
    assert not any(each.any() for each in theirs)
    mean = torch.stack([gradient(VECTOR, replica, 0) for replica in range(2)]).mean(0)
    torch.testing.assert_close(ours[0][:4], -(LR**2) * mean[:4])
    assert [each.nonzero().max() for each in ours] == [3, 7, 11]


@needs_0_5
def test_replicas_part_between_replications_there(before):
    one, other = before["every second"]
    assert not torch.equal(one[0], other[0]) and not torch.equal(one[1], other[1])
    ours = weights_here(dt.schemes.local_sgd(every=2), MATRIX, SIGNS)
    assert not torch.equal(ours[0][0], ours[1][0]) and torch.equal(ours[0][1], ours[1][1])


@needs_0_5
def test_weight_decay_raises_there(before):
    assert before["weight decay"][0] == ["'DeToSGD' object has no attribute 'weight_decay'"]


def test_slicing_is_a_package_of_25_lines_that_keeps_the_laws():
    scheme = dt.scheme("slicing", {"rate": 1 / 4})
    check_scheme(scheme)
    check_scheme(scheme_here("SlicingReplicator"))
    assert scheme.codec.selection.period == 4
    assert len((SLICING / "slicing.py").read_text().splitlines()) <= 25


@needs_0_5
def test_the_page_has_each_name_of_the_package():
    public = re.findall(
        r'^__all__ = \["(\w+)"\]$|^class (Optimizers)',
        "\n".join(path.read_text() for path in Path(FOLDER).glob("detonation/**/*.py")),
        re.MULTILINE,
    )
    names = {one or other for one, other in public}
    assert len(names) >= 14 and [name for name in sorted(names) if name not in PAGE] == []
