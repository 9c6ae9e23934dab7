"""Gradients that FSDP2 delivers when backward ends: no bucket of other gradients waits for them."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import detonation as dt
import worlds
from detonation.core.flat.layout import Layout
from detonation.core.flat.rows import BUCKETS
from detonation.core.flat.tensors import digest
from detonation.core.optimizer.gathered import late_parameters
from detonation.core.replicator.overlap import Overlap
from detonation.core.schemes import buckets, sending_order
from detonation.errors import Mismatch
from zoo import batch, built

UNIT = 64
SCHEMES = {
    "demo": dt.demo(),
    "full": dt.full(),
    "owner": dt.demo(chunk=16, precision="sign", error_feedback=False, link="owner"),
}


class Deep(nn.Module):
    """Layers, with parameters of the root before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(257, 128, bias=False)
        self.first = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.between = nn.LayerNorm(128)
        self.second = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))
        self.head = nn.Linear(128, 257)

    def forward(self, x):
        x = self.embedding(x)
        for layer in [*self.first, self.between, *self.second]:
            x = layer(x).tanh()
        return self.head(x).square().mean(1)


def layout(*numels):
    return Layout.of({f"{n}": (numel,) for n, numel in enumerate(numels)}, 64)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize(
    ("numels", "late"),
    [
        ((70_000, 2_000_000, 2_000_000, 100, 70_000), {"0", "3", "4"}),
        ((70_000, 2_000_000, 500, 2_000_000, 70_000), {"0", "2", "4"}),
        ((2_000_000, 300_000), {"1"}),
        ((300_000, 0, 2_000_000), {"0", "1"}),
        ((1_000_000, 10, 10, 10, 1_000_000), {"0", "2", "4"}),
        ((600_000,) * 12, {"0", "3", "6", "9", "11"}),
        ((1_000_000, 1_000_000), {"0", "1"}),
    ],
)
def test_a_bucket_of_other_rows_has_no_late_row(numels, late, few):
    whole = layout(*numels)
    cut = buckets.cut_into_buckets(whole, dt.demo(), UNIT, few, late)
    ends = [0, *(bucket.first + bucket.layout.rows for bucket in cut)]
    assert ends == [*(bucket.first for bucket in cut), whole.rows]
    assert all(end % UNIT == 0 for end in ends[:-1])
    assert not few or len(cut) <= BUCKETS
    for bucket in cut:
        names = {slot.name for slot in bucket.layout.slots if slot.rows}
        assert bucket.late or not names & late
    sent = sending_order(cut)
    assert sent[-1].first == 0
    assert [each.late for each in sent[:-1]] == sorted(each.late for each in sent[:-1])


@pytest.mark.parametrize("few", [False, True])
def test_without_late_parameters_buckets_are_as_before(few):
    whole = layout(1_000_000, 30, 2_000_000)
    cut = buckets.cut_into_buckets(whole, dt.demo(), UNIT, few)
    assert len(cut) == 4 and not any(bucket.late for bucket in cut[:4])
    assert sending_order(cut) == cut[::-1]


def units(model, mesh):
    for layer in [*model.first, *model.second]:
        fully_shard(layer, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def trained(mesh, scheme, overlapped):
    """The optimizer after two steps of two micro-batches, and a digest of its weights and memory."""
    model = units(built(Deep), mesh)
    base = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    optimizer = dt.replicate(base, model, mesh["replicate"], scheme)
    optimizer.set_up()
    for step in range(2):
        model(batch(mesh.get_rank(), 2 * step, 257)).mean().backward()
        loss = model(batch(mesh.get_rank(), 2 * step + 1, 257)).mean()
        with optimizer.overlap() if overlapped else nullcontext():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = digest([*model.parameters(), *dt.replica_state(optimizer).values()])
    return optimizer, state


def arrivals(mesh, scheme, monkeypatch):
    """What happens in two overlapped steps, in order; and whether they equal steps without."""
    seen = []
    send = Overlap._send_next
    arrive = Overlap._on_gradient

    def sending(self):
        seen.append("late bucket" if self._left[0].bucket.late else "bucket")
        send(self)

    def arriving(self, index, parameter):
        if self._names[index] in self._channel.late:
            seen.append("late gradient")
        arrive(self, index, parameter)

    monkeypatch.setattr(Overlap, "_send_next", sending)
    monkeypatch.setattr(Overlap, "_on_gradient", arriving)
    optimizer, state = trained(mesh, scheme, overlapped=True)
    _, same = trained(mesh, scheme, overlapped=False)
    (replicator,) = optimizer.set_up()
    return seen, sorted(replicator.channel.late), state == same


def all_arrivals(mesh):
    found = []
    for scheme in SCHEMES.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(buckets, "SMALLEST", 2**14)
            found.append(arrivals(mesh, scheme, patch))
    return found


@pytest.mark.parametrize("shards", [1, 2])
def test_all_other_buckets_leave_before_a_late_gradient_arrives(shards):
    for rank in worlds.run(all_arrivals, 2, shards):
        for seen, late, equal in rank:
            assert {name.partition(".")[0] for name in late} == {"embedding", "between", "head"}
            assert equal
            first = seen.index("late gradient")
            assert seen[:first].count("bucket") == seen.count("bucket") // 2 > 1  # of two steps
            assert "late bucket" not in seen[:first] and "late bucket" in seen


def test_only_parameters_of_a_unit_around_other_units_are_late():
    assert not late_parameters(built(Deep))


def unlike(mesh):
    model = built(Deep)
    if mesh.get_rank():
        fully_shard(model, mesh=mesh["shard"])
    else:
        units(model, mesh)
    base = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = dt.replicate(base, model, mesh["replicate"], dt.demo())
    with pytest.raises(Mismatch) as refused:
        optimizer.set_up()
    return str(refused.value)


def test_replicas_with_other_units_are_refused():
    for text in worlds.run(unlike, 2, 1):
        assert "gradients at the end of backward=" in text
