"""The reductions of the search lose no end and no counterexample."""

import pytest
from model import Case, first_world, is_over, onward, program_of, successors
from search import explored
from states import GONE

ONE = program_of(1, "a")
SMALL = {
    "one is killed": Case(ONE, ("kill",), users="a"),
    "one is killed, of two steps": Case(program_of(2, "a"), ("kill",), users="a"),
    "a departure": Case(ONE, ("departure",), users="a"),
    "the store is lost": Case(ONE, ("store lost",), users="a"),
}


def ends_of(case):
    """How each rank may end, and with whom it has trained."""
    ends = set()

    def over(world):
        found = is_over(world)
        if found:
            ends.add(tuple(end_of(rank) for rank in world.ranks))
        return found

    same = None if case.plain else onward
    found = explored(case, first_world(case), successors, over, 200_000, same=same)
    assert found.whole
    assert not found.broken, found
    return ends, found.states


def end_of(rank):
    if rank.state in GONE:
        return ("gone",)
    return rank.state, rank.layout, tuple(user.layout for user in rank.users)


@pytest.mark.parametrize("name", SMALL)
def test_a_reduced_search_finds_the_ends_of_the_plain_one(name):
    case = SMALL[name]
    plain = Case(case.program, case.faults, users=case.users, plain=True)
    some, few = ends_of(case)
    every, many = ends_of(plain)
    if case.faults == ("store lost",):
        every = {end for end in every if end[0] != ("gone",)}
    assert some == every
    assert few < many
