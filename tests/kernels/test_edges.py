"""The Triton kernels at the edges that small tests do not see: large flats, odd shapes, several GPUs, long runs."""

import runpy
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

import detonation as dt  # noqa: E402
from covering import covered  # noqa: E402
from detonation.cluster.network.loopback import LoopbackCommunicator  # noqa: E402
from detonation.cluster.network.simulated import simulate_replicas  # noqa: E402
from detonation.core.agreement import self_tests as selftest  # noqa: E402
from detonation.core.codec.basis import Identity  # noqa: E402
from detonation.core.codec.codec import Codec  # noqa: E402
from detonation.core.codec.message_rows import MessageRows  # noqa: E402
from detonation.core.codec.precision import PRECISIONS  # noqa: E402
from detonation.core.codec.selection import TopK  # noqa: E402
from detonation.core.engine.reference import engine_for  # noqa: E402
from detonation.core.flat.rows import RowOwners  # noqa: E402
from detonation.core.memory import Memory  # noqa: E402
from detonation.core.runtime import Runtime  # noqa: E402
from detonation.core.schemes import buckets  # noqa: E402
from detonation.core.schemes.buckets import rows_of_a_turn  # noqa: E402
from detonation.engines.triton import why_not  # noqa: E402
from detonation.kernels.gpu import inspection, launches, launching  # noqa: E402
from detonation.kernels.gpu.addressing import as_bf16, dealt_row, message_of_row  # noqa: E402
from detonation.kernels.gpu.messages import add_run  # noqa: E402
from zoo import TALKING  # noqa: E402

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not launching.INTERPRETED, reason="imported without TRITON_INTERPRET=1"
)


@pytest.fixture(autouse=True)
def played(monkeypatch):
    """The CPU plays an accelerator."""
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    monkeypatch.setattr(selftest, "_SHAPE", (16, 16))


def test_interpreted_kernels_are_refused_for_a_gpu():
    """They would read its addresses on the host, and end the process."""
    with pytest.raises(
        RuntimeError, match=r"^TRITON_INTERPRET=1 would run the kernels on the CPU.*: unset it$"
    ):
        why_not(Runtime(torch.device("cuda")))


def test_interpreted_kernels_are_known_however_triton_was_asked_for_them(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "true")
    assert runpy.run_path(launching.__file__)["INTERPRETED"]


@triton.jit
def words_of_line(lines, octets, runs, out):
    words = add_run(tl.zeros([1024], tl.int32), octets, runs, tl.load(lines))
    tl.store(out + tl.arange(0, 1024), words)


@pytest.mark.parametrize("line", [500_000, 600_000, 1_100_000])  # of 4 KiB: 1.9, 2.3 and 4.2 GiB
def test_a_message_above_2_gib_is_read_where_it_lies(line):
    """The number of a line is 32 bits wide on a GPU; the interpreter counts in plain integers."""
    octets = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    runs, found = torch.zeros(16, dtype=torch.int64), torch.zeros(1024, dtype=torch.int32)
    runs[:3] = torch.tensor([64, 5_000_000_000, 64 - line * 4096])
    words_of_line[(1,)](torch.tensor([line], dtype=torch.int32), octets, runs, found)
    assert torch.equal(found, octets.view(torch.int32))


@triton.jit
def dealt(out, which, local, messages, turns, run, owned, row):
    tl.store(
        out + tl.arange(0, 1),
        dealt_row(which + tl.zeros([1], tl.int64), local, 0, messages, turns, run, owned),
    )
    message, at = message_of_row(row + tl.zeros([1], tl.int64), 0, messages, turns, run, owned)
    tl.store(out + 1 + tl.arange(0, 1), message)
    tl.store(out + 2 + tl.arange(0, 1), at)


@pytest.mark.parametrize(
    "rows, replicas", [(7_000_000_000, 4), (8_750_000_123, 8), (2_200_000_123, 3)]
)
def test_more_rows_than_32_bits_count_are_dealt_to_their_owners(rows, replicas):
    owners = RowOwners(rows, replicas, 1024)
    found = torch.zeros(3, dtype=torch.int64)
    dealt[(1,)](
        found, 1, owners.owned - 1, replicas, owners.in_turns, owners.run, owners.owned, 5_000_000
    )
    turns = owners.in_turns
    last = turns * replicas + (owners.owned - turns) + owners.owned - 1 - turns
    block = 5_000_000 // owners.run
    assert found.tolist() == [
        last,
        block % replicas,
        block // replicas * owners.run + 5_000_000 % owners.run,
    ]


@triton.jit
def dealt_rows(
    rows_of,
    messages_of,
    places_of,
    which,
    begin,
    replicas,
    turns,
    run,
    owned,
    rows,
    SOME: tl.constexpr,
):
    item = tl.arange(0, SOME)
    row = dealt_row(which, begin + tl.zeros([1], tl.int64), item, replicas, turns, run, owned)
    tl.store(rows_of + which * owned + begin + item, row, mask=begin + item < owned)
    row = which * owned + begin + item
    message, at = message_of_row(
        which * owned + begin + tl.zeros([1], tl.int64), item, replicas, turns, run, owned
    )
    tl.store(messages_of + row, message, mask=(begin + item < owned) & (row < rows))
    tl.store(places_of + row, at, mask=(begin + item < owned) & (row < rows))


@pytest.mark.parametrize("rows, replicas, run", [(203, 3, 8), (40, 2, 32), (100, 4, 5)])
def test_rows_are_dealt_many_at_once_as_ordinary_torch_deals_them(rows, replicas, run):
    owners = RowOwners(rows, replicas, run)
    found = torch.zeros(3, replicas, owners.owned, dtype=torch.int64)
    dealing = replicas, owners.in_turns, run, owners.owned, rows
    for which in range(replicas):
        for begin in range(0, owners.owned, 16):  # in the middle of a turn, too
            dealt_rows[(1,)](*found, which, begin, *dealing, SOME=16)
    numbers = torch.arange(rows)[:, None]
    wanted = owners.deal(numbers, torch.tensor([-1]))[..., 0]
    real = wanted >= 0
    assert torch.equal(found[0][real], wanted[real])
    places = torch.arange(replicas)[:, None] * owners.owned + torch.arange(owners.owned)
    wanted = owners.collect(places[..., None])[:, 0]
    assert torch.equal(found[1].view(-1)[:rows] * owners.owned + found[2].view(-1)[:rows], wanted)


@pytest.mark.parametrize("name", ["demo-owner", "random-sign", "loco"])
def test_units_of_rows_that_lie_apart_make_the_message_of_all_at_once(name, monkeypatch):
    """Of rows dealt to owners, in two tensors, of which one ends within a row: some units are whole, some are not."""
    scheme = TALKING[name]
    codec, shapes = scheme.codec, {"large": (701, 16), "odd": (67,)}
    layout = codec.layout(shapes)
    owners = RowOwners(layout.rows, 2, rows_of_a_turn(scheme, 2))
    drawn = torch.Generator().manual_seed(0)
    signals = [torch.randn(shape, generator=drawn) for shape in shapes.values()]

    def messages():
        memory = Memory(layout, scheme.feedback, CPU) if scheme.feedback else None
        engine = engine_for(codec, layout, memory, Runtime(CPU))
        octets = torch.zeros(2, codec.nbytes(owners.owned), dtype=torch.uint8)
        engine.encode_into(
            MessageRows(codec, owners.owned, lambda: octets, owners=owners), signals, 0
        )
        return octets, memory.residual if memory else octets

    by_one_program = messages()
    monkeypatch.setattr(launches, "INTERPRETED", False)  # programs of the size that a GPU has
    monkeypatch.setattr(launches, "TILE", 1024)
    for found, wanted in zip(messages(), by_one_program, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", TALKING)
def test_a_message_lies_in_as_many_runs_as_kernels_read(name):
    scheme = TALKING[name]
    layout = scheme.codec.layout({"w": (30_000_000,)})
    cut = buckets.cut_into_buckets(layout, scheme, buckets.aligned_rows(scheme.codec), few=True)
    assert scheme.divides_messages or len(cut) <= inspection.RUNS


@covered("rows, precision", [(200, 40), (201, 40), (255, 64)], ["fp32", "4bit", "2bit"])
def test_units_of_rows_share_no_byte_of_a_bitmap(rows, precision, monkeypatch):
    chunk, k = rows
    codec = Codec(Identity(), TopK(k, chunk), PRECISIONS[precision])
    layout = codec.layout({"w": (40 * chunk,)})
    signal = torch.randn(40 * chunk, generator=torch.Generator().manual_seed(0))

    def indices():
        engine = engine_for(codec, layout, None, Runtime(CPU))
        run = MessageRows(
            codec, layout.rows, lambda: torch.empty(1, codec.nbytes(layout.rows), dtype=torch.uint8)
        )
        engine.encode_into(run, [signal], 0)
        return run.parts[-1]

    by_one_program = indices().clone()
    monkeypatch.setattr(launches, "INTERPRETED", False)  # programs of the size that a GPU has
    monkeypatch.setattr(launches, "TILE", 1024)
    assert codec.index_coding.bitmap and torch.equal(indices(), by_one_program)


@pytest.mark.parametrize(
    "change", [torch.Tensor.t, torch.Tensor.double], ids=["transposed", "fp64"]
)
def test_copies_of_gradients_live_until_kernels_read_them(change):
    scheme = dt.full()
    layout = scheme.codec.layout({"w": (64, 64)})
    engine = engine_for(scheme.codec, layout, None, Runtime(CPU))
    signal = change(torch.randn(64, 64))
    assert torch.equal(engine.encode([signal], 0).values.view(64, 64), signal.float())
    scanner = inspection.Scanner([4096], [0], CPU)
    assert not scanner.scan([signal], 1e18).any()


def test_absent_gradients_leave_nothing_on_the_device():
    """In schemes whose engine is ordinary torch: no table for each pattern of them."""
    model = nn.ParameterList([torch.zeros(16, 16) for _ in range(8)])
    scheme = dt.demo(tiles=True, chunk=8)
    optimizer = dt.replicate(dt.SignSGD(model.parameters()), model, LoopbackCommunicator(), scheme)
    for step in range(6):
        for number, parameter in enumerate(model):
            parameter.grad = torch.ones_like(parameter) if number % (step + 1) == 0 else None
        optimizer.step()
    assert not optimizer.build()[0].channel.runtime._shared


@triton.jit
def rounded(given, out):
    place = tl.arange(0, 4)
    tl.store(out + place, as_bf16(tl.load(given + place)))


def test_a_nan_stays_one_in_bf16():
    """That of a GPU's arithmetic has all bits set, so that rounding it as an integer overflows."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800000, 0x3F800001], dtype=torch.int32)
    found = torch.empty(4)
    rounded[(1,)](bits.view(torch.float32), found)
    torch.testing.assert_close(
        found, torch.tensor([torch.nan, torch.nan, torch.inf, 1.0]), equal_nan=True
    )


@pytest.mark.parametrize("kernels", ["triton", "library", "torch"])
def test_autograd_sees_that_weights_moved(kernels, monkeypatch):
    if kernels != "triton":
        monkeypatch.delenv("DETONATION_KERNELS")
    model = nn.Linear(16, 16, bias=False)
    optimizer = dt.replicate(
        dt.SignSGD(model.parameters(), lr=0.1),
        model,
        LoopbackCommunicator(),
        dt.demo(),
        kernels=kernels != "torch",
    )
    product = model(torch.ones(1, 16, requires_grad=True)).sum()
    model.weight.grad = torch.randn(16, 16)
    optimizer.step()
    with pytest.raises(RuntimeError, match="inplace operation"):
        product.backward()


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch):
    entered, launched = [], []

    @contextmanager
    def device(which):
        entered.append(which)
        yield

    class Kernel(SimpleNamespace):
        def __getitem__(self, grid):
            return lambda *arguments, **constants: launched.append(entered[-1])

    monkeypatch.setattr(torch.cuda, "device", device)
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = torch.empty(1, device="cuda:1")
        launching.launch(Kernel(__name__="kernel"), 1, 3, there)
    assert launched == [torch.device("cuda:1")]


def test_a_bucket_that_is_not_finite_counts_as_lost():
    """Of a round in one message whose parameters keep a part of their own movement."""
    scheme = replace(dt.muloco(every=1, aggregate="clipped_mean"), keep=0.5)

    def act(communicator):
        torch.manual_seed(0)
        model = nn.Linear(20, 20)
        optimizer = dt.replicate(
            torch.optim.SGD(model.parameters(), lr=0.1), model, communicator, scheme
        )
        for step in range(2):
            for parameter in model.parameters():
                value = float("nan") if communicator.replica and step else 1.0
                parameter.grad = torch.full_like(parameter, value)
            optimizer.step()
        return all(bool(parameter.isfinite().all()) for parameter in model.parameters())

    assert simulate_replicas(act, 2) == [True, True]


def test_a_log_of_an_accelerator_is_replayed_on_it(tmp_path):
    """The tape of a replay gives each message once, whoever opens it."""

    def trained(steps):
        model = nn.ParameterList([torch.zeros(16, 16)])
        optimizer = dt.replicate(
            dt.SignSGD(model.parameters()), model, LoopbackCommunicator(2), dt.demo(chunk=16)
        )
        if steps:
            optimizer.record(dt.UpdateLog(tmp_path))
        for step in range(steps):
            model[0].grad = torch.randn(16, 16, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        return model, optimizer

    wanted, _ = trained(3)
    found, optimizer = trained(0)
    assert dt.replay(tmp_path, optimizer) == 3
    assert torch.equal(found[0], wanted[0]) and found[0].any()
