"""Plain torch on a CPU, as without a compiler: the same results as the plainest form, and how much it writes for them.

What it writes is counted in numbers per row, over all operations: this is what most of its time depends on.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from detonation.core.codec.indices import index_faults
from detonation.core.codec.selection import TopK
from detonation.core.compute import kernel_library
from detonation.core.compute.scatter_sum import beside_each_other

ROWS = 400


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.setattr(kernel_library, "load_library", lambda: None)


class Written(TorchDispatchMode):
    """Counts the numbers that operations write."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view and isinstance(out, torch.Tensor) and "empty" not in str(function):
            self.numbers += out.numel()
        return out


def written(work):
    """Numbers per row, in a second call: the first one fills caches."""
    work()
    with Written() as counted:
        work()
    return counted.numbers / ROWS


def drawn(k, chunk=64, rows=ROWS):
    """Rising indices of each row."""
    generator = torch.Generator().manual_seed(k)
    return torch.rand(rows, chunk, generator=generator).argsort(1)[:, :k].sort(1).values


@pytest.mark.parametrize(("topk", "most"), [(1, 160), (4, 400), (12, 1100), (13, 1250), (32, 1750)])
def test_a_selection_writes_few_numbers(topk, most):
    numbers = torch.randn(64, ROWS, generator=torch.Generator().manual_seed(0)).t()
    assert written(lambda: TopK(topk, 64).indices(numbers, 0, 0)) <= most


@pytest.mark.parametrize("chunk", [2, 8, 64, 256])
def test_maxima_one_after_the_other_are_those_of_a_sort(chunk):
    numbers = torch.randn(ROWS, chunk, generator=torch.Generator().manual_seed(chunk))
    numbers[0], numbers[1], numbers[2] = 0.0, -torch.inf, torch.nan
    numbers[3::3] = numbers[3::3].round()
    keys = numbers.view(torch.int32) & (0x7FFFFFFF & -chunk)
    order = keys.argsort(dim=1, descending=True, stable=True)
    for topk in range(1, min(chunk, 14) + 1):
        expected = order[:, :topk].sort(1).values
        assert torch.equal(TopK(topk, chunk).indices(numbers, 0, 0), expected)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_indices_that_fall_are_found_within_a_row_only(k):
    indices = drawn(k, 40).byte().expand(3, -1, -1).clone()
    assert index_faults(indices, 64, 6).tolist() == [0, 0, 0]
    indices[1, -1] = indices[1, -1].flip(0)
    indices[2, 0, -1] = 41
    assert index_faults(indices, 64, 6).tolist() == [0, 2 * (k > 1), 0]
    assert index_faults(indices, 40, 6).tolist() == [0, 2 * (k > 1), 1]
    assert index_faults(indices[:, :0], 40, 6).tolist() == [0, 0, 0]


def test_messages_are_laid_side_by_side_by_concatenation():
    """Copies of a few numbers a row into a wider matrix take three times as long."""
    values = list(torch.randn(3, ROWS, 4).unbind())
    indices = [drawn(4).byte()] * 3
    with Written() as counted:
        beside, where = beside_each_other(values, indices)
    assert torch.equal(beside.view(ROWS, 3, 4), torch.stack(values, 1))
    assert torch.equal(where.view(ROWS, 3, 4), torch.stack(indices, 1).int())
    assert counted.numbers == 36 * ROWS
