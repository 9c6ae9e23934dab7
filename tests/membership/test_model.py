"""A reduced search of the model, and that it finds each fault that the protocol once had."""

import pytest
from model import Case, program_of, search

from detonation.cluster.survive import agreement, turns
from detonation.cluster.survive.agreement import Agreement, GuestEntry, turn_of
from detonation.core.integrity.fault_counts import FaultCounts

BACK = (("step", "a"), ("back", 0), ("step", "a"), ("step", "a"))
ANEW = (("make", "a"), ("step", "a"))
SMALL = {
    "a replica is killed, of two optimizers": Case(program_of(1), ("kill",)),
    "two are killed": Case(program_of(1, "a"), ("kill", "kill"), users="a"),
    "one is killed between two exchanges of a step": Case(
        program_of(1, "a"), ("kill",), parts=2, users="a"
    ),
    "a departure, of two optimizers": Case(program_of(1), ("departure",)),
    "one is killed after all went back": Case(BACK, ("kill",), users="a"),
    "one is killed while all change parameters": Case((("changed", "a"),), ("kill",), users="a"),
    "the store is lost": Case(program_of(2), ("store lost",)),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_order_of_events_keeps_the_properties(name):
    found = search(SMALL[name])
    assert found.whole
    assert not found.broken, found


def broken(case, words):
    """Requires a sequence of events after which a property fails."""
    found = search(case, deep=True)
    assert words in found.broken, found
    assert found.events


def test_it_finds_agreements_that_are_dated_by_steps(monkeypatch):
    """Steps fall when training goes back: a loss then waits for the largest step of before."""
    monkeypatch.setattr(turns.Turns, "resume_at", lambda turns, step: None)
    broken(Case(BACK, ("kill",), users="a"), "which was lost before any rank had begun it")


def test_it_finds_a_departure_that_forgets_other_optimizers(monkeypatch):
    monkeypatch.setattr(turns, "company", lambda turns, present, of, gone: [])
    broken(Case(program_of(1), ("departure",)), "leaves with the memory of optimizer 1")


def test_it_finds_a_loss_that_counts_as_disagreement(monkeypatch):
    """All change their parameters; the replica that is lost cannot announce that."""
    monkeypatch.setattr(FaultCounts, "miss", lambda counts, absent: None)
    broken(Case((("changed", "a"),), ("kill",), users="a"), "others did not change")


def test_it_finds_a_departure_that_counts_on_dropped_optimizers(monkeypatch):
    def all_present(turns, present, of, gone):
        return [each for each in present if each != of]

    monkeypatch.setattr(turns, "company", all_present)
    broken(Case(ANEW, ("departure",), users="a"), "waits for what will never come")


def test_it_finds_an_agreement_that_brings_back_a_lost_replica(monkeypatch):
    def each_for_itself(pending, user, turn):
        return [each for each in pending if turn >= turn_of(each.next_turns, user)]

    monkeypatch.setattr(turns, "due_before", each_for_itself)
    program = program_of(2, "a")
    broken(Case(program, ("kill", "kill"), users="a"), "which was lost before any rank had begun")


def test_it_finds_a_group_formed_ahead_that_a_newcomer_does_not_have(monkeypatch):
    def is_on_some(agreement):
        return any(each.ahead == agreement.members for each in agreement.reports.values())

    monkeypatch.setattr(Agreement, "formed", property(is_on_some))
    broken(Case(program_of(3, "a"), ("join",), users="a"), "has not formed the group")


def test_it_finds_a_newcomer_that_knows_its_step_but_not_its_turn(monkeypatch):
    """Training goes back, and comes to the same step again: the state of the earlier one is another."""
    monkeypatch.setattr(GuestEntry, "is_at", lambda entry, step, ahead: step == entry.step)
    program = (("step", "a"), ("back", 0), ("step", "a"), ("step", "a"), ("step", "a"))
    broken(Case(program, ("join",), users="a"), "waits for what will never come")


def test_it_finds_a_newcomer_whose_state_cannot_come(monkeypatch):
    """Training goes back before the step at which all wait for it."""
    monkeypatch.setattr(agreement, "is_postponed", lambda reports: False)
    program = (("step", "a"), ("back", 0), ("step", "a"))
    broken(Case(program, ("join",), users="a"), "have used different results")
