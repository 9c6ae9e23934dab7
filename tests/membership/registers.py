"""Every order of what may happen to a key on three stores.

Clients change it by the real `Proposal`, stores end, answers are lost, requests arrive late.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations

from detonation.cluster.quorum.register import Change, Proposal, Swap

STORES = 3


@dataclass(frozen=True)
class Call:
    """A call of a client: what it does, and which calls were over when it began."""

    name: str
    change: Change
    after: frozenset[str] = frozenset()


@dataclass
class Client:
    """A client, which makes `calls` one after another."""

    calls: Sequence[Call]
    proposal: Proposal | None = None
    begun: int = 0
    repeated: int = 0

    def key(self) -> object:
        state = self.proposal
        if state is None:
            return self.begun, self.repeated
        mine = state._ballot, state._proposed, *state._tried.items()
        return self.begun, self.repeated, state.beaten, mine

    def copied(self) -> "Client":
        mine = copy.copy(self)
        if mine.proposal is not None:
            mine.proposal = copy.copy(mine.proposal)
            mine.proposal._cells = [*mine.proposal._cells]
            mine.proposal._tried = {**mine.proposal._tried}
        return mine


@dataclass
class World:
    """Stores, clients, what is on its way to a store, and what was answered. faults: those that may still happen."""

    clients: list[Client]
    faults: int
    again: int
    stores: list[bytes | None] = field(default_factory=lambda: [b""] * STORES)
    stray: tuple[tuple[int, Swap], ...] = ()
    began: dict[str, Call] = field(default_factory=dict)
    results: dict[str, object] = field(default_factory=dict)

    def key(self) -> object:
        told = tuple(sorted((name, str(result)) for name, result in self.results.items()))
        starts = tuple(
            sorted((name, tuple(sorted(call.after))) for name, call in self.began.items())
        )
        # which store is which does not matter
        columns = sorted(map(self._column, range(STORES)), key=hash)
        return tuple(columns), self.faults, told, starts, tuple(c.key() for c in self.clients)

    def _column(self, store: int) -> object:
        known = [c.proposal._cells[store] if c.proposal else None for c in self.clients]
        return (
            self.stores[store],
            tuple(known),
            tuple(request for where, request in self.stray if where == store),
        )

    def copied(self) -> "World":
        mine = copy.copy(self)
        mine.clients = [client.copied() for client in self.clients]
        mine.stores = [*self.stores]
        mine.began = {**self.began}
        mine.results = {**self.results}
        return mine

    def begin_calls(self) -> None:
        """Lets each client without a call begin its next one."""
        for number, client in enumerate(self.clients):
            if client.proposal is None and client.begun < len(client.calls):
                call = client.calls[client.begun]
                client.begun += 1
                self.began[call.name] = replace(call, after=frozenset(self.results))
                client.proposal = Proposal(STORES, f"{number}-{client.begun}", call.change)

    def moves(self) -> Iterator[tuple[str, int, int]]:
        """All that may happen next."""
        for number, client in enumerate(self.clients):
            if client.proposal is not None:
                yield from self._moves_of(number, client.proposal)
        for number in range(len(self.stray)):
            yield "late", number, 0
        if self.faults:
            yield from (("end", 0, store) for store in range(STORES) if self.living(store))

    def _moves_of(self, number: int, proposal: Proposal) -> Iterator[tuple[str, int, int]]:
        if proposal.beaten and self.clients[number].repeated < self.again:
            yield "again", number, 0
        for store in range(STORES):
            if self.stores[store] is not None and proposal.request(store) is not None:
                yield "ask", number, store
                if self.faults:
                    yield "unheard", number, store
                    yield "stray", number, store
        if self.faults:
            yield "die", number, 0

    def living(self, store: int) -> bool:
        """True if `store` answers, and may end: a majority always lives."""
        return (
            self.stores[store] is not None
            and sum(each is not None for each in self.stores) > STORES // 2 + 1
        )

    def do(self, kind: str, number: int, store: int) -> None:
        """Lets one thing happen."""
        self.faults -= kind in ("unheard", "stray", "die", "end")
        if kind == "end":
            self.stores[store] = None
        elif kind == "late":
            late = self.stray[number]
            self.stray = (*self.stray[:number], *self.stray[number + 1 :])
            self._ask(*late)
        else:
            self._do_client(kind, self.clients[number], store)
        self.begin_calls()

    def _do_client(self, kind: str, client: Client, store: int) -> None:
        proposal = client.proposal
        assert proposal is not None
        if kind == "die":
            client.proposal = None
            client.begun = len(client.calls)
        elif kind == "again":
            client.repeated += 1
            proposal.again()
        else:
            self._request(kind, proposal, store)
            if proposal.over:
                self.results[client.calls[client.begun - 1].name] = proposal.result
                client.proposal = None

    def _request(self, kind: str, proposal: Proposal, store: int) -> None:
        request = proposal.request(store)
        assert request is not None
        if kind == "stray":
            self.stray = (*self.stray, (store, request))
            proposal.lost(store)
            return
        found = self._ask(store, request)
        if kind == "unheard":
            proposal.lost(store)
        elif found is not None:
            proposal.receive(store, found)

    def _ask(self, store: int, request: Swap) -> bytes | None:
        """The store's compare-and-set."""
        if self.stores[store] == request[0]:
            self.stores[store] = request[1]
        return self.stores[store]

    def is_linear(self) -> bool:
        """True if one order of the calls explains all results: a call that was over comes before those that began
        later, and one without an end may or may not count."""
        over = [*self.results]
        pending = [name for name in self.began if name not in self.results]
        orders = (
            order
            for n in range(len(pending) + 1)
            for order in permutations([*over, *pending], len(over) + n)
        )
        return any({*over} <= {*order} and self._explains(order) for order in orders)

    def _explains(self, order: Sequence[str]) -> bool:
        value: bytes | None = None
        for position, name in enumerate(order):
            if any(later in self.began[name].after for later in order[position + 1 :]):
                return False
            value, result = self.began[name].change(value)
            if name in self.results and self.results[name] != result:
                return False
        return True


def searched(
    calls: Sequence[Sequence[Call]], faults: int, again: int = 1, most: int = 10**9
) -> int:
    """Visits all states; returns their number. Raises `AssertionError` with the events before a fault."""
    first = World([Client(each) for each in calls], faults, again)
    first.begin_calls()
    seen = {first.key()}
    todo = [(first, ())]
    while todo and len(seen) < most:
        world, path = todo.pop()
        moves = [*world.moves()]
        waits = any(c.proposal is not None and not c.proposal.beaten for c in world.clients)
        assert any(move[0] in ("ask", "again") for move in moves) or not waits, ("no end", path)
        for move in moves:
            following = world.copied()
            before = len(following.results)
            following.do(*move)
            if len(following.results) > before:
                assert following.is_linear(), (following.results, (*path, move))
            if (key := following.key()) not in seen:
                seen.add(key)
                todo.append((following, (*path, move)))
    return len(seen)


def walked(calls: Sequence[Sequence[Call]], faults: int, seed: int, most: int = 2000) -> int:
    """Lets things happen at random until all calls are over; returns how many did.

    Raises `AssertionError` with the events before a fault, or if `most` were not enough.
    """
    draw = random.Random(seed)
    world = World([Client(each) for each in calls], faults, again=most)
    world.begin_calls()
    path: list[tuple[str, int, int]] = []
    while any(client.proposal is not None for client in world.clients):
        moves = [*world.moves()]
        usual = [move for move in moves if move[0] in ("ask", "again", "late")]
        if usual and draw.random() < 0.9:
            moves = usual
        path.append(draw.choice(moves))
        before = len(world.results)
        world.do(*path[-1])
        assert len(path) < most, ("no end", path)
        assert len(world.results) == before or world.is_linear(), (world.results, path)
    return len(path)
