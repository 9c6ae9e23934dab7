"""Values in codes of a few bits: compiled kernels give the bits of plain torch, and of the specification."""

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import detonation as dt
from detonation.core.codec import Everything, Identity, Mean, Selected, aggregate, codebooks
from detonation.core.codec.message_rows import MessageRows
from detonation.core.codec.precision import PRECISIONS
from detonation.core.compute import kernel_library
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime
from detonation.core.schemes.gradients import momentum
from detonation.kernels import native
from specs.precisions import rounded

CPU = torch.device("cpu")


def values_of(count, lines):
    """Values of many magnitudes: zeros, denormal and huge numbers, and ratios at the limit of a code."""
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(lines, count, 1, generator=generator)
    values *= torch.exp2(torch.randint(-6, 6, values.shape, generator=generator))
    values[:, ::13] = 0.0
    values[0, : count // 3] *= 1e-41
    values[0, -30:] *= 1e15
    limits = codebooks.octave_limits()
    for octave, limit in enumerate(limits[: count // 256].tolist()):
        block = values[-1, 256 * octave : 256 * (octave + 1), 0]
        steps = torch.arange(-128, 128, dtype=torch.int32)[: len(block)]
        near = (torch.tensor(limit).view(torch.int32) + steps).view(torch.float32)
        block.copy_(1 / near)
        block[0] = 1.0
    return values


@pytest.mark.parametrize("precision", ["4bit", "2bit", "sign"])
@pytest.mark.parametrize("count", [1, 255, 257, 2049, 4096])
def test_codes_have_the_bits_of_plain_torch_and_of_the_specification(precision, count, monkeypatch):
    book = PRECISIONS[precision]
    values = values_of(count, 3)
    encoded = book.encode(values)
    read = book.decode(encoded, count, 1)
    for line, decoded in zip(values, read, strict=True):
        assert torch.equal(decoded, rounded(line, precision))
    monkeypatch.setattr(kernel_library, "load_library", lambda: None)
    assert torch.equal(encoded, book.encode(values))
    assert torch.equal(read.view(torch.int32), book.decode(encoded, count, 1).view(torch.int32))


@dataclass(frozen=True)
class Fallen(codebooks.BlockCodebook):
    """Codes of three bits, as a package may have: they cross bytes and words."""

    width = 3
    statistics = 1
    block = 256

    def quantise(self, blocks, counts, negative_zeros):
        top = blocks.abs().amax(1, keepdim=True).to(torch.bfloat16).float()
        return ((blocks / top + 1) * 3.5).round().clamp(0, 7).to(torch.int64), top

    def levels(self, statistics):
        return statistics * (torch.arange(8, device=statistics.device) / 3.5 - 1)


@pytest.mark.parametrize("count", [1, 7, 257, 5000])
def test_codes_of_three_bits_have_the_bits_of_plain_torch(count, monkeypatch):
    values = torch.randn(3, count, 1, generator=torch.Generator().manual_seed(count))
    encoded = Fallen().encode(values)
    read = Fallen().decode(encoded, count, 1)
    assert (read - values).abs().max() <= values.abs().max() / 3
    monkeypatch.setattr(kernel_library, "load_library", lambda: None)
    assert torch.equal(read, Fallen().decode(encoded, count, 1))


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
@pytest.mark.parametrize("precision", ["4bit", "2bit", "sign"])
@pytest.mark.parametrize("count", [1, 257, 5000])
def test_kernels_decode_messages_straight_to_their_mean(precision, replicas, count, monkeypatch):
    """In blocks, too, which begin within the messages."""
    codec = dt.loco(precision).codec
    sent = [codec.encode(Selected(line, None)) for line in values_of(count, replicas)]
    half = count // 2 // codec.unit * codec.unit
    means = []
    for library in (kernel_library.load_library(), None):
        monkeypatch.setattr(kernel_library, "load_library", lambda found=library: found)
        received = codec.received(sent, count, None, Mean())
        parts = [received.read(0, half), received.read(half, count)]
        assert {len(part.values) for part in parts} == {1 if library else replicas}
        means.append(torch.cat([aggregate(part, Mean(), 1) for part in parts]))
        assert torch.equal(means[-1], aggregate(received.whole(), Mean(), 1))
    assert torch.equal(*(each.view(torch.int32) for each in means))


@pytest.mark.parametrize("architecture", ["x86-64", "x86-64-v3", "native"])
def test_four_bits_are_encoded_alike_on_any_kind_of_processor(architecture, tmp_path, monkeypatch):
    if architecture == "x86-64-v3" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    source = Path(native.__file__).with_name("codes.cpp")
    flags = [flag for flag in native._FLAGS if not flag.startswith("-march")]
    path = tmp_path / "codes.so"
    subprocess.run(["g++", *flags, f"-march={architecture}", source, "-o", path], check=True)
    library = object.__new__(native.Library)
    library._library = ctypes.CDLL(str(path))
    library._library.detonation_encode_powers.argtypes = native._ARGUMENTS["encode_powers"]
    monkeypatch.setattr(kernel_library, "load_library", lambda: library)
    book = PRECISIONS["4bit"]
    for count in (1, 255, 257, 4096):
        values = values_of(count, 1)
        rest = values.clone()
        encoded = torch.zeros(1, book.nbytes(count, 1), dtype=torch.uint8)
        assert book.encode_rest(rest[0], torch.split(encoded, list(book.lengths(count, 1)), 1))
        with monkeypatch.context() as context:
            context.setattr(kernel_library, "load_library", lambda: None)
            assert torch.equal(encoded, book.encode(values))
            left = values - book.decode(encoded, count, 1)
            assert not book.encode_rest(rest[0], [])
        assert torch.equal(rest.view(torch.int32), left.view(torch.int32))


@pytest.mark.parametrize("precision", ["4bit", "2bit", "int8", "sign"])
def test_an_engine_writes_codes_block_by_block_as_it_writes_them_at_once(precision, monkeypatch):
    """And kernels write what plain torch writes, and leave the same memory."""
    scheme = dt.loco(precision)
    shapes = {"a": (300, 257), "b": (5,), "c": (900, 400)}
    layout = scheme.codec.layout(shapes)
    signals = [torch.randn(shape) for shape in shapes.values()]
    found = []
    compiled = kernel_library.load_library()
    for at_once, library in ((True, None), (False, None), (True, compiled), (False, compiled)):
        monkeypatch.setattr(kernel_library, "load_library", lambda library=library: library)
        memory = Memory(layout, scheme.feedback, CPU)
        engine = ReferenceEngine(scheme.codec, layout, memory, Runtime(CPU))
        assert engine._absorbed_rows < layout.rows
        if at_once:
            engine._absorbed_rows = layout.rows
        written = []
        for step in range(3):
            octets = torch.zeros(1, scheme.codec.nbytes(layout.rows), dtype=torch.uint8)
            run = MessageRows(scheme.codec, layout.rows, lambda octets=octets: octets)
            assert engine.encode_into(run, signals, step).released
            written.append(octets)
        found.append([*written, memory.residual])
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@pytest.mark.parametrize("feedback", [(0.5, 0.5, True), (0.5, 1.0, False)])
def test_a_kernel_subtracts_only_what_wholly_leaves(feedback):
    scheme = momentum(Identity(), Everything(), feedback[0], feedback[1], "4bit", feedback[2])
    layout = scheme.codec.layout({"a": (700,)})
    engine = ReferenceEngine(
        scheme.codec, layout, Memory(layout, scheme.feedback, CPU), Runtime(CPU)
    )
    assert engine._rest is None
