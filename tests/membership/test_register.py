"""A key on three stores: every order of events, many long ones at random, and what the search is for."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from registers import Call, Client, World, searched, walked

from detonation.cluster.quorum.register import Cell, Proposal, adds, compares, reads, writes

PROGRAMS = {
    "the first proposal stays": [
        [Call("a", compares(b"", b"x"))],
        [Call("b", compares(b"", b"y"))],
    ],
    "numbers are given once": [[Call("a", adds(1))], [Call("b", adds(1))]],
    "one after the other": [[Call("a", compares(b"", b"x"))], [Call("b", compares(b"x", b"y"))]],
    "a read never goes back": [
        [Call("a", writes(b"x"))],
        [Call("r", reads), Call("q", reads)],
    ],
    "a write stays": [[Call("a", writes(b"x")), Call("r", reads)], [Call("b", writes(b"y"))]],
}
LONGER = [
    [Call("a", adds(1)), Call("b", compares(b"3", b"x")), Call("c", reads)],
    [Call("d", adds(1)), Call("e", writes(b"7")), Call("f", reads)],
    [Call("g", adds(1)), Call("h", compares(b"7", b"9")), Call("i", reads)],
]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_order_of_events_explains_itself(name):
    assert searched(PROGRAMS[name], faults=0, again=0, most=6000) > 100


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_order_with_a_fault_explains_itself(name):
    assert searched(PROGRAMS[name], faults=1, again=1, most=60_000) > 1000


@pytest.mark.long_cases("2", "3", "4")
@pytest.mark.parametrize("seed", range(5))
def test_long_orders_with_faults_end_and_explain_themselves(seed):
    for program in (*PROGRAMS.values(), LONGER):
        for number in range(20):
            assert walked(program, faults=number % 4, seed=100 * seed + number) > 0


def _found() -> bool:
    try:
        for seed in range(400):
            for program in (*PROGRAMS.values(), LONGER):
                walked(program, faults=seed % 4, seed=seed)
    except (AssertionError, ValueError):
        return True
    return False


def _without_memory(self, cell):
    return self._change(cell.value)


def _first_of_promised(self, latest, propose=Proposal._propose):
    propose(
        self,
        min(
            (each for each in self._known() if each.promised == self._ballot),
            key=lambda each: each.accepted,
        ),
    )


def _hasty(self, store, raw, receive=Proposal.receive):
    self._majority = 1
    receive(self, store, raw)


def _deaf(self, advance=Proposal._advance):
    self._cells = [
        each and replace(each, promised=min(each.promised, self._ballot)) for each in self._cells
    ]
    advance(self)


@pytest.mark.parametrize(
    "name, other",
    [
        ("_outcome", _without_memory),
        ("_propose", _first_of_promised),
        ("receive", _hasty),
        ("_advance", _deaf),
    ],
    ids=["no memory of earlier attempts", "not the latest value", "no majority", "no promise"],
)
def test_the_search_finds_a_rule_that_is_left_out(monkeypatch, name, other):
    monkeypatch.setattr(Proposal, name, other)
    assert _found()


def _overtaken() -> World:
    """A client's second change rests on a value that a client left at one store when it died, and
    is itself at that store alone when another client overtakes it."""
    calls = [
        [Call("first", writes(b"c"))],
        [Call("dies", compares(b"c", b"d"))],
        [Call("mine", compares(b"d", b"e")), Call("then", reads)],
        [Call("overtakes", compares(b"c", b"f"))],
    ]
    world = World([Client(each) for each in calls], faults=1, again=1)
    world.begin_calls()
    asked = [(0, (1, 2) * 3), (1, (0, 1, 0, 1, 0)), (2, (0, 1, 0, 1, 0)), (3, (1, 2, 1)), (2, (1,))]
    for client, stores in asked:
        for store in stores:
            world.do("ask", client, store)
    world.do("die", 1, 0)
    world.do("again", 2, 0)
    world.do("ask", 2, 1)
    world.do("ask", 2, 2)
    while proposal := world.clients[2].proposal:
        store = next(each for each in range(3) if proposal.request(each))
        world.do("ask", 2, store)
    return world


def test_a_call_that_was_overtaken_ends_when_its_attempt_cannot_count_any_more(monkeypatch):
    assert _overtaken().is_linear()
    monkeypatch.setattr(Proposal, "_settled", lambda self, cell, value: value == cell.value)
    assert not _overtaken().is_linear()


ballots = st.tuples(st.integers(0, 2**40), st.text("0123456789abcdef-", max_size=12))


@given(ballots, ballots, st.none() | st.binary(), st.lists(ballots, max_size=3))
def test_a_cell_is_read_as_it_was_written(promised, accepted, value, applied):
    cell = Cell(promised, accepted, value, tuple(applied))
    assert Cell.decode(cell.encode()) == cell
    assert Cell.decode(b"") == Cell() and Cell().encode() == b""
