"""Law 8: of two levels it is known beforehand which may be the inner one."""

from itertools import product

import pytest
import torch

import detonation as dt
from detonation.cluster.network.loopback import LoopbackCommunicator
from detonation.core.schemes import check_order
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


SIZES = {"s": 1}
"""Replicas of an axis; all others have two."""


def rounds_in(names, schemes):
    """Levels of `schemes`, each on the axis of its letter in `names`."""
    axes = {name: LoopbackCommunicator(SIZES.get(name, 2)) for name in names}
    return [(axes[name], scheme) for name, scheme in zip(names, schemes, strict=True)]


def error_of(levels):
    model = built(Plain)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    return caught(lambda: dt.replicate(base, model, levels=levels))[1]


def local(every):
    return dt.schemes.local_sgd(every=every)


def streaming(every, fragments=1, delay=0, keep=0.0):
    return dt.schemes.streaming_diloco(every, fragments, delay, keep)


SPARTA = dt.schemes.sparta(rate=1 / 4)
KEEPING = dt.schemes.streaming_diloco(1, 1, 0, 0.5, outer_lr=1, outer_momentum=0, precision="fp32")
IN_PARTS = dt.schemes.streaming_diloco(2, 2, 0, outer_lr=1, outer_momentum=0, precision="fp32")
MULTIPLE = "make every of the outer level a multiple of every of the inner level"
UNEQUAL = [
    ("ab", [local(2), dt.diloco(every=5)], MULTIPLE),
    ("ab", [local(4), dt.diloco(every=6)], MULTIPLE),
    ("ab", [local(2), SPARTA], MULTIPLE),
    ("ab", [local(2), streaming(6, 2)], "make every / fragments of the outer level"),
    ("ab", [local(2), streaming(6, 2, 1)], "make every / fragments and delay of the outer level"),
    ("ab", [local(2), streaming(6, 1, 1)], "make every and delay of the outer level"),
    ("ab", [IN_PARTS, dt.diloco(every=4)], "use one fragment in the inner level"),
    ("aab", [local(4), SPARTA, dt.diloco(every=6)], "local_sgd with every=4 still differ"),
    ("ab", [SPARTA, dt.diloco(every=6)], "it does not make all weights"),
    ("ab", [SPARTA, dt.muloco(every=4)], "it does not make all weights"),
    ("ab", [KEEPING, dt.diloco(every=6)], "it does not make all weights"),
    ("abc", [local(2), local(4), dt.diloco(every=6)], "with every=4 still differ"),
    ("abc", [local(4), local(2), dt.diloco(every=8)], "local_sgd with every=2"),
    ("abc", [dt.full(), local(2), dt.diloco(every=3)], MULTIPLE),
    ("aba", [local(2), local(4), dt.diloco(every=6)], "with every=4 still differ"),
]
EQUAL = [
    ("ab", [local(2), dt.diloco(every=6)]),
    ("ab", [local(1), SPARTA]),
    ("ab", [local(2), streaming(8, 2, 2)]),
    ("ab", [dt.schemes.sparta(rate=1), dt.diloco(every=3)]),
    ("ab", [dt.demo(), SPARTA]),
    ("ab", [dt.full(), streaming(6, 2, 1)]),
    ("abc", [local(2), local(4), dt.diloco(every=8)]),
    ("aa", [SPARTA, dt.diloco(every=6)]),
    ("sb", [local(2), dt.diloco(every=5)]),
    ("aa", [local(2), dt.diloco(every=5)]),
    ("aab", [SPARTA, local(2), dt.diloco(every=4)]),
]


@pytest.mark.parametrize("axes, schemes, said", UNEQUAL)
def test_law_8_a_level_around_replicas_that_differ_is_refused(axes, schemes, said):
    assert said in error_of(rounds_in(axes, schemes))


@pytest.mark.parametrize("axes, schemes", EQUAL)
def test_law_8_a_level_around_equal_replicas_is_not_refused(axes, schemes):
    assert error_of(rounds_in(axes, schemes)) == ""


def test_law_8_what_is_refused_is_what_sends_between_the_rounds_inside():
    for every, fragments, delay, inner in product(range(1, 9), (1, 2, 3), range(4), range(1, 5)):
        if delay >= every or fragments > every:
            continue
        outer = streaming(every, fragments, delay)
        sent = [step for step in range(48) if any(each.sends(step) for each in outer.rounds)]
        differ = any(not local(inner).round.sends(step) for step in sent)
        placed = [("rack", local(inner)), ("site", outer)]
        assert (caught(check_order, placed)[0] == "ValueError") == differ, (placed, sent)


def test_law_8_a_running_level_is_not_moved_out_of_step():
    model = built(Plain)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    levels = rounds_in("ab", [local(2), dt.diloco(every=4)])
    optimizer = dt.replicate(base, model, levels=levels)
    for scheme, level in ((dt.diloco(every=5), -1), (local(3), 0)):
        kind, text = caught(optimizer.reconfigure, scheme, level)
        assert kind == "ValueError" and MULTIPLE in text
    assert [scheme.round.every for _, scheme in optimizer.levels] == [2, 4]
    optimizer.reconfigure(dt.diloco(every=6))
    optimizer.reconfigure(local(3), 0)
    assert [scheme.round.every for _, scheme in optimizer.levels] == [3, 6]
