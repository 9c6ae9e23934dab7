"""The search of all states of a model, and what it prints."""

import json
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

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


def explored(case, first, successors, is_over, most=10_000_000, deep=False, same=None):
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
        for event, after in following:
            key = hash(after)
            if same and not graph.known(key, number):
                try:
                    event, after = same(case, event, after)
                except Broken as error:
                    return found(f"{error} (after: {event})", number)
            elif same:
                continue
            if graph.reach(after, number, event, key):
                todo.append(after)
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
        self._stands_for = {}

    def known(self, key, number):
        """Notes what leads to a state for which another one stands, if that is known."""
        known = self._stands_for.get(key)
        if known is None:
            return False
        self._before[known].append(number)
        return True

    def reach(self, world, number, event, of=None):
        """Notes that `event` leads from state `number` to `world`; True if that is new.

        of: hash of a state for which `world` stands.
        """
        key = hash(world)
        known = self.numbers.get(key)
        self._stands_for[of] = len(self.first) if known is None else known
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


class Results:
    """What was found, by faults and steps; in a file of JSON lines, from which a search goes on."""

    def __init__(self, search, paths, most):
        self._search = search
        self._path = None
        self._most = most
        self.lines = {}
        if paths:
            self._path = Path(paths[0])
            self._path.touch()
            for text in self._path.read_text().splitlines():
                line = json.loads(text)
                if line["whole"] or line["states"] >= most:
                    self.lines[line["faults"], line["steps"]] = line

    def of(self, name, case, steps):
        key = name, steps
        if key not in self.lines:
            found = self._search(case, self._most)
            line = {
                "faults": name,
                "steps": steps,
                "states": found.states,
                "seconds": round(found.seconds, 1),
                "whole": found.whole,
                "broken": found.broken,
            }
            self.lines[key] = line
            print(f"{name:60} {steps} steps {found}", flush=True)
            if self._path:
                with self._path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return self.lines[key]
