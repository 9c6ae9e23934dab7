"""A state machine over all that a user does between two steps; its invariants are the laws.

Hypothesis writes programs (tests/programs.py), rule by rule, and each program then runs: on
simulated replicas, on threads along an elastic axis, and on processes.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import worlds
from programs import (
    FREEZABLE,
    SCHEMES,
    Setting,
    completed,
    first_model,
    flat,
    of_processes,
    reduced,
    simulated,
    survived,
)

PASTS = st.sampled_from(["", "went back", "another optimizer"])
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


class Programs(RuleBasedStateMachine):
    """Writes a program; `run_program` runs it at the end, once it is whole."""

    may_see_the_same = False  # batches, which only a law of lost replicas needs

    def __init__(self):
        super().__init__()
        self.program, self.marks, self.saved, self.on_disk = [], 0, [], []
        self.setting = None

    @property
    def kind(self):
        return SCHEMES[self.setting.kind]

    @initialize(kind=st.sampled_from([*SCHEMES]), pair=st.booleans(), same=st.booleans())
    def begin(self, kind, pair, same):
        self.setting = Setting(kind, pair, same and self.may_see_the_same)
        self.added = False

    def write(self, *operations):
        self.program += operations

    def forget_marks(self):
        """States of before do not fit any more."""
        self.saved = []

    @rule(steps=st.integers(1, 3))
    def step(self, steps):
        self.write(*[("step",)] * steps)

    @precondition(lambda self: self.setting.pair)
    @rule()
    def step_the_first_alone(self):
        self.write(("step", 1))

    @rule(zeroes=st.booleans())
    def backward(self, zeroes):
        self.write(("backward",), *[("zero",)] * zeroes)

    @rule(operation=st.sampled_from(["evaluate", "state", "interrupt"]))
    def look(self, operation):
        self.write((operation,))

    @rule(times=st.integers(1, 2))
    def synchronize(self, times):
        self.write(*[("synchronize",)] * times)

    @rule(names=st.sets(st.sampled_from(FREEZABLE)), has_gradients=st.booleans())
    def freeze(self, names, has_gradients):
        self.write(*[("backward",)] * has_gradients, ("freeze", *sorted(names)))

    @rule()
    def mark(self):
        self.marks += 1
        self.saved.append(self.marks)
        self.write(("mark", self.marks))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def go_back(self, data):
        self.write(("back", data.draw(st.sampled_from(self.saved))))

    @rule(steps=st.integers(1, 8))
    def try_and_go_back(self, steps):
        """As a search for a learning rate does, or who meets a spike of the loss."""
        self.mark()
        self.write(*[("step",)] * steps, ("back", self.marks))

    @precondition(lambda self: self.saved and not self.kind.rounds)
    @rule()
    def not_finite(self):
        self.write(("not_finite", self.saved[-1]))

    @precondition(lambda self: not self.added)
    @rule()
    def add(self):
        self.added = True
        self.forget_marks()
        self.write(("add",))

    @precondition(lambda self: self.kind.other is not None)
    @rule(other=st.booleans())
    def reconfigure(self, other):
        self.forget_marks()
        self.write(("reconfigure", other))

    @rule(number=st.integers(0, 1), holder=st.integers(-1, 2))
    def make_anew(self, number, holder):
        self.forget_marks()
        self.write(("anew", number, holder))

    def teardown(self):
        if self.setting is not None and self.program:
            end = [("step",)] * 2 + [("synchronize",)] * 2  # of which the second changes nothing
            self.run_program([*self.program, *end])

    def run_program(self, program):
        ends = simulated(self.setting, program)
        require_laws(self.setting, ends, 2)
        (twin, *_) = simulated(self.setting, reduced(program, self.kind))
        assert torch.equal(ends[0].weights, twin.weights), (
            "what changes nothing has changed weights"
        )
        if self.kind.conserves and remembers(program):
            require_conserved(program, ends)


def require_laws(setting, ends, replicas):
    """The replicas are equal wherever they must be, and count those that are there."""
    assert len(ends) == replicas
    for end in ends:
        assert end.sizes == {replicas}, "a change of the replicas was not adopted"
    common = set.intersection(*(set(end.equal) for end in ends))
    assert common
    for at in sorted(common):
        assert len({end.equal[at] for end in ends}) == 1, f"replicas differ after operation {at}"


def remembers(program):
    """False where an optimizer or a replica ends with its memory."""
    forgets = {"anew", "lose", "join"}
    return not any(operation[0] in forgets for operation in program)


def require_conserved(program, ends, left=()):
    """Law 1: what all were given, those that have left among them, is in weights or memories.

    A frozen parameter loses its memory.
    """
    frozen = {name for operation, *names in program if operation == "freeze" for name in names}
    keeps = flat(
        torch.full_like(parameter, name not in frozen)
        for name, parameter in first_model().named_parameters()
    )
    start = flat(first_model().parameters())
    everything = torch.zeros_like(start)
    for tick in set().union(*(end.given for end in [*ends, *left])):
        of_all = [end.given[tick] for end in [*ends, *left] if tick in end.given]
        everything += torch.stack(of_all).mean(0)
    moved = (start - ends[0].weights) / 0.1
    waits = torch.stack([end.unsent for end in ends]).mean(0)
    lost = (moved + waits - everything) * keeps
    torch.testing.assert_close(lost, torch.zeros_like(lost), rtol=0, atol=1e-4)


class SavingPrograms(Programs):
    """With checkpoints on disk, too."""

    came = False

    @precondition(lambda self: not self.came)
    @rule()
    def save(self):
        self.marks += 1
        self.saved.append(self.marks)
        self.on_disk = [*self.on_disk, self.marks]
        self.write(("save", self.marks))

    @precondition(lambda self: set(self.on_disk) & set(self.saved))
    @rule(data=st.data())
    def load(self, data):
        choices = [mark for mark in self.on_disk if mark in self.saved]
        self.write(("load", data.draw(st.sampled_from(choices))))


class ProcessPrograms(SavingPrograms):
    """The same on two processes, which simulated replicas equal bit for bit."""

    def run_program(self, program):
        with tempfile.TemporaryDirectory() as folder:
            ends = worlds.run(of_processes, 2, 1, self.setting, program, Path(folder))
        require_laws(self.setting, ends, 2)
        (twin, *_) = simulated(self.setting, reduced(program, self.kind))
        assert torch.equal(ends[0].weights, twin.weights), "processes differ from a simulation"


class ElasticPrograms(SavingPrograms):
    """The same on an elastic axis, on which replicas are lost, leave and come in."""

    may_see_the_same = True

    def __init__(self):
        super().__init__()
        self.alive, self.numbers = [0, 1, 2], 3

    @property
    def only(self):
        return not self.setting.pair

    def have(self, past):
        """Lets training have come further before: it went back, or has another optimizer now."""
        if past == "went back":
            self.try_and_go_back(6)
        if past == "another optimizer":
            self.step(6)
            self.make_anew(0, self.alive[0])

    def of(self, data):
        number = data.draw(st.sampled_from(self.alive))
        self.alive.remove(number)
        self.forget_marks()
        return number

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data(), names=st.none() | st.sets(st.sampled_from(FREEZABLE)), past=PASTS)
    def lose(self, data, names, past):
        """In a step in which all may change what they train.

        The loss is noticed at the latest where the message of that step is needed, and adopted in
        the step after it.
        """
        self.have(past)
        changes = [] if names is None else [("freeze", *sorted(names))]
        self.write(*changes, ("lose", self.of(data)), ("step",), ("step",))

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data(), steps=st.integers(0, 2), past=PASTS)
    def depart(self, data, steps, past):
        self.have(past)
        self.write(*[("step",)] * steps, ("depart", self.of(data)), ("step",))

    @precondition(lambda self: self.only and not self.came and not self.added)
    @rule(past=PASTS)
    def join(self, past):
        self.have(past)
        self.came = True
        self.forget_marks()
        self.alive.append(self.numbers)
        self.write(("join",))

    def run_program(self, program):
        with tempfile.TemporaryDirectory() as folder:
            ends, left, ran = survived(self.setting, program, Path(folder))
        require_laws(self.setting, ends, len(self.alive))
        names = {operation[0] for operation in program}
        if self.setting.same and self.changes_nothing(names):
            (twin, *_) = simulated(self.setting, reduced(ran, self.kind))
            torch.testing.assert_close(ends[0].weights, twin.weights, **CLOSE)
        if self.kind.rounds and not self.setting.same and "depart" in names and "join" not in names:
            self.require_open_rounds(program, ends)
        if self.kind.conserves and remembers(program):
            require_conserved(program, ends, left)

    def changes_nothing(self, names):
        """True where law 12 promises the weights of a world that no replica left and none joined.

        A newcomer has no memory and no open round, and one that leaves gives its memory to another.
        """
        exceptions = {
            "full": set(),
            "demo": {"join", "depart"},
            "diloco": {"join"},
        }
        kind = self.setting.kind
        return kind in exceptions and names.isdisjoint(exceptions[kind])

    def require_open_rounds(self, program, ends):
        """A departure ends open rounds, as `synchronize` before it does."""
        with tempfile.TemporaryDirectory() as folder:
            others, _, _ = survived(self.setting, completed(program), Path(folder))
        torch.testing.assert_close(ends[0].weights, others[0].weights, **CLOSE)


def search(machine, examples, steps):
    """Runs the state machine: the same programs each time."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            suppress_health_check=[*HealthCheck],
        ),
    )


def test_the_laws_hold_whatever_was_done_between_two_steps():
    search(Programs, 30, 10)


def test_the_laws_hold_on_an_elastic_axis_whatever_was_done_between_two_steps():
    search(ElasticPrograms, 25, 8)


@pytest.mark.usefixtures("lasting_worlds")
def test_the_laws_hold_between_processes_whatever_was_done_between_two_steps():
    search(ProcessPrograms, 4, 8)


@pytest.mark.long
@pytest.mark.usefixtures("lasting_worlds")
def test_the_laws_hold_in_long_programs_between_processes():
    search(ProcessPrograms, 100, 20)


@pytest.mark.long
def test_the_laws_hold_in_long_programs():
    search(Programs, 1000, 25)


@pytest.mark.long
def test_the_laws_hold_in_long_programs_on_an_elastic_axis():
    search(ElasticPrograms, 300, 16)
