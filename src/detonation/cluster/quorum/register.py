"""The protocol by which clients change or read one key that several stores keep. A minority of the
stores may be lost.

Each change of a key is a round of Paxos that starts from the value chosen last (CASPaxos: Rystsov
2018, arXiv:1802.07000). The stores run no code of this package. Each store keeps one `Cell` for a
key, and clients change the cell by the store's own compare-and-set (active disks: Chockler and
Malkhi 2002).

This module uses no clock and no network: a `Proposal` returns requests and receives answers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Ballot = tuple[int, str]
"""Identifies one attempt of a client to change a key: a number, and the text "CLIENT-CALL", which
makes the ballot unique.
"""
Change = Callable[[bytes | None], tuple[bytes | None, Any]]
"""A function from the present value of a key to a pair: the new value, and the client's result of
the change. The value None means that the key is missing.
"""
Swap = tuple[bytes, bytes | None]
"""Arguments of a compare-and-set on a cell: its expected bytes and its new bytes. None as new bytes
removes the cell.
"""
READ: Swap = (b"", b"")
_NONE: Ballot = (0, "")


@dataclass(frozen=True)
class Cell:
    """State of one key in one store. A ballot identifies one attempt of a client to change the key.

    promised: the cell accepts no ballot below this ballot. accepted: the ballot that wrote `value`.
    applied: for each client, the last ballot that changed the value. A client that repeats a change
    finds in `applied` whether its earlier attempt has changed the value. The cell keeps only one
    such ballot of each client, so a client makes one change of the key at a time.
    """

    promised: Ballot = _NONE
    accepted: Ballot = _NONE
    value: bytes | None = None
    applied: tuple[Ballot, ...] = ()

    def encode(self) -> bytes:
        """Returns the bytes that a store keeps for this cell. An empty cell gives b"", so that a
        missing key reads as an empty cell.
        """
        if self == Cell():
            return b""
        ballots = [f"{n}.{who}" for n, who in (self.promised, self.accepted, *self.applied)]
        mark = "+"
        if self.value is None:
            mark = "-"
        return " ".join([*ballots, mark]).encode() + b"\n" + (self.value or b"")

    @classmethod
    def decode(cls, raw: bytes) -> "Cell":
        """Returns the cell from which `encode` made the bytes `raw`."""
        if not raw:
            return cls()
        head, _, value = raw.partition(b"\n")
        *texts, mark = head.decode().split(" ")
        promised, accepted, *applied = (_ballot(text) for text in texts)
        found = None
        if mark == "+":
            found = value
        return cls(promised, accepted, found, tuple(applied))


def _ballot(text: str) -> Ballot:
    number, _, who = text.partition(".")
    return int(number), who


def _client(ballot: Ballot) -> str:
    return ballot[1].partition("-")[0]


class Proposal:
    """One change of one key. Each of the `stores` keeps a `Cell` for this key, and a majority of
    the stores must accept the change.

    who: the text "CLIENT-CALL", unique for each proposal. over: True once the change is decided;
    then `result` and `cell` are set. beaten: True if another client has a higher ballot; then the
    proposal pauses until `again` is called, after a random time.

    The proposal has three stages:

    1. It reads the cell of each store. If the cells of a majority have accepted one ballot, the
       value of this ballot is the chosen value. If the change keeps the chosen value, the proposal
       is over.
    2. It asks each store to accept no ballot below the ballot of this proposal, and waits for the
       promise of a majority. Among the cells of these stores, it takes the value with the highest
       accepted ballot as the present value. It computes the new value from the present value.
    3. It sends the new value to each store, with the ballot of this proposal. When a majority has
       accepted this ballot, the new value is chosen, and the proposal is over.
    """

    def __init__(self, stores: int, who: str, change: Change) -> None:
        self.over = self.beaten = False
        self.result: Any = None
        self.cell = Cell()
        self._majority = stores // 2 + 1
        self._who = who
        self._change = change
        self._cells: list[Cell | None] = [None] * stores
        self._ballot = _NONE
        self._proposed: Cell | None = None
        self._tried: dict[Ballot, Any] = {}

    def request(self, store: int) -> Swap | None:
        """Returns the next request to the store with index `store`; None if the proposal needs
        nothing from this store now.
        """
        if self.over or self.beaten:
            return None
        cell = self._cells[store]
        if cell is None:
            return READ
        if cell.promised > self._ballot or cell.accepted == self._ballot:
            return None
        target = self._proposed or replace(cell, promised=self._ballot)
        if cell == target:
            return None
        return cell.encode(), target.encode()

    def receive(self, store: int, raw: bytes) -> None:
        """Handles the answer of `store`: the bytes of its cell are now `raw`."""
        if self.over or self.beaten:
            return
        self._cells[store] = Cell.decode(raw)
        if self._ballot == _NONE:
            self._read()
        else:
            self._advance()

    def lost(self, store: int) -> None:
        """Forgets what the cell of `store` holds, because the last answer of this store was
        lost.
        """
        self._cells[store] = None

    def again(self) -> None:
        """Starts the proposal again: reads the cells anew, after a higher ballot of another client
        has beaten the proposal.
        """
        self.beaten = False
        self._ballot = _NONE
        self._proposed = None
        self._cells = [None] * len(self._cells)

    def _known(self) -> list[Cell]:
        return [cell for cell in self._cells if cell is not None]

    def _read(self) -> None:
        known = self._known()
        for cell in known:
            if sum(each.accepted == cell.accepted for each in known) >= self._majority:
                value, result = self._outcome(cell)
                if self._settled(cell, value):
                    self._finish(cell, result)
                    return
        if len(known) >= self._majority:
            self._ballot = (max(cell.promised[0] for cell in known) + 1, self._who)

    def _settled(self, cell: Cell, value: bytes | None) -> bool:
        """True if the proposal can end without a write, because the chosen `cell` already has the
        `value` of this change. False if an earlier attempt of this proposal is undecided: a
        majority may still accept that attempt.
        """
        return value == cell.value and (not self._tried or self._counts(cell) is not None)

    def _advance(self) -> None:
        known = self._known()
        ballot = self._ballot
        if self._proposed is None:
            promised = [cell for cell in known if cell.promised == ballot]
            if len(promised) >= self._majority:
                self._propose(max(promised, key=lambda cell: cell.accepted))
        elif sum(cell.accepted == ballot for cell in known) >= self._majority:
            self._finish(self._proposed, self._tried[ballot])
        self.beaten = not self.over and any(cell.promised > ballot for cell in known)

    def _propose(self, latest: Cell) -> None:
        value, result = self._outcome(latest)
        applied = latest.applied
        if value != latest.value:
            others = (each for each in applied if _client(each) != _client(self._ballot))
            applied = (*others, self._ballot)
        self._tried[self._ballot] = result
        self._proposed = Cell(self._ballot, self._ballot, value, applied)

    def _outcome(self, cell: Cell) -> tuple[bytes | None, Any]:
        """Applies the client's change to the value of `cell`. Returns the new value of the key, and
        the result that the client gets.
        """
        earlier = self._counts(cell)
        if earlier:
            return cell.value, self._tried[earlier]
        return self._change(cell.value)

    def _counts(self, cell: Cell) -> Ballot | None:
        """Returns the ballot of an earlier attempt of this proposal that has changed the value of
        `cell`; None if there is no such attempt.
        """
        return next((ballot for ballot in self._tried if ballot in cell.applied), None)

    def _finish(self, cell: Cell, result: Any) -> None:
        self.cell = cell
        self.result = result
        self.over = True


class Removal:
    """The removal of one key from all stores, with the same methods as `Proposal`.

    The stores forget the cell of the key, so no client may use a removed key again.
    """

    beaten = False

    def __init__(self, stores: int) -> None:
        self.result = True
        self.over = False
        self._told: set[int] = set()
        self._majority = stores // 2 + 1

    def request(self, store: int) -> Swap | None:
        """Returns the request that removes the key from `store`; None if `store` has removed the
        key.
        """
        if store in self._told:
            return None
        return b"", None

    def receive(self, store: int, raw: bytes) -> None:
        """Records that the store with index `store` has removed the key."""
        self._told.add(store)
        self.over = len(self._told) >= self._majority

    def lost(self, store: int) -> None:
        """Does nothing, because `request` repeats the request until the store has confirmed the
        removal.
        """

    def again(self) -> None:
        """Does nothing: no other client can beat a removal."""


def reads(value: bytes | None) -> tuple[bytes | None, Any]:
    """The `Change` that reads a key: it keeps the value, and the client gets this value as the
    result.
    """
    return value, value


def writes(new: bytes) -> Change:
    """Returns the `Change` that a call of `set` makes: the key gets the value `new`."""
    return lambda value: (new, None)


def compares(expected: bytes, desired: bytes) -> Change:
    """Returns the `Change` that a call of `compare_set` makes, with the same results as torch's
    `TCPStore`.
    """

    def change(value: bytes | None) -> tuple[bytes | None, Any]:
        if value == expected or (value is None and not expected):
            return desired, desired
        if value is None:
            return None, expected
        return value, value

    return change


def adds(amount: int) -> Change:
    """Returns the `Change` that a call of `add` makes: it adds `amount` to the number in the
    key.
    """

    def change(value: bytes | None) -> tuple[bytes | None, Any]:
        total = int(value or 0) + amount
        return str(total).encode(), total

    return change
