"""The exchange for the collective that a scheme, its size and the number of replicas call for."""

import torch

from detonation.core.exchange.exchange import Exchange
from detonation.core.exchange.one_stage import AllGather, AllReduce
from detonation.core.exchange.owners import RowOwners
from detonation.core.exchange.two_stage import TwoStage
from detonation.core.flat.layout import Layout
from detonation.core.integrity.guard import Guard
from detonation.core.link.link import Link
from detonation.core.runtime import Runtime
from detonation.core.schemes.buckets import rows_of_a_turn
from detonation.core.schemes.scheme import Scheme
from detonation.core.schemes.traffic import collective_for


def exchange_for(scheme: Scheme, link: Link, layout: Layout, runtime: Runtime, guard: Guard) -> Exchange:
    """The exchange for the collective that `collective_for` chooses."""
    chosen = collective_for(scheme, layout, link.replicas, link.local_ranks)
    if chosen == "all-reduce":
        return AllReduce(scheme.codec, link, guard, layout.rows)
    if chosen == "all-gather":
        return AllGather(scheme, scheme.codec, link, guard, layout.rows)
    owners = RowOwners(layout.rows, link.replicas, rows_of_a_turn(scheme, link.replicas))
    residual = torch.zeros(owners.owned, scheme.codec.selection.chunk, dtype=torch.float32, device=runtime.device)
    return TwoStage(scheme, scheme.codec, link, owners, residual, guard, runtime.seed)
