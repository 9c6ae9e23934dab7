"""Muon on shards against torch's own on whole matrices, and what it means for a matrix."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import detonation as dt
import worlds
from detonation.core.optim import matrices
from detonation.gates.single_rounding import SingleRounding
from zoo import batch

pytestmark = pytest.mark.usefixtures("lasting_worlds")


class Matrices(nn.Module):
    """Matrices of every kind: tall, wide, of uneven shards, a single row; and what goes by AdamW."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(32, 64), (64, 7), (7, 33), (33, 1), (1, 5)]
        self.layers = nn.ModuleList([nn.Linear(a, b, bias=b == 64) for a, b in sizes])
        self.table = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):  # [batch, 32] -> [batch]
        for layer in self.layers:
            x = layer(x).tanh()
        return (x @ self.table).square().mean(1)


def groups(model):
    rest = [model.table]
    return [
        {"params": [p for p in model.parameters() if p is not model.table]},
        {"params": rest, "orthogonal": False},
    ]


def trained(model, optimizers):
    for step in range(6):
        model(batch(0, step, 32)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.named_parameters())


def on_shards(mesh):
    torch.manual_seed(0)
    plain = Matrices()
    matrices = [p for p in plain.parameters() if p.ndim == 2 and p is not plain.table]
    rest = [p for p in plain.parameters() if p.ndim == 1 or p is plain.table]
    muon = torch.optim.Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw")
    with patch.object(
        torch.Tensor, "bfloat16", torch.Tensor.float
    ):  # torch's computes in bf16 on CPUs, too
        wanted = trained(
            plain, [muon, torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)]
        )
    torch.manual_seed(0)
    model = dt.shard(Matrices(), mesh)
    mine = trained(model, [dt.Muon(groups(model), lr=0.02)])
    for name, p in wanted.items():
        torch.testing.assert_close(mine[name].full_tensor(), p, atol=2e-5, rtol=0)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_muon_on_shards_is_torchs_on_whole_matrices(shards):
    worlds.run(on_shards, 1, shards)


def test_a_matrix_moves_in_an_orthogonal_direction():
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.randn(24, 40))
    start, matrix.grad = matrix.detach().clone(), torch.randn(24, 40) ** 3
    dt.Muon([matrix], lr=1.0, momentum=0.0, weight_decay=0.0).step()
    singular = torch.linalg.svdvals((start - matrix.detach()) / (0.2 * 40**0.5))
    assert singular.min() > 0.4 and singular.max() < 1.4


class Products(TorchDispatchMode):
    """Notes the dtypes that matrices are multiplied in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.add(args[-1].dtype)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_multiplies_in_fp32_on_cpus_and_in_bf16_on_accelerators(dtype):
    """Products in bf16 take 16 to 35 times as long on a CPU without instructions for them."""
    for device, wanted in (("cpu", torch.float32), ("meta", torch.bfloat16)):
        matrix = nn.Parameter(torch.ones(3, 4, dtype=dtype, device=device))
        matrix.grad = torch.ones_like(matrix)
        with Products() as products:
            dt.Muon([matrix]).step()
        assert products.dtypes == {wanted}, device


def test_muon_refuses_what_it_cannot_do():
    for bad in ({"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -0.1}):
        with pytest.raises(ValueError, match="must be"):
            dt.Muon([nn.Parameter(torch.ones(2, 2))], **bad)


FORMS = {
    "jordan": {},
    "polar_express": {"coefficients": "polar_express"},
    "normuon": {"muon_beta2": 0.95},
    "both": {"coefficients": "polar_express", "muon_beta2": 0.9, "momentum": 0.8},
}
SHAPES = [(24, 40), (40, 24), (7, 33), (33, 1), (1, 5), (16, 16), (3, 2), (9, 64)]


def numbers(shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def stepped(form, dtype, cut):
    """Whole weights and states after three steps of matrices that `cut(number, tensor)` has cut."""
    weights = [nn.Parameter(cut(at, numbers(shape, at, dtype))) for at, shape in enumerate(SHAPES)]
    optimizer = dt.Muon(weights, lr=0.1, **FORMS[form])
    for step in range(1, 4):
        for at, weight in enumerate(weights):
            weight.grad = None
            if step != 2 or at % 3:  # others are unused in the second step
                weight.grad = cut(at, numbers(weight.shape, 100 * step + at, dtype))
        optimizer.step()
    states = [optimizer.state[weight] for weight in weights]
    found = [*weights, *(value for state in states for _, value in sorted(state.items()))]
    return [whole(each.detach()) for each in found]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def alone(at, tensor):
    return tensor.clone()


def of_any_cut(mesh, form, dtype, group_bytes):
    """By rows, by columns, and a matrix that every rank holds.

    torch rounds bf16 differently at the end of a shard (`rounds_by_place`), unless each operation is rounded singly.
    """
    axis = mesh["shard"]

    def cut(at, tensor):
        placement = Replicate() if at == 5 else Shard(at % 2)
        return distribute_tensor(tensor, axis, [placement])

    rounding = SingleRounding() if dtype == torch.bfloat16 else nullcontext()
    with patch.object(matrices, "GROUP_BYTES", group_bytes), rounding:
        found = stepped(form, dtype, cut)
        wanted_ones = stepped(form, dtype, alone)
    for mine, wanted in zip(found, wanted_ones, strict=True):
        assert torch.equal(mine, wanted), (mine.shape, (mine - wanted).abs().max())


@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_any_number_of_shards_takes_the_steps_of_whole_matrices_bit_for_bit(shards, form):
    for dtype, group_bytes in ((torch.float32, 2**26), (torch.bfloat16, 1)):
        worlds.run(of_any_cut, 1, shards, form, dtype, group_bytes)


def of_two_axes(mesh, form):
    axes = [
        [Shard(0), Shard(1)],
        [Replicate(), Shard(0)],
        [Shard(1), Replicate()],
        [Shard(0), Shard(0)],
    ]

    def cut(at, tensor):
        return distribute_tensor(tensor, mesh, axes[at % 4])

    found = stepped(form, torch.float32, cut)
    for mine, wanted in zip(found, stepped(form, torch.float32, alone), strict=True):
        assert torch.equal(mine, wanted), mine.shape


@pytest.mark.parametrize("form", ["jordan", "normuon"])
def test_matrices_sharded_over_several_axes_take_the_same_steps(form):
    worlds.run(of_two_axes, 2, 2, form)
