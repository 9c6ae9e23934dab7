"""Steps whose every operation is rounded by itself: against the same operations one after another, in any order."""

import math
from fractions import Fraction

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import detonation as dt
import worlds
from detonation.gates.single_rounding import SingleRounding


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stepped(make, shapes=((33, 17), (5,), (64, 64)), singly=True, steps=3):
    parameters = [
        torch.nn.Parameter(numbers(*shape, seed=each)) for each, shape in enumerate(shapes)
    ]
    optimizer = make(parameters)
    for step in range(steps):
        for each, parameter in enumerate(parameters):
            parameter.grad = numbers(*parameter.shape, seed=10 * step + each + 100)
        if singly:
            with SingleRounding():
                optimizer.step()
        else:
            optimizer.step()
    return [parameter.detach() for parameter in parameters]


def test_adamw_is_its_formula_with_every_operation_rounded():
    lr, (slow, slower), eps, decay = 1e-3, (0.9, 0.999), 1e-8, 0.1
    (found,) = stepped(lambda p: torch.optim.AdamW(p, lr=lr, eps=eps, weight_decay=decay), [(7, 9)])
    weight, mean, square = numbers(7, 9), torch.zeros(7, 9), torch.zeros(7, 9)
    for step in range(3):
        gradient = numbers(7, 9, seed=10 * step + 100)
        weight = weight * (1 - lr * decay)
        mean = mean + (gradient - mean) * (1 - slow)
        square = square * slower + gradient * gradient * (1 - slower)
        root = torch.tensor([math.sqrt(each) for each in square.view(-1).tolist()]).view(
            7, 9
        )  # fp64, then rounded
        below = root * (1 / (1 - slower ** (step + 1)) ** 0.5) + eps
        weight = weight + mean / below * (-lr / (1 - slow ** (step + 1)))
    assert torch.equal(found, weight)


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax"]
)
def test_an_optimizer_takes_nearly_the_steps_of_torch_alike_with_lists_and_without(name):
    more = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1} if name == "SGD" else {}

    def make(parameters, lists=False):
        return getattr(torch.optim, name)(parameters, lr=1e-2, foreach=lists, **more)

    plain, singly = stepped(make, singly=False), stepped(make)
    for one, other in zip(plain, singly, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    if name not in (
        "NAdam",
        "RAdam",
        "Adadelta",
        "Adagrad",
        "SGD",
    ):  # whose lists are other formulas
        lists = stepped(lambda p: make(p, lists=True))
        assert all(map(torch.equal, lists, singly))


def test_products_and_norms_are_the_same_in_any_order_and_near_those_of_torch():
    one, other, own = numbers(40, 300), numbers(300, 50, seed=1), numbers(40, 50, seed=2)
    shuffled = torch.randperm(300, generator=torch.Generator().manual_seed(3))
    with SingleRounding():
        product, again = one @ other, one[:, shuffled] @ other[shuffled]
        added = torch.addmm(own, one, other, beta=0.5, alpha=2.0)
        norm, norm_again = one.norm(), one.flip(1).norm()
    assert torch.equal(product, again) and torch.equal(norm, norm_again)
    torch.testing.assert_close(product, one @ other, rtol=1e-4, atol=1e-4)
    assert torch.equal(added, own * 0.5 + product * 2)
    torch.testing.assert_close(norm, one.norm(), rtol=1e-6, atol=0)


def test_a_product_is_the_sum_of_fractions_rounded_once():
    """Of whole numbers of few bits nothing is lost before the sum."""
    one, other = (numbers(6, 9) * 64).round() / 64, (numbers(9, 4, seed=1) * 64).round() / 64
    with SingleRounding():
        product = one @ other
    for row, column in ((0, 0), (5, 3), (2, 1)):
        terms = zip(one[row].tolist(), other[:, column].tolist(), strict=True)
        exact = sum(Fraction(a) * Fraction(b) for a, b in terms)
        assert product[row, column] == torch.tensor(float(exact))


def test_what_has_no_rule_or_no_fractions_is_as_ever():
    whole = torch.arange(12).view(3, 4)
    with SingleRounding():
        assert torch.equal(
            whole @ whole.T, torch.tensor([[14, 38, 62], [38, 126, 214], [62, 214, 366]])
        )
        assert torch.zeros(0, 3).norm() == 0 and torch.equal(
            torch.zeros(2, 0) @ torch.zeros(0, 2), torch.zeros(2, 2)
        )
        assert torch.equal(torch.zeros(3, 3) @ torch.ones(3, 3), torch.zeros(3, 3))
        assert (numbers(3) / 0.0).isinf().all() and torch.equal(
            numbers(4) / numbers(4), torch.ones(4)
        )
        assert torch.equal(numbers(3, 3).norm(dim=0), numbers(3, 3).norm(dim=0))
        out = torch.empty(3)
        assert torch.add(numbers(3), numbers(3), alpha=2, out=out) is out


def test_bf16_weights_and_a_rate_that_is_a_tensor_are_taken():
    def make(parameters):
        return torch.optim.AdamW(
            [p.data.bfloat16().requires_grad_() for p in parameters], lr=torch.tensor(1e-3)
        )

    parameter = torch.nn.Parameter(numbers(8, 8).bfloat16())
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(1e-3))
    parameter.grad = torch.ones(8, 8, dtype=torch.bfloat16)
    with SingleRounding():
        optimizer.step()
    assert parameter.dtype == torch.bfloat16 and not torch.equal(
        parameter, numbers(8, 8).bfloat16()
    )


def _sharded(mesh):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 33), torch.nn.Linear(33, 20))
    fully_shard(model, mesh=mesh["shard"])
    optimizers = (
        dt.Muon(model.parameters(), lr=1e-2),
        dt.Muon(model.parameters(), lr=1e-2, muon_beta2=0.9),
        torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True),
    )
    for number, optimizer in enumerate(optimizers):
        model(numbers(4, 48, seed=number)).square().mean().backward()
        with SingleRounding():
            optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def test_shards_step_singly_rounded_too():
    """To the bits of two ranks that hold half each, and of one that holds all."""
    (one,), (first, second) = worlds.run(_sharded, 1, 1), worlds.run(_sharded, 1, 2)
    for a, b, c in zip(one, first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert torch.equal(b, c)
