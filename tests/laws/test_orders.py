"""Law 8: of two levels it is known beforehand which may be the inner one."""

from itertools import product

import pytest
import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from worlds import caught
from zoo import Plain, built

KINDS = {
    "gradients": dt.demo(),
    "averages at once": dt.schemes.local_sgd(every=2),
    "rounds": dt.diloco(every=2),
}
FOLLOWED_BY = {
    "gradients": [*KINDS],
    "averages at once": ["averages at once", "rounds"],
    "rounds": [],
}
"""Each inner level with those that may be around it."""


@pytest.mark.parametrize("inner, outer", [*product(KINDS, KINDS)])
def test_law_8_an_order_that_loses_its_meaning_is_refused(inner, outer):
    model = built(Plain)
    levels = [(LoopbackCommunicator(), KINDS[each]) for each in (inner, outer)]
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    kind, text = caught(lambda: dt.replicate(base, model, levels=levels))
    assert kind == ("nothing" if outer in FOLLOWED_BY[inner] else "ValueError"), text
