"""The Triton kernels, by Triton's interpreter on the CPU: each equals the engine and the guard of ordinary torch."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import detonation as dt
from covering import some
from detonation.cluster.network.simulated import simulate_replicas
from detonation.core.agreement import self_tests as selftest
from detonation.core.codec.aggregate import ClippedMean, Divided
from detonation.core.codec.basis import Identity
from detonation.core.codec.message_rows import MessageRows, SharedIndices, Workspace
from detonation.core.codec.received import Arrived, Sums
from detonation.core.codec.selection import Random, Rotation, Striding, TopK, random_start
from detonation.core.compute.nonfinite import LIMIT, SIGNAL_LIMIT
from detonation.core.compute.nonfinite import inspected as verdict_on
from detonation.core.engine.reference import ReferenceEngine, engine_for
from detonation.core.integrity.guard import FORGET, LOUDER, Expected, decide_usable, unsealed
from detonation.core.integrity.message import HEADER_BYTES, IDENTITY, Header
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime
from detonation.core.schemes import buckets
from detonation.core.schemes.gradients import momentum
from detonation.engines.triton.coding import coding_of, places_of, why_not_triton
from detonation.engines.triton.engine import TritonEngine
from detonation.kernels.gpu import inspection, launches, launching
from zoo import SCHEMES, TALKING, values_of

CPU = torch.device("cpu")
SHAPES = {
    "matrix": (40, 16),
    "odd": (257,),
    "scalar": (),
    "empty": (0, 7),
    "kernel": (3, 5, 7),
    "last": (0,),
}
RUN = {name: scheme for name, scheme in TALKING.items() if not why_not_triton(scheme.codec)}
RUN["demo-128"] = dt.demo(topk=5, chunk=128)  # whose rows are transformed in quarters
RUN["int8"] = dt.schemes.random(rate=1 / 2, precision="int8", link="owner")
RUN["demo-int8"] = dt.demo(topk=3, chunk=16, precision="int8")
RUN["demo-clipped-2bit"] = dt.demo(topk=3, chunk=16, precision="2bit", aggregate="clipped_mean")
COMPARED = [
    "demo", "demo-128", "demo-clipped-2bit", "demo-senders-bf16", "demo-alpha", "demo-sign", "demo-bitmap-2bit",
    "random-odd", "random-majority", "random-sign", "striding", "loco", "muloco-2bit",
    "random-int8-clipped", "demo-int8", "local-sgd",
]  # fmt: skip
"""One of every basis, selection, precision, aggregation and coding of indices that kernels know."""

pytestmark = [
    pytest.mark.skipif(
        not launching.INTERPRETED, reason="the kernels were imported without TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning"
    ),  # by numpy, of numbers that overflow in damaged messages
]


@pytest.fixture(autouse=True)
def played(monkeypatch):
    """The CPU plays an accelerator."""
    monkeypatch.setenv("DETONATION_KERNELS", "triton")
    monkeypatch.setattr(selftest, "_SHAPE", (16, 16))


def signals(step, kinds=(torch.float32,)):
    drawn = torch.Generator().manual_seed(step)
    found = [torch.randn(shape, generator=drawn) for shape in SHAPES.values()]
    return [signal.to(kinds[i % len(kinds)]) for i, signal in enumerate(found)]


def engines(scheme):
    layout = scheme.codec.layout(SHAPES)
    memories = [Memory(layout, scheme.feedback, CPU) if scheme.feedback else None for _ in range(2)]
    mine = engine_for(scheme.codec, layout, memories[0], Runtime(CPU, 3))
    assert isinstance(mine, TritonEngine)
    return mine, ReferenceEngine(scheme.codec, layout, memories[1], Runtime(CPU, 3, kernels=False))


def sent_and_read(scheme, engine, given, step, zeros):
    """The parts of the message, and the update that two of them make."""
    codec, rows = scheme.codec, engine.layout.rows
    octets = torch.empty(1, codec.width(rows, HEADER_BYTES), dtype=torch.uint8)
    run = MessageRows(codec, rows, lambda: octets, room=HEADER_BYTES, negative_zeros=zeros)
    selected, message = engine.encode_into(run, given, step), run.body[0]
    values = codec.written(run).clone()
    if not engine.releases_at_once and not selected.released:
        engine.release(selected, values if engine.needs_own_values else None)
    shared = selected.indices if codec.selection.shared else None
    received = codec.received([message, message], rows, shared, scheme.aggregation)
    if isinstance(engine, TritonEngine):  # which need the step of shared indices, not the indices
        received.shared = shared
    update = [
        torch.zeros(shape, dtype=torch.bfloat16 if name == "odd" else None)
        for name, shape in SHAPES.items()
    ]
    engine.write(received, update)
    return values, None if codec.selection.shared else run.parts[-1][0].clone(), update


@pytest.mark.parametrize("name", COMPARED)
def test_encode_release_and_decode_are_those_of_the_reference(name):
    scheme = RUN[name]
    mine, reference = engines(scheme)
    for step in range(2):
        given = signals(
            step, (torch.float32, torch.bfloat16, torch.float16) if step else (torch.float32,)
        )
        found, wanted = (
            sent_and_read(scheme, each, given, step, bool(step)) for each in (mine, reference)
        )
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
        if wanted[1] is not None:
            assert torch.equal(found[1].reshape(-1), wanted[1].reshape(-1))
        for one, other in zip(found[2], wanted[2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        if mine.memory:
            torch.testing.assert_close(
                mine.memory.residual, reference.memory.residual, rtol=1e-5, atol=1e-5
            )


def test_many_programs_that_take_many_parts_do_as_one(monkeypatch):
    scheme = RUN["demo-sign"]
    whole, _ = engines(scheme)
    wanted = sent_and_read(scheme, whole, signals(0), 0, False)
    monkeypatch.setattr(launches, "TILE", 1024)
    monkeypatch.setattr(launches, "PROGRAMS", 2)
    cut, _ = engines(scheme)
    found = sent_and_read(scheme, cut, signals(0), 0, False)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert torch.equal(cut.memory.residual, whole.memory.residual)


@pytest.mark.long  # no branch of its own
def test_int8_takes_blocks_one_after_the_other(monkeypatch):
    monkeypatch.setattr(launches, "PROGRAMS", 2)  # for four blocks, the last of which is not full
    codec, numel = SCHEMES["local-sgd"].codec, 3 * 65536 + 1234
    layout = codec.layout({"weight": (numel,)})
    signal = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    signal[::7], signal[5::1000], signal[65536 : 2 * 65536] = (
        0,
        40,
        0,
    )  # beyond the bins; a block of zeros
    run = MessageRows(
        codec, layout.rows, lambda: torch.empty(1, codec.nbytes(layout.rows), dtype=torch.uint8)
    )
    engine_for(codec, layout, None, Runtime(CPU)).encode_into(run, [signal], 0)
    mine, wanted = run.body[0], codec.encode(codec.select(signal.view(-1, 1), 0, 0))
    codes = mine[:numel].int() - wanted[:numel].int()
    assert (
        codes.abs().max() <= 1 and codes.count_nonzero() < 5
    )  # at the edge of a bin the last bit of its width decides
    torch.testing.assert_close(
        values_of(codec, mine, layout.rows),
        values_of(codec, wanted, layout.rows),
        rtol=0.01,
        atol=1e-5,
    )


def test_int8_of_numbers_whose_squares_are_zero_keeps_their_signs():
    """In units of the smallest width they are large, and a sum of many must not overflow."""
    codec = SCHEMES["local-sgd"].codec
    layout = codec.layout({"weight": (192,)})
    signal = torch.full((192,), 1.5e-23)
    signal[::2] *= -1
    run = MessageRows(
        codec, layout.rows, lambda: torch.empty(1, codec.nbytes(layout.rows), dtype=torch.uint8)
    )
    engine_for(codec, layout, None, Runtime(CPU)).encode_into(run, [signal], 0)
    assert torch.equal(values_of(codec, run.body[0], layout.rows).view(-1).sign(), signal.sign())


@pytest.mark.parametrize("topk", [3, 9])
def test_of_equal_magnitudes_the_first_are_sent(topk):
    mine, _ = engines(momentum(Identity(), TopK(topk, 16)))
    tied = [torch.ones(shape) for shape in SHAPES.values()]
    tied[0].view(-1)[::2] *= -1
    selected = mine.encode(tied, 0)
    assert torch.equal(selected.indices.unpacked[:40].long(), torch.arange(topk).expand(40, -1))
    assert torch.equal(selected.values.abs()[:40], torch.ones(40, topk))


def test_a_signal_that_is_not_finite_is_found_and_changes_nothing():
    mine, _ = engines(RUN["demo"])
    mine.encode(signals(0), 0)
    before = mine.memory.residual.clone()
    runtime = Runtime(CPU)
    for number, value in ((1, float("nan")), (4, float("-inf")), (0, 2 * SIGNAL_LIMIT)):
        given = signals(1, (torch.float32, torch.bfloat16))
        given[number].view(-1)[-1] = value
        given[2] = None
        status = verdict_on(given, runtime).status
        assert int(status) == 1 + number
    assert int(verdict_on(signals(1), runtime).status) == 0
    selected = mine.encode(given, 1, bad=status)
    assert not selected.values.any() and torch.equal(mine.memory.residual, before)


@pytest.mark.parametrize(
    "rule",
    [Random(1 / 8), Random(1 / 8, cycle=False), Random(0.3), Random(1 / 300), Striding(1 / 16)],
    ids=repr,
)
def test_rotations_are_those_of_the_selection(rule: Rotation):
    rows, seed = 70, 5
    for step in (0, 3, 11):
        cycle, share, deal = rule.phase(step, seed)
        coding = launching.Coding(
            rule.chunk, rule.k, "none", type(rule).__name__.lower(), "fp32", 1, 0, False
        )
        rotations = launches.Rotations.room(coding, CPU)
        rotations.rotate(
            coding, *(random_start(seed, cycle, which) for which in (0, 1)), share, deal
        )
        wanted = rule.indices(torch.empty(rows, rule.chunk), step, seed)
        table = torch.full((rows, rule.chunk), -1, dtype=torch.int32)
        table.scatter_(1, wanted, torch.arange(rule.k, dtype=torch.int32).expand(rows, -1))
        found = {tuple(line) for line in rotations.table.tolist()}
        assert {tuple(line) for line in table.tolist()} <= found


@pytest.mark.parametrize("nbytes", [100, 4032, 5003])
def test_a_seal_is_that_of_ordinary_torch(nbytes):
    width = -(-(HEADER_BYTES + nbytes) // 4096) * 4096
    wanted = torch.zeros(2, width, dtype=torch.uint8)
    wanted[:, HEADER_BYTES : HEADER_BYTES + nbytes] = torch.randint(
        0, 256, (2, nbytes), dtype=torch.uint8
    )
    found = wanted.clone()
    found[:, :HEADER_BYTES], found[:, HEADER_BYTES + nbytes :] = 77, 55  # of an earlier step
    header = Header(2**62 + 12345, 3, 5, 1, 7, 2**61 + 9)
    header.seal(wanted, nbytes)
    inspector = inspection.Inspector(2, CPU)
    shape = inspection.RunShape(HEADER_BYTES, 0, (nbytes, 0, 0))
    inspector.seal(
        [found],
        [shape],
        nbytes,
        IDENTITY,
        header.schema,
        3,
        header.origin,
        torch.tensor(7),
        header.received,
    )
    assert torch.equal(found[:, : HEADER_BYTES + nbytes], wanted[:, : HEADER_BYTES + nbytes])


DAMAGES = {
    "none": lambda message: None,
    "a bit": lambda message: message[HEADER_BYTES + 9].bitwise_xor_(4),
    "another step": lambda message: message[16].add_(1),
    "a status": lambda message: message[40].fill_(99),
    "the checksum": lambda message: message[60].bitwise_xor_(1),
}


def inspected(inspector, messages, whole, codec, rows, usual):
    """The table of whole messages of step 3, which are joined in `whole`."""
    nbytes, lengths = codec.nbytes(rows), codec.precision.lengths(rows, codec.selection.k)
    shape = inspection.RunShape(
        HEADER_BYTES, rows, (lengths[0], sum(lengths[1:]), nbytes - sum(lengths))
    )
    return inspector.inspect(
        [messages], [shape], whole, nbytes, coding_of(codec), places_of(codec, rows), IDENTITY, 2**40,
        3, 0, 6, usual, True, inspection.Limits(LIMIT, LOUDER, FORGET),
    )  # fmt: skip


@pytest.mark.long_cases("random-sign", "demo-int8")
@some(
    "name",
    ["demo", "demo-bitmap-2bit", "random-sign", "demo-senders-bf16", "demo-int8"],
    keep=["demo-bitmap-2bit", "random-sign", "demo-int8"],
)
def test_messages_are_refused_as_by_ordinary_torch(name):
    codec = RUN[name].codec
    rows, replicas = 24, 3
    nbytes, expected = (
        codec.nbytes(rows),
        Expected(Header(2**40, 3, 0, 0), codec.nbytes(rows), 6, True),
    )
    inspector = inspection.Inspector(replicas, CPU)
    cases = [("as encoded", damage) for damage in DAMAGES.values()]
    cases += [(which, len) for which in ("loud", "noise", "not a number")]
    for content, damage in cases:
        messages = torch.zeros(replicas, 8192, dtype=torch.uint8)
        for replica in range(replicas):
            values = torch.randn(
                rows, codec.selection.chunk, generator=torch.Generator().manual_seed(replica)
            )
            sent = codec.encode(
                codec.select(values * (1e7 if content == "loud" and replica else 1), 0, 0)
            )
            body = sent.clone()
            if content == "noise" and replica == 1:
                body = torch.randint(0, 256, body.shape, dtype=torch.uint8)
            if (
                content == "not a number" and replica == 1
            ):  # the first statistic, or the first value
                first = codec.precision.lengths(rows, codec.selection.k)[0] * (
                    codec.precision.block > 1
                )
                body[first : first + 4] = 255
            messages[replica, HEADER_BYTES : HEADER_BYTES + nbytes] = body
            Header(2**40, 3, 0, replica).seal(messages[replica : replica + 1], nbytes)
        damage(messages[2])
        usual, mine = torch.tensor([0.5]), torch.tensor([0.5])
        arrived = Arrived(
            codec,
            messages[:, HEADER_BYTES : HEADER_BYTES + nbytes],
            rows,
            None,
            dt.demo().aggregation,
        )
        refused, table = decide_usable(*unsealed(messages), *arrived.facts(), expected, usual)
        given = torch.zeros_like(messages)
        found = inspected(
            inspector, messages[:, : HEADER_BYTES + nbytes].contiguous(), given, codec, rows, mine
        )
        norms, bounds = (
            [each[:, at].clone().view(torch.float64) for each in (found, table)] for at in (10, 11)
        )
        beyond = [
            ~(norm <= LIMIT) for norm in norms
        ]  # how far is an accident of the order of a sum
        assert torch.equal(*beyond)
        # the square of less than 1e-19 is no fp32 number
        torch.testing.assert_close(
            *(norm.masked_fill(beyond[0], 0) for norm in norms), rtol=1e-5, atol=1e-16
        )
        torch.testing.assert_close(*bounds, rtol=1e-5, atol=0)
        rest = [at for at in range(13) if at not in (10, 11)]
        assert torch.equal(found[:, rest], table[:, rest])
        torch.testing.assert_close(mine, usual, rtol=1e-5, atol=0)
        kept = messages[:, HEADER_BYTES : HEADER_BYTES + nbytes].clone()
        kept[refused] = 0
        assert torch.equal(given[:, HEADER_BYTES : HEADER_BYTES + nbytes], kept)


def test_a_message_is_inspected_once_its_own_programs_are_done(monkeypatch):
    """Without those of the other messages: on a GPU nobody inspects all of them one after the other."""
    codec, rows, replicas = RUN["demo"].codec, 24, 3
    nbytes = codec.nbytes(rows)
    messages = torch.zeros(replicas, HEADER_BYTES + nbytes, dtype=torch.uint8)
    for replica in range(replicas):
        values = torch.randn(
            rows, codec.selection.chunk, generator=torch.Generator().manual_seed(replica)
        )
        messages[replica, HEADER_BYTES:] = codec.encode(codec.select(values, 0, 0))
        Header(2**40, 3, 0, replica).seal(messages[replica : replica + 1], nbytes)
    inspector = inspection.Inspector(replicas, CPU)
    inspector._table.fill_(-9)
    grids = []

    def launched(kernel, programs, *arguments, **constants):
        grids.append(programs)
        launching.launch(kernel, inspection.PARTS, *arguments, **constants)

    monkeypatch.setattr(inspection, "launch", launched)
    table = inspected(inspector, messages, messages, codec, rows, torch.ones(1))
    assert grids == [replicas * inspection.PARTS]
    assert table[0, 12] == 1 and table[0, 10].view(torch.float64) > 0, (
        "the first message has no fault, and a norm"
    )
    assert (table[1:] == -9).all() and table[0, 11] == -9, "nobody has decided"


@some("name", ["demo", "demo-clipped-2bit"], keep=["demo-clipped-2bit"])
def test_messages_are_weighed_as_by_ordinary_torch(name):
    codec, rows = RUN[name].codec, 3000  # whose squares lie in several parts
    drawn = torch.randn(rows, codec.selection.chunk, generator=torch.Generator().manual_seed(0))
    for scales in ([1, 5, 0], [0, 0], [1]):
        messages = [codec.encode(codec.select(drawn * scale, 0, 0)) for scale in scales]
        wanted = codec.received(messages, rows, None, ClippedMean())
        mine, other = (inspection.Inspector(len(scales), CPU) for _ in range(2))
        other._arrivals += (
            1  # as if another optimizer's messages were weighed on another stream now
        )
        weights = torch.empty(len(scales))
        mine.weigh(wanted.source.body, places_of(codec, rows), coding_of(codec), weights)
        assert torch.equal(weights, wanted.aggregation.of_replicas)


def test_two_optimizers_share_no_memory_that_kernels_write():
    # they may run on two streams, side by side; the buckets of one never do
    codec, (one, other) = dt.random_sign().codec, (Runtime(CPU, 3) for _ in range(2))
    layout = codec.layout(SHAPES)
    first, bucket, apart = (
        engine_for(codec, layout, None, runtime)._made(codec)[1] for runtime in (one, one, other)
    )
    assert first.rotations is bucket.rotations and first._scratch is bucket._scratch
    assert first.rotations.table.data_ptr() != apart.rotations.table.data_ptr()
    assert first._scratch.data_ptr() != apart._scratch.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_that_is_not_finite_is_reported_and_counts_as_zeros(dtype):
    scheme = dt.schemes.random(rate=1 / 4, precision="bf16" if dtype == torch.bfloat16 else "fp32")
    engine, _ = engines(scheme)
    rows, k = engine.layout.rows, scheme.codec.selection.k
    shared = SharedIndices(scheme.codec.selection, rows, 1, 3, CPU)
    inspector, digits, status = (
        inspection.SumInspector(CPU),
        torch.full((9,), 77.0, dtype=dtype),
        70_000,
    )
    mark = 246
    inspector.seal(torch.tensor([0, 90_000, status]), digits, 3, 3, mark << 16)
    low, middle, high = status.to_bytes(3, "little")
    assert digits.tolist() == [0, 0, 0, low, middle, high + mark, 0, 0, 0]
    for fault in (0.0, float("nan"), float("-inf")):
        total = torch.randn(rows, k, generator=torch.Generator().manual_seed(0)).to(dtype)
        total[-1, -1] += fault
        runs = [(first, total[first : first + 16].clone()) for first in (0, 16, 32)] + [
            (48, total[48:])
        ]
        report = torch.empty(10)
        inspector.inspect([run for _, run in runs], digits, report)
        assert report.tolist() == [float(fault == 0), *digits.tolist()]
        received = Sums(runs, rows, Divided(3), shared, report)
        wanted = torch.zeros(rows, scheme.codec.selection.chunk)
        if not fault:
            wanted.scatter_(1, shared.unpacked.to(torch.int64), total.float() / 3)
        assert torch.equal(engine.layout.flatten(engine.layout.parts(engine.decode(received)), CPU),
                           engine.layout.flatten(engine.layout.parts(wanted), CPU))  # fmt: skip


def trained(scheme, triton, base, monkeypatch, replicas=2):
    """The weights of all replicas after three steps; in one of them a gradient is not finite."""
    monkeypatch.setenv("DETONATION_KERNELS", "triton" if triton else "")

    def act(communicator):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(33, 20), nn.Linear(20, 7, bias=False), nn.Linear(7, 3))
        model[2].to(torch.bfloat16)
        safety = dt.Safety(non_finite="skip")
        optimizer = dt.replicate(
            base(model.parameters()), model, communicator, scheme, kernels=triton, safety=safety
        )
        for step in range(3):
            drawn = torch.Generator().manual_seed(100 * step + communicator.replica)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=drawn).to(parameter.dtype)
            if (step, communicator.replica) == (1, 1):
                model[1].weight.grad[0, 0] = float("nan")
            optimizer.step()
        assert (optimizer.build()[0].channel.engine.name == "triton") == triton
        return [parameter.detach().float() for parameter in model.parameters()]

    return simulate_replicas(act, replicas)


TRAINED = ("demo-clipped-2bit",)
TRAINED_LONG = ("random-sign", "demo-owner", "demo", "loco-sign-owner", "random-sign-owner", "int8")


@pytest.mark.long_cases("demo-clipped-2bit")
@some("name", (*TRAINED, *TRAINED_LONG), keep=TRAINED)
def test_replicas_agree_and_train_as_without_kernels(name, monkeypatch):
    base = dt.SignSGD if name != "random-sign-owner" else torch.optim.SGD
    scheme = SCHEMES.get(name) or RUN[name]
    ours = trained(scheme, True, lambda p: base(p, lr=0.01), monkeypatch)
    plain = trained(scheme, False, lambda p: base(p, lr=0.01), monkeypatch)
    for one, other, wanted in zip(ours[0], ours[1], plain[0], strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted, rtol=1e-2, atol=1e-3)


SUMS = {name: SCHEMES[name] for name in ("random-odd", "striding", "full-bf16")}
SUMS["striding, in long rows"] = dt.schemes.striding(rate=1 / 300)
SUMS["diloco"] = dt.diloco(every=2)


@pytest.mark.parametrize("name", SUMS)
def test_sums_make_the_bits_of_ordinary_torch(name, monkeypatch):
    replicas = 3 if "long" in name else 2
    ours, plain = (
        trained(SUMS[name], triton, lambda p: torch.optim.SGD(p, lr=0.01), monkeypatch, replicas)
        for triton in (True, False)
    )
    for one, wanted in zip(ours, plain, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, wanted, strict=True))


@pytest.mark.long_cases("owners")
@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(dt.demo(topk=4, chunk=16, precision="2bit"), marks=pytest.mark.long),
        dt.random_sign(rate=1 / 4, error_feedback=True, link="owner"),
        dt.schemes.random(rate=1 / 4, precision="bf16"),
        pytest.param(dt.full(), marks=pytest.mark.long),
    ],
    ids=["all-gather", "owners", "all-reduce", "all-reduce of everything"],
)
def test_buckets_that_leave_early_make_the_same_bits(scheme, monkeypatch):
    monkeypatch.setattr(buckets, "SMALLEST", 2**12)

    def act(communicator, early):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(65, 130), nn.Linear(130, 67))
        optimizer = dt.replicate(
            dt.SignSGD(model.parameters(), lr=0.01), model, communicator, scheme
        )
        channel = optimizer.build()[0].channel
        assert len(channel.pipelines) > 1 and channel.engine.name == "triton"
        for step in range(2):  # the first one sets up
            batch = torch.randn(
                3, 65, generator=torch.Generator().manual_seed(100 * step + communicator.replica)
            )
            loss = model(batch).square().mean()
            with optimizer.overlap() if early and step else nullcontext():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        memory = channel.memory.residual if channel.memory else torch.zeros(1)
        return [
            memory,
            *channel.exchange.state().values(),
            *(parameter.detach() for parameter in model.parameters()),
        ]

    at_once, early = (simulate_replicas(partial(act, early=early), 2) for early in (False, True))
    for one, other in zip(at_once, early, strict=True):
        assert all(
            torch.equal(*pair) for pair in zip(one, other, strict=True) if pair[0].numel() > 1
        )


def test_messages_in_flight_lie_in_buffers_of_their_own():
    workspace = Workspace(3)
    make = partial(torch.empty, 2, 5)
    taken = [workspace.take("form", 5, make).data_ptr() for _ in range(9)]
    assert len(set(taken)) == 3 and taken[:3] == taken[3:6] == taken[6:]
    assert workspace.take("form", 6, partial(torch.empty, 2, 6)).shape == (2, 6)
    assert len(workspace._kept["form"]) == 3
    kept = [Workspace().take("form", 5, make) for _ in range(3)]
    assert len({each.data_ptr() for each in kept}) == 3


def test_a_reason_is_given_where_no_kernel_encodes():
    reasons = {name: why_not_triton(scheme.codec) for name, scheme in TALKING.items()}
    assert reasons["demo"] == reasons["random-sign"] == ""
    assert "TileDCT" in reasons["demo-tiles"] and "1000" in reasons["demo-whole"]
    assert reasons["full"] == reasons["random-int8-clipped"] == ""
