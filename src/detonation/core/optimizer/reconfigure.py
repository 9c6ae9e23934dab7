"""Reconfiguration: other settings of a scheme between two steps, without a loss of state."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from detonation.core.link.exchange import TwoStage
from detonation.core.link.owners import RowOwners
from detonation.core.optim.base_step import BaseStep
from detonation.core.optimizer.build import replicator_of
from detonation.core.replicator.base import Replicator
from detonation.core.replicator.channel import Channel
from detonation.core.replicator.gradient import GradientReplicator
from detonation.core.schemes.scheme import ParameterScheme, Scheme
from detonation.core.schemes.traffic import require_below_dense


def reconfigured(
    old: Sequence[Replicator], was: Scheme, scheme: Scheme, parameters: Mapping[str, Tensor], base: BaseStep
) -> list[Replicator]:
    """The replicators of a synchronized level under `scheme`, with the links, fault counts and memories of `old`.

    Raises `ValueError` where a memory would be lost, and `LargerThanDense`; nothing has changed then.

    Shapes: any.
    """
    if (scheme.name, *_division(scheme)) != (was.name, *_division(was)):
        raise ValueError(f"a run goes on with the scheme {was.name} that it began with, other settings of it alone")
    for first in range(0, len(old), scheme.fragments):
        slots = [slot for each in old[first : first + scheme.fragments] for slot in each.layout.slots]
        link = old[first].link
        layout = scheme.codec.layout({slot.name: slot.shape for slot in slots})
        require_below_dense(scheme, layout, link.replicas, link.local_ranks)
    made = []
    for number, each in enumerate(old):
        channel = each.channel
        layout = scheme.codec.layout({slot.name: slot.shape for slot in channel.layout.slots})
        channel = Channel(scheme, layout, channel.link, channel.runtime, channel.counts, channel.place)
        mine = {slot.name: parameters[slot.name] for slot in layout.slots}
        last = isinstance(each, GradientReplicator) and each.last
        made.append(replicator_of(mine, channel, base, number % scheme.fragments, last))
    for before, after in zip(old, made, strict=True):
        _require_room(before, after)
    for before, after in zip(old, made, strict=True):
        _hand_over(before, after)
    return made


def _division(scheme: Scheme) -> tuple[int, str]:
    """What decides which parameters are in each fragment."""
    return scheme.fragments, scheme.unit if isinstance(scheme, ParameterScheme) else ""


def _require_room(old: Replicator, new: Replicator) -> None:
    """Raises `ValueError` unless all state of `old` has its place in `new`."""
    ways = [type(each.channel.exchange).__name__ for each in (old, new)]
    kept = [each.local_state().named().keys() for each in (old, new)]
    forgets = isinstance(old.channel.exchange, TwoStage) and old.channel.memory is None
    if ways[0] != ways[1] or kept[0] != kept[1] or (forgets and _owners(old) != _owners(new)):
        raise ValueError(
            f"{new.scheme.name} cannot go on with these settings: what its replicas remember has no place there"
        )


def _hand_over(old: Replicator, new: Replicator) -> None:
    """Moves the state of `old` into `new`; the server residual of rows with another owner goes into its memory."""
    exchange = old.channel.exchange
    same_owners = _owners(old) == _owners(new)
    if isinstance(exchange, TwoStage) and not same_owners:
        _return_residual(old.channel, exchange)
    state = old.local_state().named()
    if not same_owners:
        state |= new.channel.exchange.state()
    new.local_state().load(state)


def _owners(replicator: Replicator) -> RowOwners | None:
    exchange = replicator.channel.exchange
    return exchange.owners if isinstance(exchange, TwoStage) else None


def _return_residual(channel: Channel, exchange: TwoStage) -> None:
    """Moves the server residual into this replica's memory, scaled by the number of replicas.

    It is a part of a mean over replicas, and so will be the message that carries it: nothing is lost.
    """
    assert channel.memory is not None
    replicas, mine = channel.link.replicas, channel.link.replica
    empty = exchange.residual.new_zeros(exchange.residual.shape)
    owned = exchange.owners.collect([exchange.residual if r == mine else empty for r in range(replicas)])
    channel.memory.add(channel.scheme.codec.basis.inverse(owned) * replicas)
    exchange.residual.zero_()
