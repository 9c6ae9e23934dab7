"""The dtype in which FSDP2 adds gradients: the policy names it, or a line says what torch does."""

import logging

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import detonation as dt
import worlds
from zoo import Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

BF16 = torch.bfloat16


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Sums(TorchDispatchMode):
    """The dtypes that reduce-scatters add."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if "reduce_scatter" in str(function):
            tensors = filter(torch.is_tensor, tree_leaves(arguments))
            self.dtypes |= {tensor.dtype for tensor in tensors}
        return function(*arguments, **options or {})


def said(mesh, dtype, policy, own=False):
    """What is logged of two optimizers of one model, and the dtypes of torch's sums."""
    seen, sums = Lines(), Sums()
    model = built(Plain).to(dtype)
    logger = logging.getLogger("detonation")
    logger.addHandler(seen)
    if own:
        for module in (*model.layers, model):
            unit = fully_shard(module, mesh=mesh["shard"], mp_policy=policy)
            unit.set_force_sum_reduction_for_comms(True)
    else:
        dt.shard(model, mesh, policy)
    for _ in range(2):
        adam = torch.optim.AdamW(model.parameters())
        optimizer = dt.replicate(adam, model, mesh["replicate"], dt.full())
        with sums:
            model(batch(0, 0, 32).to(dtype)).float().mean().backward()
        optimizer.step()
    logger.removeHandler(seen)
    return [line for line in seen.lines if "reduce_dtype" in line], sums.dtypes


@pytest.mark.parametrize("own", [False, True], ids=["dt.shard", "fully_shard"])
def test_a_policy_without_reduce_dtype_is_told_once_with_its_bytes(own):
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    first, *others = worlds.run(said, 1, 2, torch.float32, policy, own)
    (line,) = first[0]
    assert "torch.bfloat16 before version 2.15 (2 bytes per parameter)" in line
    assert "the dtype of the parameters (4 bytes)" in line
    assert line.endswith("pass reduce_dtype=torch.float32 to MixedPrecisionPolicy")
    assert all(lines == [] for lines, _ in others)


QUIET = {
    "named": (torch.float32, {"param_dtype": BF16, "reduce_dtype": torch.float32}, torch.float32),
    "no policy": (torch.float32, None, torch.float32),
    "no policy, bf16": (BF16, None, BF16),
    "of bf16 weights": (BF16, {"param_dtype": BF16}, BF16),
}


@pytest.mark.parametrize("dtype, policy, sums", QUIET.values(), ids=QUIET)
def test_a_policy_that_means_one_thing_in_every_version_is_not_told(dtype, policy, sums):
    made = MixedPrecisionPolicy(**policy) if policy else None
    assert worlds.run(said, 1, 2, dtype, made) == [([], {sums})] * 2


def test_one_shard_adds_nothing_so_nothing_is_told():
    policy = MixedPrecisionPolicy(param_dtype=BF16)
    assert [lines for lines, _ in worlds.run(said, 2, 1, torch.float32, policy)] == [[], []]


def refusals(mesh):
    """The errors of wrong policies; the model stays as it was."""
    model = built(Plain)
    found = []
    for wrong in ({"mp_policy": MixedPrecisionPolicy()}, *({"mixed_precision": x} for x in WRONG)):
        with pytest.raises((TypeError, ValueError)) as error:
            dt.shard(model, mesh, **wrong)
        found.append(str(error.value))
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    return found


WRONG = (BF16, "bf16")


def test_shard_shows_a_policy_where_it_was_given_none():
    hint, *others = worlds.run(refusals, 1, 1)[0]
    assert hint == (
        "unknown argument of shard 'mp_policy', did you mean 'mixed_precision'? Valid: mesh,"
        " mixed_precision, model, wire"
    )
    assert others == [
        f"mixed_precision is {wrong!r}, must be a policy of torch.distributed.fsdp:"
        " MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        for wrong in WRONG
    ]
