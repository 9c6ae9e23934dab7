"""What is saved comes back equal in value and type, or is refused by its key."""

import enum
import json
import math
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn
from torch.optim import lr_scheduler as rates
from torch.optim.swa_utils import SWALR

import detonation as dt
import worlds
from detonation.checkpoint.files.extra_values import decoded_extra, encoded_extra
from detonation.checkpoint.files.manifest import MOST_BYTES
from detonation.checkpoint.files.reader import ShardReader
from detonation.checkpoint.files.shard_file import CorruptCheckpoint, write_shard
from detonation.cluster.network.loopback import LoopbackCommunicator

pytestmark = pytest.mark.usefixtures("lasting_worlds")


class Phase(enum.Enum):
    WARM = 1
    MAIN = "main"


class Level(enum.IntEnum):
    LOW = 1


class Parts(enum.Flag):
    HEAD = 1
    BODY = 2


class Outer:
    class Inner(enum.Enum):
        ONLY = (1, 2)


def travelled(extra):
    """`extra` after its way through a manifest."""
    table = encoded_extra(extra, MOST_BYTES)
    return decoded_extra(json.loads(json.dumps(table, allow_nan=False)))


def same(one, other):
    """Equal in value and type, all the way down; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
            *(each.resolve_conj().reshape(-1).view(torch.uint8) for each in (one, other))
        )
    if isinstance(one, np.ndarray | np.generic):
        alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        extras = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        pairs = zip(one.items(), other.items(), strict=True)
        return extras and all(same(*keys) and same(*values) for keys, values in flat(pairs))
    if isinstance(one, list | tuple | deque):
        limits = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return limits and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    signs = repr(one) == repr(other) if isinstance(one, float | complex) else True
    return one == other and signs


def flat(pairs):
    return [((key, k), (value, v)) for (key, value), (k, v) in pairs]


TENSORS = [
    torch.arange(6).view(2, 3).t(),
    torch.tensor(float("nan")),
    torch.zeros(0, 3, dtype=torch.bfloat16),
    torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
    torch.tensor([True, False]),
    torch.tensor([0.5, 1.0]).to(torch.float8_e4m3fn),
    torch.random.get_rng_state(),
]
VALUES = [
    float("inf"),
    -float("inf"),
    float("nan"),
    -0.0,
    2**63,
    -(10**5000),
    1 + 2j,
    complex("-0-infj"),
    b"\x00\xff",
    bytearray(b"x"),
    (1, (2.0, [])),
    {1, "a", None},
    frozenset({(1, 2)}),
    {1: "a", "1": "b", None: 3, (1, 2): 4},
    {"$type": "tuple", "$values": 1},
    Counter({3: 2, "x": -1}),
    OrderedDict([("b", 1), ("a", (2,))]),
    deque([1, 2], maxlen=3),
    deque([(1,)]),
    defaultdict(list, {1: [2]}),
    defaultdict(None, {"a": 1}),
    Phase.WARM,
    Phase.MAIN,
    Level.LOW,
    Parts.HEAD | Parts.BODY,
    Parts(0),
    Outer.Inner.ONLY,
    datetime(2026, 1, 2, 3, 4, 5, 6),
    datetime(2026, 1, 2, tzinfo=UTC),
    datetime(2026, 10, 25, 2, fold=1),
    datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    date(2026, 1, 2),
    time(1, 2, fold=1),
    timedelta(-1, 2, 3),
    timezone(timedelta(hours=-3)),
    Path("/a b/ü"),
    PurePosixPath("a"),
    PureWindowsPath("c:\\a"),
    torch.bfloat16,
    torch.device("cuda:1"),
    torch.Size([2, 3]),
    "\udc80",
    "",
    [],
    {},
    True,
    None,
    *TENSORS,
    np.float64(0.1),
    np.float32("nan"),
    np.int64(3),
    np.bool_(True),
    np.str_("ab"),
    np.arange(6).reshape(2, 3).T,
    np.array("2026-01-02", "M8[D]"),
    np.zeros((0, 2), "<f2"),
    np.array(["a", "bcd"]),
    np.array(1 + 1j),
    np.random.default_rng(1).bit_generator.state,
    np.random.RandomState(2).get_state(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__}")
def test_a_value_comes_back_equal_in_value_and_type(value):
    extra = {"value": value, "deep": [{"more": (value,)}]}
    back = travelled(extra)
    assert same(back, extra), back


PLAIN = some.none() | some.booleans() | some.integers() | some.text()
NUMBERS = some.floats() | some.complex_numbers() | some.fractions().map(float)
LEAVES = (
    PLAIN
    | NUMBERS
    | some.binary()
    | some.dates()
    | some.datetimes()
    | some.timedeltas()
    | some.sampled_from([*Phase, *Parts, *TENSORS, np.float32(2), np.arange(3)])
)
KEYS = some.recursive(
    PLAIN | some.floats(allow_nan=False) | some.binary(),
    lambda inner: some.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
ANY = some.recursive(
    LEAVES,
    lambda inner: some.one_of(
        some.lists(inner, max_size=4),
        some.lists(inner, max_size=4).map(tuple),
        some.dictionaries(KEYS, inner, max_size=4),
        some.dictionaries(KEYS, inner, max_size=4).map(OrderedDict),
        some.dictionaries(KEYS, inner, max_size=4).map(lambda d: defaultdict(set, d)),
        some.dictionaries(KEYS, some.integers(), max_size=4).map(Counter),
        some.sets(KEYS, max_size=4),
        some.frozensets(KEYS, max_size=4),
        some.lists(inner, max_size=4).map(lambda items: deque(items, 5)),
    ),
    max_leaves=12,
)


@given(some.dictionaries(some.text() | some.integers(), ANY, max_size=4))
def test_any_values_come_back_equal(extra):
    back = travelled(extra)
    assert same(back, extra), back


@given(
    some.recursive(PLAIN, lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner))
)
def test_plain_values_are_written_as_before(value):
    extra = {"value": value}
    if "$" not in json.dumps(extra) and not any(map(str.isdigit, json.dumps(extra))):
        assert encoded_extra(extra, MOST_BYTES) == extra


def test_an_older_table_comes_back_as_it_is():
    table = {"epoch": 3, "milestones": {"2": 1}, "odd": {"$type": "tuple", "value": [1]}}
    assert decoded_extra(table) == table


Point = namedtuple("Point", "x y")


class Own:
    pass


def local_enum():
    class Hidden(enum.Enum):
        ONE = 1

    return Hidden.ONE


CYCLE: list[object] = []
CYCLE.append(CYCLE)
REFUSED = {
    "object": (
        Own(),
        "extra['a'][2]['object'] is a value of type test_extra_values.Own, which is not saved",
    ),
    "function": (len, "is a value of type builtin_function_or_method"),
    "namedtuple": (Point(1, 2), "is Point(x=1, y=2) of type test_extra_values.Point"),
    "parameter": (nn.Parameter(torch.zeros(1)), "of type torch.nn.parameter.Parameter"),
    "gradient": (torch.zeros(1, requires_grad=True), "requires a gradient: give detach() of it"),
    "sparse": (torch.zeros(2).to_sparse(), "is a tensor of torch.sparse_coo: give a dense tensor"),
    "meta": (torch.zeros(2, device="meta"), "is a tensor without memory (meta)"),
    "objects": (np.array([Own()]), "is of numpy's type object, which is not saved"),
    "records": (np.zeros(1, [("a", "f4")]), "is of numpy's type [('a', '<f4')]"),
    "enum": (
        local_enum(),
        "is an enum that its module does not have as local_enum.<locals>.Hidden",
    ),
    "factory": (defaultdict(lambda: 1), "give dict(...) of it"),
    "key": ({Own: 1}, "the key <class 'test_extra_values.Own'> of extra['a'][2]['key'] is"),
    "cycle": (CYCLE, "extra is nested too deeply, or holds itself"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_come_back_is_refused_by_its_key(name):
    value, message = REFUSED[name]
    with pytest.raises(ValueError) as caught:
        encoded_extra({"a": [1, 2, {name: value}]}, MOST_BYTES)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_that_is_too_large_names_its_largest_part():
    with pytest.raises(ValueError, match=r"more than the 900 .* most of them under 'ema'"):
        encoded_extra({"epoch": 3, "ema": torch.zeros(1000)}, 900)


def tagged(kind, value):
    return {"$values": 1, "extra": {"x": {"$type": kind, "value": value}}}


DAMAGED = [
    tagged("tuple", 3),
    tagged("set", [[]]),
    tagged("int", "zz"),
    tagged("float", 1),
    tagged("Own", 1),
    tagged("bytes", "%"),
    tagged("torch.Tensor", ["load", [1], ""]),
    tagged("torch.Tensor", ["int8", [-1, -1], "AA=="]),
    tagged("torch.Tensor", ["int8", [2], "AA=="]),
    tagged("numpy.ndarray", ["O", [1], "AAAAAAAAAAA="]),
    tagged("numpy.ndarray", ["<f4", [1 << 62], ""]),
    tagged("enum", ["os", "environ", "PATH"]),
    tagged("enum", ["test_extra_values", "Phase", "COLD"]),
    tagged("defaultdict", ["exec", []]),
    tagged("datetime", ["x", 0]),
    tagged("timedelta", [10**12, 0, 0]),
    tagged("torch.device", "os:1"),
    tagged("deque", [-1, []]),
    tagged("torch.Size", ["a"]),
    {"$values": 2, "extra": {}},
    {"$values": 1},
    {"$values": 1, "extra": [1]},
    {"$values": 1, "extra": {"x": {"$type": "tuple", "value": [], "more": 1}}},
]


@pytest.mark.parametrize("table", DAMAGED, ids=lambda table: str(table.get("extra"))[:50])
def test_a_damaged_table_is_refused(table):
    with pytest.raises(CorruptCheckpoint):
        decoded_extra(table)


@pytest.mark.parametrize(
    "value",
    [
        {"$type": "tuple", "value": 3},
        {"$type": "enum", "value": ["os", "environ", "PATH"]},
        json.loads('{"a":' * 600 + "1" + "}" * 600),
    ],
    ids=["damaged", "no enum", "deep"],
)
def test_a_damaged_value_of_a_shard_file_is_refused(tmp_path, value):
    rest = {"boxes": {}, "wrapped": [], "on_host": [], "values": {"optimizer.w.best": value}}
    path = tmp_path / "replica0-shard0.safetensors"
    write_shard(path, {}, {**rest, "groups": []})
    with pytest.raises(CorruptCheckpoint) as caught:
        ShardReader(path)
    assert "replica0-shard0.safetensors has a value that cannot be read" in str(caught.value)


def test_a_file_makes_nobody_import_a_module():
    name = "wsgiref.simple_server"
    with patch.dict(sys.modules):
        sys.modules.pop(name, None)
        with pytest.raises(ValueError, match=r"import wsgiref\.simple_server before you load"):
            decoded_extra(tagged("enum", [name, "Kind", "ONE"]))
        assert name not in sys.modules


def warmup(step):
    return 1 / (1 + step)


class Factor:
    """A callable whose own values schedulers save."""

    def __init__(self, power):
        self.power = power

    def __call__(self, step):
        return 0.9 ** (self.power * step)


def sequence(optimizer):
    parts = [rates.LinearLR(optimizer, 0.1, 1.0, 4), rates.MultiStepLR(optimizer, [2, 3], 0.5)]
    return rates.SequentialLR(optimizer, parts, [4])


def chain(optimizer):
    parts = [rates.ConstantLR(optimizer, 0.5, 3), rates.MultiStepLR(optimizer, [6, 6, 8])]
    return rates.ChainedScheduler(parts)


SCHEDULERS = {
    "StepLR": lambda o: rates.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: rates.MultiStepLR(o, [2, 6, 6, 8], 0.1),
    "ConstantLR": lambda o: rates.ConstantLR(o, 0.5, 7),
    "LinearLR": rates.LinearLR,
    "ExponentialLR": lambda o: rates.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: rates.PolynomialLR(o, 10),
    "CosineAnnealingLR": lambda o: rates.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: rates.OneCycleLR(o, 0.1, total_steps=20),
    "CyclicLR": lambda o: rates.CyclicLR(o, 1e-3, 1e-1, 3, mode="exp_range", gamma=0.9),
    "LambdaLR": lambda o: rates.LambdaLR(o, [warmup, Factor(2)]),
    "MultiplicativeLR": lambda o: rates.MultiplicativeLR(o, [warmup, Factor(1)]),
    "SequentialLR": sequence,
    "ChainedScheduler": chain,
    "ReduceLROnPlateau": lambda o: rates.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, 0.05, anneal_epochs=8),
}


def test_every_scheduler_of_torch_is_here():
    known = {
        name
        for name, kind in vars(rates).items()
        if isinstance(kind, type) and issubclass(kind, rates.LRScheduler)
    }
    assert known - {"LRScheduler", "_LRScheduler"} == SCHEDULERS.keys() - {"SWALR"}


def scheduled(mesh, name, tensor):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [
        {"params": part.parameters(), "lr": torch.tensor(1e-2) if tensor else 1e-2}
        for part in model
    ]
    base = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.loco())
    return model, optimizer, SCHEDULERS[name](optimizer)


def trained(model, optimizer, schedule, steps):
    """The weights and rates after each of `steps`."""
    found = []
    for step in steps:
        data = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plateau = isinstance(schedule, rates.ReduceLROnPlateau)
        schedule.step(*([2.0 - min(step, 2)] if plateau else []))
        lrs = [float(group["lr"]) for group in optimizer.param_groups]
        found.append([lrs, [p.detach().flatten().tolist() for p in model.parameters()]])
    return found


def resumed(mesh, folder):
    """For each scheduler, whether a run that stops and resumes is the one that does not."""
    alike = {}
    for name in SCHEDULERS:
        for tensor in (False, True):
            if tensor and name in ("CyclicLR", "SWALR", "OneCycleLR"):
                continue  # torch itself changes the kind of the rate there
            whole = trained(*scheduled(mesh, name, tensor), range(12))
            model, optimizer, schedule = scheduled(mesh, name, tensor)
            trained(model, optimizer, schedule, range(5))
            at = folder / f"{name}-{tensor}"
            dt.save_checkpoint(at, model, optimizer, {"schedule": schedule.state_dict()})
            model, optimizer, schedule = scheduled(mesh, name, tensor)
            loaded = dt.load_checkpoint(at, model, optimizer)
            schedule.load_state_dict(loaded.extra["schedule"])
            alike[name, tensor] = trained(model, optimizer, schedule, range(5, 12)) == whole[5:]
    return alike


def in_quiet(function):
    def quiet(*arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of schedulers
            return function(*arguments)

    return quiet


def every_scheduler(mesh, folder):
    return in_quiet(resumed)(mesh, folder)


def test_every_scheduler_goes_on_after_a_resume(tmp_path):
    (alike,) = worlds.run(every_scheduler, 1, 1, tmp_path)
    assert [case for case, goes_on in alike.items() if not goes_on] == []


class Keyed(torch.optim.Optimizer):
    """Keeps a sharded state under a key of the test's choice, and infinities."""

    def __init__(self, parameters, key):
        super().__init__(parameters, {"lr": 0.1, "cap": math.inf})
        self.key = key

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("best.so far", math.inf)
            average = state.setdefault(self.key, torch.zeros_like(parameter))
            average.mul_(0.9).add_(parameter.grad)
            parameter.sub_(average)


def keyed(mesh, key):
    torch.manual_seed(0)
    model = dt.shard(nn.Sequential(nn.Linear(4, 4)), mesh)
    return model, dt.replicate(Keyed(model.parameters(), key), model, mesh["replicate"], dt.loco())


def dotted(mesh, folder):
    found = []
    for key in ("ema.fast", "a%2Eb", "%"):
        model, optimizer = keyed(mesh, key)
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        at = folder / key
        dt.save_checkpoint(at, model, optimizer)
        other, again = keyed(mesh, key)
        dt.load_checkpoint(at, other, again)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            one, two = optimizer.state[mine], again.state[theirs]
            equal = torch.equal(one[key].to_local(), two[key].to_local())
            found.append(one.keys() == two.keys() and equal and two["best.so far"] == math.inf)
        found.append(again.param_groups[0]["cap"] == math.inf)
    return found


def test_a_state_under_any_text_comes_back(tmp_path):
    assert all(all(found) for found in worlds.run(dotted, 2, 2, tmp_path))


def numbered(mesh, folder):
    model, optimizer = keyed(mesh, 7)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    try:
        dt.save_checkpoint(folder, model, optimizer)
    except ValueError as error:
        return str(error)
    return ""


def test_a_state_under_a_number_is_refused(tmp_path):
    (said,) = worlds.run(numbered, 1, 1, tmp_path)
    assert said.startswith("the optimizer keeps a state of 0.weight under 7 of type int")


KINDS = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")


def test_hooks_run_in_the_order_of_torch_and_may_change_what_is_saved():
    def made():
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        return torch.optim.AdamW(model.parameters()), model

    def with_hooks(optimizer):
        seen = []
        for kind in KINDS:
            register = getattr(optimizer, f"register_{kind}_hook")
            register(lambda *given, kind=kind: seen.append((kind, len(given))))
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mark": 1})
        optimizer.register_load_state_dict_pre_hook(
            lambda _, state: {key: value for key, value in state.items() if key != "mark"}
        )
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        return seen, saved["mark"]

    plain, _ = made()
    base, model = made()
    replicated = dt.replicate(base, model, LoopbackCommunicator(2), dt.full())
    assert with_hooks(replicated) == with_hooks(plain)
