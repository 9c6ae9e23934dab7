"""Change: other settings of a scheme between two steps, with all that a replica remembers."""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from detonation.core.link.exchange import Owned
from detonation.core.optimizer.build import replicator
from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel
from detonation.core.replicator.gradient import GradientReplicator
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import check


def changed(
    old: Sequence[Replicator],
    was: Scheme,
    scheme: Scheme,
    parameters: Mapping[str, Tensor],
    base: Optimizer,
    seed: int,
    kernels: bool,
) -> list[Replicator]:
    """The replicators of a level that has settled, as `scheme` says; their links, ledgers and memories are the `old`.

    Raises `ValueError` where a memory would be lost, and `LargerThanDense`; nothing has changed then.
    """
    if (scheme.name, scheme.fragments) != (was.name, was.fragments):
        raise ValueError(f"a run goes on with the scheme {was.name} that it began with, other settings of it alone")
    for first in range(0, len(old), scheme.fragments):
        slots = [slot for each in old[first : first + scheme.fragments] for slot in each.channel.layout.slots]
        link = old[first].channel.link
        check(scheme, scheme.codec.layout({slot.name: slot.shape for slot in slots}), link.replicas, link.lanes)
    made = [_renewed(each, scheme, parameters, base, i, seed, kernels) for i, each in enumerate(old)]
    for before, after in zip(old, made, strict=True):
        _require_room(before, after)
    for before, after in zip(old, made, strict=True):
        _hand_over(before, after)
    return made


def _renewed(
    old: Replicator,
    scheme: Scheme,
    parameters: Mapping[str, Tensor],
    base: Optimizer,
    number: int,
    seed: int,
    kernels: bool,
) -> Replicator:
    was = old.channel
    layout = scheme.codec.layout({slot.name: slot.shape for slot in was.layout.slots})
    channel = Channel(scheme, layout, was.link, was.device, seed, kernels, was.ledger, was.place)
    mine = {slot.name: parameters[slot.name] for slot in layout.slots}
    last = isinstance(old, GradientReplicator) and old.last
    return replicator(mine, channel, base, number % scheme.fragments, last)


def _require_room(old: Replicator, new: Replicator) -> None:
    """Raises `ValueError` unless all that `old` keeps has its place in `new`."""
    ways = [type(each.channel.exchange).__name__ for each in (old, new)]
    kept = [each.private().named().keys() for each in (old, new)]
    forgets = isinstance(old.channel.exchange, Owned) and old.channel.memory is None
    if ways[0] != ways[1] or kept[0] != kept[1] or (forgets and not _same_owners(old, new)):
        raise ValueError(
            f"{new.channel.scheme.name} cannot go on with these settings: what its replicas remember has no place there"
        )


def _hand_over(old: Replicator, new: Replicator) -> None:
    """Puts what `old` keeps into `new`; what it owes as an owner of rows that have another one now, into its memory."""
    if isinstance(old.channel.exchange, Owned) and not _same_owners(old, new):
        _take_back(old.channel, old.channel.exchange)
    state = old.private().named()
    if not _same_owners(old, new):
        state |= new.channel.exchange.state()
    new.private().load(state)


def _same_owners(old: Replicator, new: Replicator) -> bool:
    exchanges = (old.channel.exchange, new.channel.exchange)
    owners = [each.owners if isinstance(each, Owned) else None for each in exchanges]
    return owners[0] == owners[1]


def _take_back(channel: Channel, exchange: Owned) -> None:
    """What this replica has not told yet of what it owns becomes its own, as many times as there are replicas.

    It is a part of a mean over replicas, and so will that be which is told of it: nothing is lost.
    """
    assert channel.memory is not None
    replicas, mine = channel.link.replicas, channel.link.replica
    empty = exchange.residual.new_zeros(exchange.residual.shape)
    owned = exchange.owners.collect([exchange.residual if r == mine else empty for r in range(replicas)])
    channel.memory.owe(channel.scheme.codec.basis.inverse(owned) * replicas)
    exchange.residual.zero_()
