"""Chooses the exchange of a scheme on a link (all-reduce, all-gather, or two-stage all-reduce), and
limits the memory of temporary tensors in a step.
"""

import torch

from detonation.core.engine import ReferenceEngine, Room, rows_at_once
from detonation.core.exchange.exchange import AllGather, AllReduce, Exchange
from detonation.core.exchange.two_stage import TwoStage
from detonation.core.flat.layout import Layout
from detonation.core.flat.rows import BUCKETS, SMALL_BUCKETS, RowOwners
from detonation.core.integrity.guard import Guard
from detonation.core.link import Link
from detonation.core.schemes import Scheme, collective_for, rows_of_a_turn


def room_of(scheme: Scheme, layout: Layout, replicas: int, local_ranks: int) -> Room:
    """Returns the limit for temporary tensors of a step: as much memory as a quarter of the flat.
    If messages are sent at the end of a round, the limit is an eighth of the flat, because the
    change of the parameters needs memory, too.
    """
    is_round = scheme.signal == "parameters"
    is_vote = scheme.codec.selection.shared and not scheme.codec.summable
    costly = collective_for(scheme, layout, replicas, local_ranks) == "owner" or is_vote
    few_launches = (
        costly
        and not is_round
        and not layout.tiled
        and layout.rows * layout.chunk < rows_at_once.LARGE
    )
    return Room(max(1, -(-layout.rows // (SMALL_BUCKETS if is_round else BUCKETS))), few_launches)


def exchange_for(
    scheme: Scheme, link: Link, layout: Layout, engine: ReferenceEngine, guard: Guard, room: Room
) -> Exchange:
    """Creates the exchange for the collective that `collective_for` chooses for this scheme."""
    chosen = collective_for(scheme, layout, link.replicas, link.local_ranks)
    if chosen == "all-reduce":
        return AllReduce(scheme, link, guard, layout.rows)
    if chosen == "all-gather":
        return AllGather(scheme, link, guard, layout.rows)
    owners = RowOwners(layout.rows, link.replicas, rows_of_a_turn(scheme, link.replicas))
    residual = torch.zeros(
        owners.owned, scheme.codec.selection.chunk, dtype=torch.float32, device=engine.device
    )
    return TwoStage(scheme, link, owners, residual, guard, room, engine)
