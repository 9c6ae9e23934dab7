"""How numbers are written down: sizes known beforehand, and as close as the number of bits allows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from detonation.core.codec.aggregate import AGGREGATIONS, Coefficients, aggregate
from detonation.core.codec.codebooks import BlockCodebook
from detonation.core.codec.indices import IndexCoding, PackedIndices
from detonation.core.codec.precision import PRECISIONS
from detonation.core.compute import kernel_library
from detonation.core.compute.bitpack import pack, packed_bytes, unpack
from zoo import PRECISION_ERRORS

CODEBOOKS = [name for name, precision in PRECISIONS.items() if isinstance(precision, BlockCodebook)]
laws = settings(max_examples=50, deadline=None)


@given(count=st.integers(0, 300), width=st.integers(1, 20), seed=st.integers(0, 99))
@laws
def test_packed_numbers_come_back_and_leave_no_gap(count, width, seed):
    numbers = torch.randint(0, 2**width, (count,), generator=torch.Generator().manual_seed(seed))
    packed = pack(numbers, width)
    assert packed.dtype == torch.uint8 and len(packed) == packed_bytes(count, width) == -(
        -count * width // 8
    )
    assert torch.equal(unpack(packed, count, width, torch.int64), numbers)


@pytest.mark.parametrize("width", [1, 6, 7, 12, 16, 17, 20])
def test_compiled_packing_gives_the_same_bytes(width, monkeypatch):
    numbers = torch.randint(0, 2**width, (5003,), generator=torch.Generator().manual_seed(0))
    packed = pack(numbers, width)
    assert torch.equal(unpack(packed, 5003, width, torch.int64), numbers)
    monkeypatch.setattr(kernel_library, "load_library", lambda: None)
    assert torch.equal(pack(numbers, width), packed)
    assert torch.equal(unpack(packed, 5003, width, torch.int64), numbers)


@pytest.mark.parametrize("chunk, k", [(64, 32), (16, 9), (256, 200)])
def test_compiled_bitmaps_give_the_same_bytes(chunk, k, monkeypatch):
    codec, generator = IndexCoding(chunk, k), torch.Generator().manual_seed(0)
    indices = torch.rand(800, chunk, generator=generator).argsort(1)[:, :k].sort(1).values
    encoded = codec.encode(indices)
    assert torch.equal(encoded, torch.cat([codec.encode(some) for some in indices.split(8)]))
    assert torch.equal(codec.decode(encoded, 800, torch.int64), indices)
    monkeypatch.setattr(kernel_library, "load_library", lambda: None)
    assert torch.equal(codec.encode(indices), encoded)
    assert torch.equal(codec.decode(encoded, 800, torch.int64), indices)


@given(
    rows=st.integers(0, 20),
    chunk=st.integers(1, 300),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
@laws
def test_indices_come_back_in_the_fewest_bytes(rows, chunk, share, seed):
    k = max(1, int(share * chunk))
    indices = torch.rand(rows, chunk, generator=torch.Generator().manual_seed(seed)).argsort(1)[
        :, :k
    ]
    codec = IndexCoding(chunk, k)
    indices = indices.sort(1).values
    encoded = codec.encode(indices)
    assert torch.equal(codec.decode(encoded, rows, torch.int64), indices)
    assert len(encoded) == codec.nbytes(rows)
    bits = min(chunk, k * (chunk - 1).bit_length()) * rows
    assert codec.nbytes(rows) == -(-bits // 8)
    for first in range(0, rows, 8):  # and so do some of the rows
        end = min(first + 8, rows)
        part = PackedIndices(codec, encoded, rows).part(first, end)
        read = part if isinstance(part, torch.Tensor) else part.unpacked
        assert torch.equal(read.to(torch.int64), indices[first:end])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("chunk, k", [(64, 4), (64, 32), (10, 5), (300, 3)])
@pytest.mark.parametrize("name", PRECISIONS)
def test_several_messages_are_encoded_as_each_by_itself(name, chunk, k, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(kernel_library, "load_library", lambda: None)
    precision, coding, rows = PRECISIONS[name], IndexCoding(chunk, k), 333
    values = torch.randn(3, rows, k, generator=torch.Generator().manual_seed(0))
    together = precision.encode(values)
    alone = torch.stack([precision.encode(each) for each in values])
    assert torch.equal(together, alone)
    read = precision.decode(together, rows, k)
    assert torch.equal(read, torch.stack([precision.decode(each, rows, k) for each in alone]))
    lawful, norms = precision.check(together, rows, k)
    assert (lawful is None or lawful.all()) and (norms >= 0.999 * read.flatten(1).norm(dim=1)).all()
    assert sum(precision.lengths(rows, k)) == precision.nbytes(rows, k) == alone[0].nbytes
    indices = torch.rand(3, rows, chunk).argsort(2)[..., :k].sort(2).values
    packed = coding.encode(indices)
    assert torch.equal(packed, torch.stack([coding.encode(each) for each in indices]))
    assert torch.equal(coding.decode(packed, rows, torch.int64), indices)


def test_every_precision_is_in_the_table_of_laws():
    assert PRECISION_ERRORS.keys() == PRECISIONS.keys()


@pytest.mark.parametrize("name, precision", PRECISIONS.items(), ids=PRECISIONS)
@given(
    rows=st.integers(0, 400), k=st.integers(1, 9), scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e6])
)
@laws
def test_a_precision_is_as_large_as_it_says_and_about_right(name, precision, rows, k, scale):
    values = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows)) * scale
    encoded = precision.encode(values)
    assert encoded.nbytes == precision.nbytes(rows, k)
    read = precision.decode(encoded, rows, k)
    assert read.shape == values.shape and read.dtype == torch.float32 and read.isfinite().all()
    if rows * k >= 300:
        assert (read - values).norm() <= PRECISION_ERRORS[name] * values.norm()


@pytest.mark.parametrize("name", CODEBOOKS)
def test_zeros_stay_zero_and_blocks_keep_their_own_scale(name):
    precision = PRECISIONS[name]
    quiet, loud = torch.zeros(1, precision.block), torch.ones(1, precision.block)
    read = precision.decode(precision.encode(torch.cat([quiet, loud])), 2, precision.block)
    assert not read[0].any()
    torch.testing.assert_close(read[1], torch.ones(precision.block), rtol=0.01, atol=0)


@pytest.mark.parametrize("name", ["2bit", "sign", "4bit"])
def test_signs_are_always_right(name):
    values = torch.randn(100, 7, generator=torch.Generator().manual_seed(0))
    precision = PRECISIONS[name]
    read = precision.decode(precision.encode(values), 100, 7)
    assert torch.equal(read.sign(), values.sign() * (read != 0))
    assert name == "4bit" or read.all()


def test_four_bits_are_powers_of_two_and_zero():
    values = torch.tensor(
        [[1, 0.8, 0.6, 1 / 64, 0.01, 1 / 128 + 1e-6, 1 / 128, 1e-9, 0.0, -0.0, -0.01, -1 / 128]]
    )
    read = PRECISIONS["4bit"].decode(PRECISIONS["4bit"].encode(values), *values.shape)
    assert read.tolist() == [[1, 1, 0.5, 1 / 64, 1 / 64, 1 / 64, 0, 0, 0, 0, -1 / 64, 0]]


class Backwards(TorchFunctionMode):
    """Adds the numbers of a `scatter_add` in another order, as an accelerator may."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function in (torch.Tensor.scatter_add, torch.Tensor.scatter_add_):
            target, dim, index, source = arguments
            arguments = (target, dim, index.flip(dim), source.flip(dim))
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("name", CODEBOOKS)
def test_no_order_of_addition_is_left_to_the_device(name):
    """The ranks of a node send parts of one message, so they must encode it bit for bit alike."""
    precision, generator = PRECISIONS[name], torch.Generator().manual_seed(0)
    blocks = torch.randn(3, precision.block, generator=generator)
    counts = torch.full((3, 1), float(precision.block))
    expected = precision.quantise(blocks, counts, False)
    with Backwards():
        found = precision.quantise(blocks, counts, False)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_eight_bits_keep_the_mean_of_each_bin():
    values, precision = (
        torch.randn(70000, 1, generator=torch.Generator().manual_seed(0)) + 0.3,
        PRECISIONS["int8"],
    )
    read = precision.decode(precision.encode(values), 70000, 1)
    assert float((read - values).abs().max()) < 0.06 and float((read - values).mean().abs()) < 1e-3


@pytest.mark.parametrize("scale", [1e-25, 1e-18, 1e15])
@pytest.mark.parametrize("name", PRECISIONS)
def test_precisions_read_the_smallest_and_the_largest_values(name, scale):
    values = torch.randn(300, 7, generator=torch.Generator().manual_seed(0)) * scale
    read = PRECISIONS[name].decode(PRECISIONS[name].encode(values), 300, 7)
    assert read.isfinite().all() and float((read * values).sign().min()) >= 0


def test_ways_to_combine():
    values = torch.tensor([[[1.0, 2.0]], [[3.0, -2.0]], [[-5.0, -2.0]]])
    sent = Coefficients(values, torch.tensor([[[0, 1]], [[0, 3]], [[0, 1]]]))
    assert aggregate(sent, AGGREGATIONS["mean"], 4).tolist() == [
        [pytest.approx(-1 / 3), 0, 0, pytest.approx(-2 / 3)]
    ]
    assert aggregate(sent, AGGREGATIONS["mean_nonzero"], 4).tolist() == [
        [pytest.approx(-1 / 3), 0, 0, -2]
    ]
    assert aggregate(sent, AGGREGATIONS["majority_vote"], 4).tolist() == [
        [3, 0, 0, pytest.approx(-2 / 3)]
    ]


def test_a_rescaled_mean_is_as_long_as_the_messages():
    rescaled = AGGREGATIONS["rescaled_mean"]
    values = torch.tensor(
        [[[3.0, 4.0], [1.0, 0.0], [2.0, 2.0]], [[3.0, 4.0], [0.0, 1.0], [-2.0, -2.0]]]
    )
    agreed = aggregate(
        Coefficients(values, None), rescaled, 2
    )  # equal messages, right angles, opposite ones
    torch.testing.assert_close(agreed, torch.tensor([[3.0, 4.0], [0.5**0.5, 0.5**0.5], [0.0, 0.0]]))
    nearly_opposite = torch.tensor(
        [[[1.0, 0.0]], [[-0.98, 0.0]]]
    )  # no more than by the square root of two
    torch.testing.assert_close(
        rescaled(nearly_opposite, None, 2), torch.tensor([[0.01 * 2**0.5, 0.0]])
    )
    sparse = rescaled(values[:, :1], torch.tensor([[[0, 2]], [[0, 3]]]), 4)
    torch.testing.assert_close(sparse, torch.tensor([[3.0, 0.0, 2.0, 2.0]]) * 5 / 17**0.5)
    tiny = torch.full((2, 1, 2), 1e-30)  # whose squares are 0
    assert torch.equal(rescaled(tiny, None, 2), tiny[0])


def test_clipping_to_the_median_holds_down_one_that_is_too_loud():
    honest = torch.randn(3, 10, 4, generator=torch.Generator().manual_seed(0)) + 1
    attacked = Coefficients(torch.cat([honest, -1e6 * honest[:1]]), None)
    plain, clipped = (aggregate(attacked, AGGREGATIONS[way], 4) for way in ("mean", "clipped_mean"))
    truth = honest.mean(0).flatten()
    agreement = [torch.cosine_similarity(c.flatten(), truth, dim=0) for c in (plain, clipped)]
    assert agreement[0] < 0 < 0.8 < agreement[1]


def test_the_median_norm_is_that_of_the_replicas_that_sent_something():
    norms = torch.tensor([0.0, 0.0, 1.0, 2.0, 8.0])
    assert AGGREGATIONS["clipped_mean"].weights(norms).tolist() == [1.0, 1.0, 1.0, 1.0, 0.25]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("chunk", [65_536, 65_537, 1 << 20])
def test_a_chunk_may_be_longer_than_sixteen_bits_count(chunk, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(kernel_library, "load_library", lambda: None)
    coding = IndexCoding(chunk, 9)
    generator = torch.Generator().manual_seed(0)
    indices = torch.stack(
        [torch.randperm(chunk, generator=generator)[:9].sort().values for _ in range(5)]
    )
    encoded = coding.encode(indices)
    assert len(encoded) == coding.nbytes(5) and torch.equal(
        coding.decode(encoded, 5, torch.int64), indices
    )
