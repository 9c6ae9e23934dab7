"""What a step may cost beyond arithmetic: no wait for the device, operations that do not grow with the number of
tensors, and no second temporary of the model's size."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.compute import kernel_library
from detonation.core.compute.checksum import checksums
from detonation.core.compute.nonfinite import inspected
from detonation.core.engine.reference import engine_for
from detonation.core.flat.layout import Layout, copy
from detonation.core.flat.rows import Bucket
from detonation.core.memory import Memory
from detonation.core.optim import signsgd
from detonation.core.runtime import Runtime
from detonation.core.schemes import buckets
from zoo import TALKING, values_of

CPU = torch.device("cpu")
WAITS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique2",
    "equal",
}


class Watch(TorchDispatchMode):
    """Counts operations that touch data, and the bytes of the tensors that they make, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        assert not (
            name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        ), "bool index"
        if not function.is_view:
            self.names.append(name)
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key, storage.nbytes())

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def watched(scheme, shapes, kernels):
    """A step of an engine, from gradients to gradients, and what it did; the second one, as caches are filled."""
    layout = scheme.codec.layout({f"p{i}": shape for i, shape in enumerate(shapes)})
    memory = Memory(layout, scheme.feedback, CPU) if scheme.feedback else None
    engine = engine_for(scheme.codec, layout, memory, Runtime(CPU, 0, kernels))
    gradients = [torch.randn(shape) for shape in shapes]
    known = [memory.residual] if memory else []
    for step in range(2):
        with Watch() as watch:
            for tensor in (*known, *gradients):
                watch._count(tensor.untyped_storage())
            watch.now = watch.peak = 0
            advance(engine, scheme, layout.rows, gradients, step)
    return watch, layout


def advance(engine, scheme, rows, gradients, step):
    selected = engine.encode(gradients, step)
    message = scheme.codec.encode(selected)
    if not engine.releases_at_once:
        engine.release(
            selected, values_of(scheme.codec, message, rows) if engine.needs_own_values else None
        )
    shared = selected.indices if scheme.codec.selection.shared else None
    del selected
    received = scheme.codec.received([message, message], rows, shared, scheme.aggregation)
    engine.write(received, gradients)


@pytest.fixture
def plain(monkeypatch):
    """Without compiled code anywhere, as on an accelerator."""
    monkeypatch.setattr(kernel_library, "load_library", lambda: None)


@pytest.mark.parametrize("scheme", TALKING.values(), ids=TALKING)
def test_a_step_never_waits_for_the_device(scheme, plain):
    watch, _ = watched(scheme, [(40, 64), (257,), (), (3, 5, 7)], kernels=False)
    assert watch.names and not WAITS & set(watch.names)


@pytest.mark.parametrize("scheme", TALKING.values(), ids=TALKING)
def test_operations_do_not_grow_with_the_number_of_tensors(scheme, plain):
    if scheme.codec.basis.tile:
        pytest.skip("each matrix is cut into tiles by itself")
    few, many = [
        watched(scheme, [(64 * 300 // n - 1,)] * n, kernels=False)[0] for n in (10, 100)
    ]  # all have padding
    assert len(few.names) == len(many.names)


@pytest.mark.parametrize("name", ["full", "demo", "random"])
def test_nor_do_those_of_what_an_accelerator_decides(name, plain):
    scheme, counted = TALKING[name], []
    for n in (10, 100):
        layout = scheme.codec.layout({f"p{i}": (64 * 300 // n,) for i in range(n)})
        memory = Memory(layout, scheme.feedback, CPU) if scheme.feedback else None
        runtime = Runtime(CPU, 0, kernels=False)
        engine = engine_for(scheme.codec, layout, memory, runtime)
        vars(runtime)["decides_on_device"] = True
        gradients = [torch.randn(slot.shape) for slot in layout.slots]
        for step in range(2):
            with Watch() as watch:
                engine.encode(gradients, step, bad=inspected(gradients, runtime).status > 0)
        counted.append(len(watch.names))
    assert counted[0] == counted[1]


@pytest.mark.parametrize("topk", [4, 32])
def test_the_compiled_step_needs_no_memory_but_that_of_the_message(topk):
    scheme = dt.demo(topk=topk, chunk=64)
    watch, layout = watched(scheme, [(64, 1000)] * 8, kernels=True)
    assert watch.peak <= 4 * scheme.codec.nbytes(layout.rows)
    few, many = [watched(scheme, [(64 * 300 // n,)] * n, kernels=True)[0] for n in (10, 100)]
    assert len(few.names) == len(many.names) < 20


def test_the_plain_step_needs_no_temporary_larger_than_the_model(plain):
    scheme = dt.demo(topk=4, chunk=64)
    watch, layout = watched(scheme, [(64, 8000)] * 8, kernels=False)
    flat = 4 * layout.rows * layout.chunk
    assert (
        watch.peak < 1.5 * flat
    )  # the message, its columns in eight bytes each, and what a block of rows needs


def test_signs_in_groups_are_those_of_all_at_once(plain, monkeypatch):
    monkeypatch.setattr(signsgd, "SMALLEST_GROUP", 8)
    weights, directions = (
        [torch.randn(shape) for shape in [(40, 3), (5,), (), (2, 2)]] for _ in range(2)
    )
    wanted = [
        weight - 0.5 * direction.sign()
        for weight, direction in zip(weights, directions, strict=True)
    ]
    monkeypatch.setattr(kernel_library, "library_for", lambda *_: None)
    signsgd._sign_step(weights, directions, 0.5, 0.0)
    assert all(map(torch.equal, weights, wanted))


@pytest.mark.parametrize("nbytes", [56, 64, 4096, 4100, 9001, 3 * 4096 + 8])
def test_a_checksum_is_that_of_whole_lines_wherever_the_bytes_lie(nbytes, plain):
    wide = torch.randint(256, (3, nbytes + 8), dtype=torch.uint8)
    messages = wide[:, 8:]
    padded = torch.nn.functional.pad(messages, (0, -nbytes % 4096))
    assert torch.equal(checksums(messages, 0), checksums(padded, 0))
    assert torch.equal(checksums(messages), checksums(padded))


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_strips_of_tiles_are_the_whole(rows):
    layout = Layout.of({"wide": (70, 130), "bias": (9,), "deep": (64, 3, 5, 5)}, 64 * 64, 64)
    tensors = [torch.randn(slot.shape) for slot in layout.slots]
    whole, flat = layout.flatten(tensors, CPU), layout.zeros(CPU)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    for strip in Bucket.strips(layout, rows):
        flat[strip.rows] = strip.layout.flatten(strip.cut(tensors), CPU)
        copy(strip.cut(copies), strip.layout.parts(flat[strip.rows]))
    assert torch.equal(flat, whole) and all(map(torch.equal, copies, tensors))


ROUNDS = {
    "diloco": (dt.diloco(every=2), 2),  # and how many flats are kept beside the weights
    "diloco-int8": (dt.diloco(every=2, precision="int8"), 2),
    "local-sgd": (dt.schemes.local_sgd(every=2), 1),
    "streaming": (
        dt.schemes.streaming_diloco(every=2, fragments=1, delay=1),
        2 + 1 / 8 * 3,
    ),  # messages of three in flight
    "muloco": (dt.muloco(every=2), 3),
    "sparta": (dt.schemes.sparta(rate=1 / 4), 1),
    "sparseloco": (dt.schemes.sparseloco(every=2, topk=8, chunk=512), 2),
}


@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_needs_no_memory_but_what_is_kept_and_a_few_buckets(name, plain, monkeypatch):
    scheme, flats = ROUNDS[name]
    for limit, value in (("SMALLEST", 2**18), ("SMALL_BUCKETS", 32)):
        monkeypatch.setattr(buckets, limit, value)
    with Watch() as watch:
        model = torch.nn.ParameterList([torch.zeros(512, 512) for _ in range(8)])
        gradients = [torch.ones(512, 512) for _ in range(8)]
        optimizer = dt.replicate(
            torch.optim.SGD(model.parameters()), model, LoopbackCommunicator(2), scheme
        )
        optimizer.build()
        for step in range(4):
            if step == 2:
                watch.peak = watch.now
            for parameter, gradient in zip(model, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    kept = (2 + flats) * sum(parameter.nbytes for parameter in model)  # weights and gradients
    cut = [pipeline.bucket.layout for pipeline in optimizer.build()[0].channel.pipelines]
    bucket = max(4 * layout.rows * layout.chunk for layout in cut)
    assert len(cut) >= 15
    assert (
        watch.peak <= kept + 10 * bucket
    )  # what two buckets on their way need, from the movement to the update
