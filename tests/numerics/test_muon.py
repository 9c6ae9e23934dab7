"""Muon on shards against torch's own on whole matrices, and what it means for a matrix."""

import copy
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from benchmarks.step import muon
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import detonation as dt
import worlds
from detonation.gates.single_rounding import SingleRounding
from detonation.muon import matrices
from detonation.muon.muon import _newton_schulz, _OrthogonalStep
from zoo import batch

pytestmark = pytest.mark.usefixtures("lasting_worlds")


class Matrices(nn.Module):
    """Matrices: tall, wide, of uneven shards, a single row; and what goes by AdamW."""

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

    torch rounds bf16 differently at the end of a shard (`rounds_by_place`), unless each operation
    is rounded singly.
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


def as_on_accelerators(mesh, form):
    """fp32 weights whose directions travel in bf16."""
    begin = _OrthogonalStep.__init__

    def in_bf16(step, *arguments):
        begin(step, *arguments)
        step.dtype = torch.bfloat16

    with patch.object(_OrthogonalStep, "__init__", in_bf16):
        of_any_cut(mesh, form, torch.float32, 2**26)


@pytest.mark.parametrize("form", ["jordan", "normuon"])
def test_bf16_on_the_way_changes_no_bit(form):
    worlds.run(as_on_accelerators, 1, 2, form)


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


def counted(mesh, way):
    return muon.step(16, 2, way)


def test_a_node_computes_each_matrix_once_by_two_collectives():
    """As many products as one rank alone, spread over all; on every rank they cost S times that."""
    (one,) = worlds.run(counted, 1, 1, muon.OWNER)
    node = worlds.run(counted, 1, 4, muon.OWNER)
    products = [rank["products"] for rank in node]
    assert sum(products) == one["products"] and max(products) * 4 <= muon.MOST * sum(products)
    assert {rank["collectives"] for rank in node} == {2}
    every = worlds.run(counted, 1, 4, muon.EVERY_RANK)
    assert [rank["products"] for rank in every] == [one["products"]] * 4
    assert sum(rank["nbytes"] for rank in node) * 2 == sum(rank["nbytes"] for rank in every)


def test_owners_have_equally_much_to_do():
    costs = [9, 7, 6, 5, 5, 4, 4, 4, 3, 1]
    owners = matrices.owners_of(costs, 3)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == each) for each in range(3)]
    assert max(loads) == 16 and sum(loads) == 48
    assert matrices.owners_of([], 2) == [] and matrices.owners_of([1], 2) == [0]


def polar(matrix):
    """The published algorithm, in fp32."""
    margin = 1.01
    x = matrix / (matrix.norm() * margin + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.T
        x = a / margin * x + (b / margin**3 * gram + c / margin**5 * gram @ gram) @ x
    return x


POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
"""Amsel et al., algorithm 1."""


def test_polar_express_and_normuon_are_the_published_ones():
    """NorMuon's algorithm 1, with Nesterov's momentum: a step has a root mean square of 0.2 lr."""
    weight = nn.Parameter(numbers((12, 20), 0))
    wanted, momentum, moment = weight.detach().clone(), torch.zeros(12, 20), torch.zeros(12, 1)
    optimizer = dt.Muon(
        [weight], lr=0.1, weight_decay=0.5, coefficients="polar_express", muon_beta2=0.9
    )
    for step in range(4):
        gradient = numbers((12, 20), step + 1) ** 3
        weight.grad = gradient.clone()
        optimizer.step()
        momentum = 0.95 * momentum + 0.05 * gradient
        direction = polar(0.05 * gradient + 0.95 * momentum)
        moment = 0.9 * moment + 0.1 * direction.square().mean(1, keepdim=True)
        direction = direction / (moment.sqrt() + 1e-8)
        moved = 0.2 * 0.1 * (12 * 20) ** 0.5 / direction.norm() * direction
        wanted = wanted * (1 - 0.1 * 0.5) - moved
        torch.testing.assert_close(weight.detach(), wanted, atol=1e-5, rtol=1e-5)
    assert optimizer.state[weight]["second_momentum_buffer"].shape == (12,)


def test_polar_express_is_nearer_to_an_orthogonal_matrix():
    """Jordan's polynomial leaves singular values between 0.68 and 1.14."""
    matrix = numbers((24, 40), 0) ** 3
    apart = {}
    for name in ("jordan", "polar_express"):
        singular = torch.linalg.svdvals(_newton_schulz(matrix, name))
        apart[name] = float((singular - 1).abs().max())
    assert apart["polar_express"] < 0.15 < 0.3 < apart["jordan"]


@pytest.mark.parametrize("form", FORMS)
def test_no_gradient_moves_nothing(form):
    """Law 11, also where rows are divided by the root of zero."""
    weight = nn.Parameter(torch.ones(3, 5))
    weight.grad = torch.zeros(3, 5)
    optimizer = dt.Muon([weight], weight_decay=0.0, **FORMS[form])
    for _ in range(2):
        optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(3, 5))


def test_a_state_of_before_has_no_options_of_now():
    """A state that an older version saved, and options that a group sets itself."""
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = dt.Muon([weight], coefficients="polar_express", muon_beta2=0.9)
    state = optimizer.state_dict()
    for key in ("coefficients", "muon_beta2"):
        del state["param_groups"][0][key]
    optimizer.load_state_dict(state)
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    group = optimizer.param_groups[0]
    assert (group["coefficients"], group["muon_beta2"]) == ("jordan", None)
    with pytest.raises(ValueError, match=r"muon_beta2 is 1\.5, must be"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "muon_beta2": 1.5})
    with pytest.raises(ValueError, match="unknown coefficients 'polar_exp', did you mean"):
        dt.Muon([weight], coefficients="polar_exp")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"eps": -1.0}, "eps is -1.0, must be a number of at least 0"),
        ({"lr": "0.1"}, "lr is '0.1', must be a number of at least 0"),
        ({"lr": float("nan")}, "lr is nan, must be a number of at least 0"),
        ({"weight_decay": None}, "weight_decay is None, must be a number of at least 0"),
        ({"momentum": torch.ones(2)}, "momentum is tensor"),
        ({"momentum": 1}, "momentum is 1, must be a number from 0 to below 1"),
        ({"betas": (0.9,)}, r"betas is \(0.9,\), must be two numbers"),
        ({"betas": (0.9, 0.95, 0.99)}, "must be two numbers"),
        ({"betas": "no"}, "betas is 'no', must be two numbers"),
        ({"betas": (0.9, 1.0)}, "a number of betas is 1.0, must be a number from 0 to below 1"),
        ({"orthogonal": "no"}, "orthogonal is 'no', must be True or False"),
        ({"eps": 0.0, "muon_beta2": 0.9}, "eps is 0, must be above 0 with muon_beta2"),
    ],
)
def test_values_that_no_step_could_use_are_refused_at_once(options, text):
    group = {"params": [nn.Parameter(torch.ones(2, 3))]}
    with pytest.raises(ValueError, match=text):
        dt.Muon([{**group, **options}])
    if "orthogonal" not in options:
        with pytest.raises(ValueError, match=text):
            dt.Muon([group], **options)


def group_of(*parameters, **options):
    return {"params": [*parameters], **options}


@pytest.mark.parametrize(
    "key, near",
    [
        ("ortogonal", "orthogonal"),
        ("orthogonalize", "orthogonal"),
        ("is_orthogonal", "orthogonal"),
        ("weightdecay", "weight_decay"),
        ("beta", "betas"),
        ("momentun", "momentum"),
        ("coefficient", "coefficients"),
        ("muon_beta", "muon_beta2"),
        ("LR", "lr"),
    ],
)
def test_a_misspelt_key_of_a_group_is_refused(key, near):
    group = group_of(nn.Parameter(torch.ones(2, 3)), **{key: 0.5})
    said = f"unknown key of a group of Muon '{key}', did you mean '{near}'\\? Valid: betas, "
    with pytest.raises(ValueError, match=said):
        dt.Muon([group])


def test_keys_that_other_tools_write_pass():
    """Of schedulers, of torch's optimizers and named parameters, of timm, DeepSpeed and others."""
    keys = """initial_lr max_lr min_lr base_lr lr_ratio lr_scale lr_mult base_momentum max_momentum
    decoupled_weight_decay name names param_names group_name layer_name layer_id use_muon nesterov
    ns_steps adjust_lr_fn dampening foreach maximize capturable differentiable fused amsgrad
    correct_bias wd_mult is_expert moe bias_correction step swap_state weight_decay_multiplier
    initial_weight_decay k r tag model_name module_name no_decay"""
    group = group_of(nn.Parameter(torch.ones(2, 3)), **dict.fromkeys(keys.split(), 1))
    optimizer = dt.Muon([group])
    again = dt.Muon(optimizer.param_groups)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    assert again.param_groups[0]["model_name"] == 1


def test_a_complex_matrix_is_refused_unless_adamw_moves_it():
    matrix = nn.Parameter(torch.ones(2, 3, dtype=torch.complex64))
    optimizer = dt.Muon([nn.Parameter(torch.ones(2, 3))])
    for add in (lambda: dt.Muon([matrix]), lambda: optimizer.add_param_group(group_of(matrix))):
        with pytest.raises(
            ValueError, match=r"a matrix \(2, 3\) is torch\.complex64, must be real"
        ):
            add()
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group(group_of(matrix, orthogonal=False))
    matrix.grad = torch.full_like(matrix, 1 - 1j)
    optimizer.step()
    assert matrix.detach().imag.min() > 0 and matrix.detach().real.max() < 1


@pytest.mark.parametrize(
    "options, text",
    [
        ({"coefficients": "zolo"}, "unknown coefficients 'zolo'. Valid: jordan, polar_express"),
        ({"orthogonal": "no"}, "orthogonal is 'no', must be True or False"),
        ({"betas": 0.9}, "betas is 0.9, must be two numbers"),
        ({"momentum": 1.5}, "momentum is 1.5, must be a number from 0 to below 1"),
        ({"muon_beta2": "x"}, "muon_beta2 is 'x', must be a number from 0 to below 1"),
    ],
)
def test_a_bad_value_that_a_loop_writes_into_a_group_is_named(options, text):
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = dt.Muon([weight])
    optimizer.param_groups[0].update(options)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(2, 3))


def test_an_lr_that_a_schedule_rounds_below_zero_makes_a_step():
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = dt.Muon([weight])
    optimizer.param_groups[0]["lr"] = -1e-20
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def test_values_that_signsgd_could_not_use_are_refused_in_groups_too():
    group = {"params": [nn.Parameter(torch.ones(2, 3))]}
    for options in ({"lr": -0.1}, {"momentum": 1.0}, {"weight_decay": float("inf")}):
        with pytest.raises(ValueError, match="must be a number"):
            dt.SignSGD([{**group, **options}])
    dt.SignSGD([group], lr=torch.tensor(0.1))


def test_the_state_of_the_muon_of_torch_is_refused():
    """It has neither AdamW's settings nor the groups that AdamW updates."""
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = dt.Muon([weight], lr=0.5)
    with pytest.raises(ValueError, match="its groups lack betas and orthogonal"):
        optimizer.load_state_dict(torch.optim.Muon([weight]).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_loaded_second_moment_keeps_its_dtype(dtype):
    """torch casts every loaded state to the dtype of its parameter."""

    def step(optimizer, weight, number):
        torch.manual_seed(number)
        weight.grad = torch.randn(4, 6).to(dtype)
        optimizer.step()

    weights = [nn.Parameter(torch.ones(4, 6, dtype=dtype)) for _ in range(2)]
    first, second = (dt.Muon([weight], lr=0.1, muon_beta2=0.9) for weight in weights)
    for number in range(3):
        step(first, weights[0], number)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        weights[1].copy_(weights[0])
    for number in range(3, 5):
        step(first, weights[0], number)
        step(second, weights[1], number)
    assert torch.equal(*(weight.detach() for weight in weights))
    assert second.state[weights[1]]["second_momentum_buffer"].dtype == torch.float32
    assert (
        second.state[weights[1]]["second_momentum_buffer"].data_ptr()
        != first.state[weights[0]]["second_momentum_buffer"].data_ptr()
    )


def tall_in_16_bits(mesh, dtype):
    """How many weights of a tall matrix differ between the steps of two shards and of the whole matrix."""
    torch.manual_seed(0)
    start = torch.randn(64, 60).to(dtype)
    shards = nn.Parameter(distribute_tensor(start, mesh["shard"], [Shard(0)]))
    whole = nn.Parameter(start.clone())
    for each in (shards, whole):
        optimizer = dt.Muon([each], lr=0.3)
        for step in range(3):
            torch.manual_seed(step)
            gradient = torch.randn(64, 60).to(dtype)
            each.grad = gradient
            if each is shards:
                each.grad = distribute_tensor(gradient, mesh["shard"], [Shard(0)])
            optimizer.step()
    return int((shards.detach().full_tensor() != whole.detach()).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tall_matrices_of_16_bits_take_the_same_steps_on_shards(dtype):
    assert worlds.run(tall_in_16_bits, 1, 2, dtype) == [0, 0]


def test_a_matrix_can_go_over_to_adamw():
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = dt.Muon([weight])
    for orthogonal in (True, False, True):
        optimizer.param_groups[0]["orthogonal"] = orthogonal
        weight.grad = torch.ones(4, 4)
        before = weight.detach().clone()
        optimizer.step()
        assert not torch.equal(weight, before)
