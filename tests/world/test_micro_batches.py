"""Several micro-batches per step: `full` sends their sum once, as torch does on request."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

import detonation as dt
import worlds
from detonation.core.flat.tensors import digest
from zoo import Plain, batch, built

pytestmark = pytest.mark.usefixtures("lasting_worlds")

STEPS = 3
HEADER = 24  # bytes


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def losses(mesh, model, step, count):
    """The loss of each micro-batch, divided so that gradients add up to the mean."""
    for number in range(count):
        examples = batch(mesh.get_rank(), count * step + number, 32)
        yield number, model(examples).mean() / count


def with_full(mesh, count, overlap=False):
    """Bytes per step between replicas, collectives of each step, and the weights."""
    model = dt.shard(built(Plain), mesh)
    optimizer = dt.replicate(
        adamw(model), model, mesh["replicate"], dt.full(), safety=dt.Safety(verify_every=0)
    )
    collectives = []
    for step in range(STEPS):
        for number, loss in losses(mesh, model, step, count):
            last = overlap and number == count - 1
            if last:
                with optimizer.overlap():
                    loss.backward()
            else:
                loss.backward()
        with CommDebugMode() as seen:
            optimizer.step()
        collectives.append(seen.get_total_counts())
        optimizer.zero_grad()
    return optimizer.stats.bytes_sent / STEPS, collectives[1:], digest(model.parameters())


def with_hybrid_sharding(mesh, count, once):
    """All-reduces of a step of torch's hybrid sharding, their bytes, and the weights.

    once: whether only the last micro-batch is all-reduced.
    """
    model = built(Plain)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh).set_force_sum_reduction_for_comms(True)
    optimizer = adamw(model)
    sizes = []
    all_reduce = dist.all_reduce

    def counted(tensor, *arguments, **options):
        sizes.append(tensor.nbytes)
        return all_reduce(tensor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        for step in range(STEPS):
            for number, loss in losses(mesh, model, step, count):
                if once:
                    model.set_requires_all_reduce(number == count - 1)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return len(sizes) / STEPS, sum(sizes) / STEPS, digest(model.parameters())


def compared(mesh, count):
    return (
        with_full(mesh, count),
        with_full(mesh, count, overlap=True),
        with_hybrid_sharding(mesh, count, once=False),
        with_hybrid_sharding(mesh, count, once=True),
    )


@pytest.mark.parametrize("count", [1, 4])
def test_law_6_full_sends_micro_batches_once_as_hybrid_sharding_does_on_request(count):
    for ours, overlapped, always, once in worlds.run(compared, 2, 2, count):
        units, dense, weights = once
        assert ours == (dense + HEADER, [2, 2], weights)  # the stop and the message
        assert overlapped == (dense + HEADER, [1, 1], weights)  # backward sent the message
        assert always[:2] == (count * units, count * dense)
        assert (always[2] == weights) == (count == 1)  # sums in another order
