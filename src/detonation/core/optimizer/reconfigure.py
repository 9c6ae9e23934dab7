"""Changes the settings of a scheme, the trained parameters or the replicas between two steps,
without losing state.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from detonation.core.agreement import StopConsensus, recorded_options, take_recorded
from detonation.core.exchange import TwoStage
from detonation.core.flat.rows import RowOwners
from detonation.core.flat.tensors import largest_local_shape
from detonation.core.link import (
    ElasticCommunicator,
    HandOver,
    Level,
    Link,
    RenumberedCommunicator,
    links_of_shards,
    mismatch_on_all,
    placed,
)
from detonation.core.optim import BaseStep
from detonation.core.optimizer.build import Route, replicator_of
from detonation.core.replicator import Channel, GradientReplicator, Replicator
from detonation.core.schemes import ParameterScheme, Scheme, check_order, require_below_dense


def reconfigured(
    old: Sequence[Replicator], was: Scheme, scheme: Scheme, base: BaseStep
) -> list[Replicator]:
    """Builds the replicators of one level for the new settings `scheme`, after all open rounds were
    completed. The new replicators get the links, fault counts and unsent values of `old`.

    Raises `ValueError` if unsent values (the memory) would be lost, and `LargerThanDense` if
    `scheme` would send more than full synchronisation. After an error, nothing has changed.
    """
    if (scheme.name, *_division(scheme)) != (was.name, *_division(was)):
        raise ValueError(
            f"the run began with the scheme {was.name}: keep this scheme, its fragments and its"
            " unit; only its other settings can change"
        )
    for first in range(0, len(old), scheme.fragments):
        of_fragments = [each.parameters for each in old[first : first + scheme.fragments]]
        link = old[first].link
        shapes = {name: largest_local_shape(p) for mine in of_fragments for name, p in mine.items()}
        layout = scheme.codec.layout(shapes)
        require_below_dense(scheme, layout, link.replicas, link.local_ranks)
    made = []
    for number, each in enumerate(old):
        channel = each.channel
        layout = scheme.codec.layout({slot.name: slot.shape for slot in channel.layout.slots})
        channel = Channel(
            scheme,
            layout,
            channel.link,
            channel.runtime,
            channel.counts,
            channel.place,
            channel.late,
        )
        mine = {slot.name: each.parameters[slot.name] for slot in layout.slots}
        last = isinstance(each, GradientReplicator) and each.last
        made.append(replicator_of(mine, channel, base, number % scheme.fragments, last))
    for before, after in zip(old, made, strict=True):
        _require_room(before, after)
    if local_steps := made[0].channel.runtime.local_steps if made else None:
        local_steps.restart(scheme.round)
    for before, after in zip(old, made, strict=True):
        _hand_over(before, after)
    return made


def _division(scheme: Scheme) -> tuple[int, str]:
    """Returns the settings of a scheme that divide the parameters into fragments."""
    return scheme.fragments, scheme.unit if isinstance(scheme, ParameterScheme) else ""


def agree_on_parameters(
    before: Mapping[str, Tensor],
    now: Mapping[str, Tensor],
    replicators: Sequence[Replicator],
    consensus: StopConsensus,
    step: int,
    in_buckets: bool,
) -> None:
    """Checks that all ranks train the same parameters `now` from `step` on. If all do, completes
    open rounds; otherwise raises an error on all ranks. Collective.

    Args:
        before: The parameters in the layouts of `replicators`.
        in_buckets: See `StopConsensus.announce`.
    """
    changed = next(name for name in [*now, *before] if now.get(name) is not before.get(name))
    consensus.announce(replicators, step, changed, in_buckets)
    trained = {f"{name} (trained)": f"{tuple(p.shape)} {p.dtype}" for name, p in now.items()}
    remedy = f"Before step {step} freeze, unfreeze and add the same parameters on all ranks"
    device = consensus.runtime.device
    with mismatch_on_all(links_of_shards(before.values()), device):
        for link in dict.fromkeys(each.link for each in replicators):
            link.require_same(trained, device, {}, remedy)
    for replicator in replicators:
        replicator.make_portable(step)
    consensus.conclude(step)


def require_order(levels: Sequence[Level], level: int, scheme: Scheme) -> None:
    """Raises `ValueError` if the other levels do not permit `scheme` in place of the scheme of
    level number `level`.
    """
    changed = [*levels]
    changed[level] = (levels[level][0], scheme)
    check_order(placed(changed))


def with_scheme(
    levels: Sequence[Level],
    by_level: Sequence[list[Replicator]],
    level: int,
    scheme: Scheme,
    base: BaseStep,
    consensus: StopConsensus | None,
) -> tuple[tuple[Level, ...], list[list[Replicator]]]:
    """Replaces the scheme of one level, and returns all levels with their replicators.

    Raises the errors of `reconfigured`.
    """
    number = range(len(levels))[level]
    axis, was = levels[number]
    made = reconfigured(by_level[number], was, scheme, base)
    levels = *levels[:number], (axis, scheme), *levels[number + 1 :]
    by_level = [*by_level[:number], made, *by_level[number + 1 :]]
    assert consensus is not None
    consensus.connect(levels, [each for made in by_level for each in made])
    return levels, by_level


def ends_for_one(levels: Sequence[Level], hand_over: HandOver) -> tuple[Level, ...]:
    """Returns the levels for one optimizer: each axis whose replicas may change is replaced by a
    communicator that only this optimizer uses. Levels on the same axis share one communicator.
    """
    ends = {
        id(axis): axis.for_one(hand_over) if isinstance(axis, RenumberedCommunicator) else axis
        for axis, _ in levels
    }
    return tuple((ends[id(axis)], scheme) for axis, scheme in levels)


def lost_before(levels: Sequence[Level], step: int) -> bool:
    """Begins `step` on all axes whose replicas may change. If the replicas have changed, returns
    True without beginning the step: the caller must first call `renumber`.
    """
    return any(axis.enter_step(step) for axis in renumbered_axes(levels))


def renumbered_axes(levels: Sequence[Level]) -> list[RenumberedCommunicator]:
    """Returns the axes in `levels` whose replicas may change between steps."""
    return [axis for axis, _ in levels if isinstance(axis, RenumberedCommunicator)]


def complete(
    by_level: Sequence[Sequence[Replicator]],
    consensus: StopConsensus,
    buffers: Callable[[Sequence[Replicator]], None],
    step: int,
) -> None:
    """Completes open rounds and updates in flight before `step`, and calls `buffers`, which makes
    the model's buffers equal on all replicas. Collective.
    """
    if consensus.decides_on_device:
        consensus.begin(step)
    replicators = [each for level in by_level for each in level]
    for each in replicators:
        each.synchronize(step)
    buffers(replicators)
    consensus.conclude(step)


def needs_all(levels: Sequence[Level], step: int) -> bool:
    """True if open rounds must be completed before `step`, because a replica joins or leaves.

    A round must average all replicas that moved in it. A joining replica would not receive messages
    that are already in flight. The completion also sends to a joining replica what the training
    loop has written since the last step.
    """
    leaves = any(axis.leaving(step) for axis in _axes_with_joins(levels))
    return expects(levels, step) or (leaves and opens_rounds(levels))


def expects(levels: Sequence[Level], step: int) -> bool:
    """True if a replica may join now, before `step`."""
    return any(axis.expects(step) for axis in _axes_with_joins(levels))


def completion(levels: Sequence[Level], step: int) -> str:
    """Returns what observers are told when rounds are completed before `step`: "join" if a replica
    may join now, otherwise "synchronize".
    """
    if expects(levels, step):
        return "join"
    return "synchronize"


@contextmanager
def without_joining(levels: Sequence[Level]) -> Iterator[None]:
    """Context manager in which no replica joins. A replica that wants to join waits until a later
    call.
    """
    for axis in _axes_with_joins(levels):
        axis.lets_in = False
    try:
        yield
    finally:
        for axis in _axes_with_joins(levels):
            axis.lets_in = True


def _axes_with_joins(levels: Sequence[Level]) -> list[ElasticCommunicator]:
    return [axis for axis, _ in levels if isinstance(axis, ElasticCommunicator)]


def opens_rounds(levels: Sequence[Level]) -> bool:
    """True if a step may leave a round open or an update in flight."""
    return any(scheme.round.stays_open for _, scheme in levels)


def hand_over_memory(replicators: Sequence[Replicator], leaving: Sequence[int]) -> None:
    """Sends the unsent values (memories) that the replicas `leaving` have on all levels to the
    first remaining replica. Collective.

    The sum of all memories, divided by the number of replicas, does not change, so no gradient is
    lost.
    """
    # the links whose replicas may change; empty if the outermost level sends nothing
    between = [each.link for each in replicators if each.link.elastic]
    for channel in (each.channel for each in replicators if each.channel.memory and between):
        if channel.link.elastic:
            link = channel.link
        else:
            link = between[-1]
        _hand_over_residual(channel, link, leaving)
    # wait until all replicas have received the memory
    for link in dict.fromkeys(each.link for each in replicators):
        device = replicators[0].channel.runtime.device
        link.collect(torch.zeros(1, dtype=torch.int64, device=device))


def _hand_over_residual(channel: Channel, link: Link, leaving: Sequence[int]) -> None:
    """Sends the unsent values (memories) that the replicas `leaving` have in one channel to the
    first remaining replica, along `link`. Collective.
    """
    memory = channel.memory
    assert memory is not None
    leaves = link.replica in leaving
    # An inner level averages inside this replica, and its owners of rows keep a residual.
    # The owners' residual is added to the memory of unsent values, which is handed over below.
    if isinstance(channel.exchange, TwoStage) and (leaves or not channel.link.elastic):
        _return_residual(channel, channel.exchange)
    if leaves:
        mine = memory.residual.clone()
    else:
        mine = torch.zeros_like(memory.residual)
    handed = link.all_reduce(mine)()
    stay = [replica for replica in range(link.replicas) if replica not in leaving]
    if link.replica == stay[0]:
        memory.add(handed)
    memory.scale(len(stay) / link.replicas)


def renumber(
    levels: Sequence[Level], replicators: Sequence[Replicator], routes: Iterable[Route], step: int
) -> bool:
    """Gives the remaining replicas the numbers 0, 1, ... in links and fault counts. All replicas
    call this function before the same `step`.

    Messages in flight are first received under the old numbers. Afterwards the caller must rebuild
    the replicators, because owners of rows, message layouts and means depend on the number of
    replicas. Returns True if a replica has joined, so that the caller calls `Replicated.welcome`.
    """
    grown = False
    for each in replicators:
        each.local_state()
    for axis in renumbered_axes(levels):
        leaving = axis.leaving(step)
        if leaving:
            hand_over_memory(replicators, leaving)
        kept = axis.adopt(step)
        for link, counts in (route for route in routes if route[0].axis is axis):
            link.renumber()
            counts.renumber(kept, link.replica)
            grown = grown or link.replicas > len(kept)
        if isinstance(axis, ElasticCommunicator) and axis.size() > len(kept):
            _grow_memories(replicators, axis.size() / len(kept))
    return grown


def _grow_memories(replicators: Sequence[Replicator], factor: float) -> None:
    """Multiplies the unsent values (memories) of this replica by `factor`. Without this factor, a
    new replica, whose memory is empty, would lower the mean of the memories over replicas.
    """
    for each in replicators:
        if each.channel.memory:
            each.channel.memory.scale(factor)


def take_options(
    replicators: Sequence[Replicator], groups: Sequence[dict[str, Any]], newcomer: bool
) -> None:
    """Copies the options of the first replica's parameter groups, such as lr, to a replica that has
    just joined (there `newcomer` is True). Collective.
    """
    plain = [recorded_options(group) for group in groups]
    options = replicators[0].link.send_to_all(plain, replicators[0].channel.runtime.device)[0]
    for group, theirs in zip(groups, options, strict=True) if newcomer else ():
        take_recorded(group, theirs)


def hand_over_by_name(
    old: Sequence[Sequence[Replicator]],
    new: Sequence[Sequence[Replicator]],
    joining: Collection[str] = (),
) -> None:
    """Moves the state of each level, by parameter name, into new replicators for other parameters
    or for a different number of replicas.

    State of removed parameters is dropped. The parameters `joining` start with an empty memory of
    unsent values and with an anchor at their current values. The owners' residual (the part of the
    aggregate that their answers do not hold) is added to the memory, because rows get other owners;
    without a memory this residual is dropped. State that belongs to no parameter, such as the count
    of steps until a message arrives, moves to the new replicator of the same fragment.
    """
    for before, after in zip(old, new, strict=True):
        if before:
            _hand_over_level(before, after, joining)


def _hand_over_level(
    before: Sequence[Replicator], after: Sequence[Replicator], joining: Collection[str]
) -> None:
    of_links: dict[Link, list[dict[str, Tensor]]] = {each.link: [] for each in after}
    for each in before:
        if isinstance(each.channel.exchange, TwoStage) and each.channel.memory:
            _return_residual(each.channel, each.channel.exchange)
        of_links.setdefault(each.link, []).append(each.local_state().named())
    for number, each in enumerate(after):
        of_fragments = of_links[each.link]
        state: dict[str, Tensor] = {}
        for of_fragment in of_fragments:
            state |= of_fragment
        if of_fragments:
            state |= of_fragments[number % each.scheme.fragments]
        _load_named(each, state, joining)


def _load_named(
    replicator: Replicator, state: Mapping[str, Tensor], joining: Collection[str]
) -> None:
    """Loads those tensors of `state` that match a tensor of `replicator` in name and shape. Skips
    the residuals of owners, and all tensors of the parameters with the names `joining`.
    """
    own = replicator.local_state()
    of_owners = replicator.channel.exchange.state()
    fresh = own.named()
    kept = {}
    for key in fresh.keys() & state.keys() - of_owners.keys():
        if key.partition(".")[2] not in joining and state[key].shape == fresh[key].shape:
            kept[key] = state[key]
    own.load(fresh | kept)


def _require_room(old: Replicator, new: Replicator) -> None:
    """Raises `ValueError` if `new` cannot store some of the state of `old`."""
    of_link = {*old.channel.exchange.state(), *new.channel.exchange.state()}
    kept = [each.local_state().named().keys() - of_link for each in (old, new)]
    forgets = isinstance(old.channel.exchange, TwoStage) and old.channel.memory is None
    if kept[0] != kept[1] or (forgets and _owners(old) != _owners(new)):
        raise ValueError(
            f"with these settings {new.scheme.name} would lose unsent values or momentum: keep"
            " delay and link, and do not switch outer_momentum or the memory of unsent values on"
            " or off"
        )


def _hand_over(old: Replicator, new: Replicator) -> None:
    """Moves the state of `old` into `new`. If rows change owners, the owner's residual (the part of
    the aggregate that its answer does not hold) is added to the memory of unsent values.
    """
    exchange = old.channel.exchange
    same_owners = _owners(old) == _owners(new)
    if isinstance(exchange, TwoStage) and not same_owners:
        _return_residual(old.channel, exchange)
    gone: Mapping[str, Tensor] = {}
    if not same_owners:
        gone = exchange.state()
    kept = {key: tensor for key, tensor in old.local_state().named().items() if key not in gone}
    new.local_state().load(new.channel.exchange.state() | kept)


def _owners(replicator: Replicator) -> RowOwners | None:
    exchange = replicator.channel.exchange
    if isinstance(exchange, TwoStage):
        return exchange.owners
    return None


def _return_residual(channel: Channel, exchange: TwoStage) -> None:
    """Adds the residual of the rows that this replica owns (the part of the aggregate that its
    answers do not hold) to this replica's memory of unsent values, multiplied by the number of
    replicas.

    The factor is needed because the residual is a part of a mean. The mean over replicas also
    divides each later message of this replica by the number of replicas.
    """
    assert channel.memory is not None
    replicas = channel.link.replicas
    mine = exchange.replica
    empty = exchange.residual.new_zeros(exchange.residual.shape)
    owners = range(exchange.owners.replicas)
    owned = exchange.owners.collect([exchange.residual if r == mine else empty for r in owners])
    channel.memory.add(channel.scheme.codec.basis.inverse(owned) * replicas)
    exchange.residual.zero_()
