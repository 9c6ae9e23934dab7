"""Values in codes of a few bits: compiled kernels give the bits of plain torch, and of the specification."""

import pytest
import torch

import detonation as dt
from detonation.core.codec import codebooks
from detonation.core.codec.message_rows import MessageRows
from detonation.core.codec.precision import PRECISIONS
from detonation.core.compute import kernel_library
from detonation.core.engine.reference import ReferenceEngine
from detonation.core.memory import Memory
from detonation.core.runtime import Runtime
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


@pytest.mark.parametrize("precision", ["4bit", "2bit", "int8", "sign"])
def test_an_engine_writes_codes_block_by_block_as_it_writes_them_at_once(precision):
    scheme = dt.loco(precision)
    shapes = {"a": (300, 257), "b": (5,), "c": (900, 400)}
    layout = scheme.codec.layout(shapes)
    signals = [torch.randn(shape) for shape in shapes.values()]
    found = []
    for at_once in (True, False):
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
    assert all(map(torch.equal, *found))
