"""The search of all states of a model, and what it prints."""

import sys
import time
from collections import deque
from dataclasses import dataclass

from states import Broken


@dataclass(frozen=True)
class Found:
    """What a search found. broken: the property that does not hold, after the `events`. whole: it
    has visited all states."""

    states: int
    seconds: float
    broken: str = ""
    events: tuple[str, ...] = ()
    whole: bool = True

    def __str__(self):
        line = f"{self.states:10,} states {self.seconds:7.1f} s"
        if not self.whole and not self.broken:
            line += ", not all"
        if not self.broken:
            return line
        lines = [f"{number:3} {event}" for number, event in enumerate(self.events, 1)]
        return "\n".join([f"{line}, broken: {self.broken}", *lines])


def explored(case, first, successors, is_over, most=10_000_000, deep=False):
    """Visits all states, and then requires that each has a way to an end.

    Nearest states come first, so events are as few as possible; with `deep` the farthest, which
    finds what is broken sooner.

    A visited state is known by its hash of 64 bits: with ten million states one is taken for
    another with a probability of about 1 in 400,000.
    """
    began = time.process_time()
    graph = Graph()
    graph.reach(first, 0, "")
    todo = deque([first])
    over = []

    def found(broken="", number=0):
        seconds = time.process_time() - began
        return Found(len(graph.first), seconds, broken, graph.events(number), not todo)

    while todo and len(graph.first) < most:
        world = todo.pop() if deep else todo.popleft()
        number = graph.numbers[hash(world)]
        try:
            following = successors(case, world)
        except Broken as error:
            return found(str(error), number)
        if is_over(world):
            over.append(number)
        elif not following:
            return found("a rank waits for what will never come", number)
        todo.extend(after for event, after in following if graph.reach(after, number, event))
    stuck = [] if todo else graph.without_a_way_to(over)
    if stuck:
        return found("no order of events leads to an end from here", stuck[0])
    return found()


class Graph:
    """Visited states by number, with the event that led to each first, and all that lead to it."""

    def __init__(self):
        self.numbers = {}
        self.first = []
        self._before = []

    def reach(self, world, number, event):
        """Notes that `event` leads from state `number` to `world`; True if that is new."""
        key = hash(world)
        known = self.numbers.get(key)
        if known is not None:
            self._before[known].append(number)
            return False
        self.numbers[key] = len(self.first)
        self.first.append((number, sys.intern(event)))
        self._before.append([number])
        return True

    def events(self, number):
        """Shortest sequence of events that leads to state `number`."""
        events = []
        while number:
            number, event = self.first[number]
            events.append(event)
        return tuple(reversed(events))

    def without_a_way_to(self, ends):
        """Numbers of the states from which no sequence of events leads to one of `ends`."""
        reached = {*ends}
        todo = [*ends]
        while todo:
            for number in self._before[todo.pop()]:
                if number not in reached:
                    reached.add(number)
                    todo.append(number)
        return [number for number in range(len(self.first)) if number not in reached]
