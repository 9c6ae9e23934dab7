"""Sends requests to several stores, with one thread for each store. At the start all clients agree
which processes are the stores of the run.
"""

import logging
import random
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from itertools import count
from secrets import token_hex
from typing import Any

from torch.distributed import DistNetworkError

from detonation.cluster.processes.waiting import Awaited
from detonation.cluster.quorum.connection import Connection
from detonation.cluster.quorum.register import (
    Change,
    Proposal,
    Removal,
    Swap,
    compares,
    reads,
)

_MEMBERS = "detonation/store/members"
ALL_S = 30.0
"""Seconds for which a client waits at the start for the remaining stores, after a majority of the
stores has answered.
"""
HUNG_S = 5.0
"""Seconds after which a client gives up a request without an answer. The thread of this request
keeps waiting, and a new thread connects to the store.
"""
_RETRY_S = 0.2
_LOOK_S = 0.2
_BACK_OFF_S = 0.002
_MOST_BACK_OFF_S = 0.1
_log = logging.getLogger("detonation")


class Call:
    """One or more proposals, each for one key, that a thread makes together. The thread waits until
    all of them are decided.
    """

    def __init__(self, proposals: Mapping[str, Proposal | Removal]) -> None:
        self.proposals = proposals
        self.awaited = True

    @property
    def over(self) -> bool:
        return all(each.over for each in self.proposals.values())

    @property
    def beaten(self) -> bool:
        return any(each.beaten for each in self.proposals.values())

    def requests(self, store: int) -> dict[str, Swap]:
        asked = {key: each.request(store) for key, each in self.proposals.items()}
        return {key: request for key, request in asked.items() if request is not None}

    def receive(self, store: int, answers: Mapping[str, bytes]) -> None:
        for key, raw in answers.items():
            self.proposals[key].receive(store, raw)

    def lost(self, store: int) -> None:
        for each in self.proposals.values():
            each.lost(store)

    def again(self) -> None:
        for each in self.proposals.values():
            if each.beaten:
                each.again()


class Stores:
    """The stores at `addresses`, whose number is odd. Each store has a thread of its own, so a
    store without an answer does not delay requests to other stores.

    A call waits at most `timeout_s` seconds for a majority of the stores. The call fails earlier if
    so many stores have ended that no majority is left.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]], timeout_s: float) -> None:
        self.host, self.port = addresses[0]
        self._timeout_s = timeout_s
        self._majority = len(addresses) // 2 + 1
        self._name = token_hex(8)
        self._numbers = count()
        self._changed = threading.Condition()
        self._closed = False
        self._calls: list[Call] = []
        self._members: frozenset[str] | None = None
        self._record = b""
        self._ready_at = 0.0  # time at which a majority of the stores first answered
        self._connections = [Connection(n, *each) for n, each in enumerate(addresses)]
        self._threads = [self._start(each) for each in self._connections]

    def close(self) -> None:
        """Ends the threads that send requests to the stores."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def changed(self, changes: Mapping[str, Change]) -> list[Any]:
        """Changes each key as `changes` says, independently of the other keys. Returns the results
        in the order of `changes`.
        """
        proposals = {key: self._proposal(change) for key, change in changes.items()}
        self._decide(proposals)
        return [each.result for each in proposals.values()]

    def remove(self, key: str) -> None:
        """Removes `key` from all stores that answer. Returns when a majority of the stores has
        removed it.
        """
        self._decide({key: Removal(len(self._connections))})

    def _proposal(self, change: Change) -> Proposal:
        who = f"{self._name}-{next(self._numbers):x}"
        return Proposal(len(self._connections), who, change)

    def _decide(self, proposals: Mapping[str, Proposal | Removal]) -> None:
        """Sends `proposals` to the stores, and waits until a majority of the stores has decided all
        of them.
        """
        call = Call(proposals)
        deadline = time.monotonic() + self._timeout_s
        pause = _BACK_OFF_S
        with self._changed:
            # wait, because a client makes one change of a key at a time, see `Cell.applied`
            self._changed.wait_for(lambda: not self._uses_keys(proposals))
            self._calls.append(call)
            self._changed.notify_all()
        try:
            while not self._is_over(call, deadline):
                # Another client has a higher ballot. Random pauses let one client go first.
                time.sleep(random.uniform(0, pause))
                pause = min(2 * pause, _MOST_BACK_OFF_S)
                with self._changed:
                    call.again()
                    self._changed.notify_all()
        finally:
            with self._changed:
                call.awaited = False
                if not call.over:
                    self._calls.remove(call)
                self._drop_over()
                self._changed.notify_all()

    def _uses_keys(self, keys: Collection[str]) -> bool:
        """True if another thread still waits for a change or a read of one of `keys`."""
        return any(
            each.awaited and not each.proposals.keys().isdisjoint(keys) for each in self._calls
        )

    def _is_over(self, call: Call, deadline: float) -> bool:
        """Waits until `call` is decided, or beaten by another client. Returns True if `call` is
        decided.
        """
        with self._changed:
            while not call.over and not call.beaten:
                self._require_majority(deadline)
                self._leave_hung()
                self._changed.wait(_LOOK_S)
            return call.over

    def _require_majority(self, deadline: float) -> None:
        ended = sum(each.ended for each in self._connections)
        too_many = ended > len(self._connections) - self._majority
        if self._closed or too_many or time.monotonic() > deadline:
            raise DistNetworkError(f"no majority of the stores answers: {self._away()}")

    def _away(self) -> str:
        return ", ".join(f"{each.name} ({each.why})" for each in self._connections if each.why)

    def _drop_over(self) -> None:
        """Forgets each call for which no thread waits any more, once no connected store needs its
        requests. So a removal still reaches all connected stores after its thread has returned.
        """
        ready = [each.number for each in self._connections if each.is_open]
        self._calls = [
            each for each in self._calls if each.awaited or any(map(each.requests, ready))
        ]

    def _leave_hung(self) -> None:
        """Replaces each connection whose request has had no answer for `HUNG_S` seconds. The thread
        of the old connection ends when the answer arrives.
        """
        for number, each in enumerate(self._connections):
            if each.since and time.monotonic() - each.since > HUNG_S:
                self._tell_lost(each, f"no answer for {HUNG_S:g} s")
                fresh = Connection(number, each.host, each.port)
                fresh.why = each.why
                fresh.told = True
                self._connections[number] = fresh
                for call in self._calls:
                    call.lost(number)
                self._threads[number] = self._start(fresh)

    # The methods below handle one store. Most of them run in the thread of this store.

    def _start(self, connection: Connection) -> threading.Thread:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name=f"store {connection.name}", daemon=True
        )
        thread.start()
        return thread

    def _serve(self, connection: Connection) -> None:
        while self._uses(connection):
            try:
                if not connection.is_open:
                    connection.since = time.monotonic()
                    connection.connect()
                    self._admit(connection)
                    continue
                call, requests = self._next(connection)
                answers = connection.answers(requests)
            except (OSError, RuntimeError) as error:  # torch raises subclasses of RuntimeError
                self._lose(connection, error)
                continue
            with self._changed:
                connection.since = 0.0
                if self._uses(connection) and call is not None:
                    call.receive(connection.number, answers)
                    self._drop_over()
                    self._changed.notify_all()

    def _uses(self, connection: Connection) -> bool:
        return not self._closed and self._connections[connection.number] is connection

    def _next(self, connection: Connection) -> tuple[Call | None, dict[str, Swap]]:
        """Waits until there are requests to the store of `connection`. Returns these requests and
        their `Call`, which is None for the request that writes the list of the run's stores.
        Returns no requests if the connection is not used any more.
        """
        with self._changed:
            while self._uses(connection):
                connection.since = time.monotonic()
                if self._record and not connection.told_members:
                    connection.told_members = True
                    return None, {_MEMBERS: (b"", self._record)}
                for call in self._calls:
                    if requests := call.requests(connection.number):
                        return call, requests
                connection.since = 0.0
                self._changed.wait()
        return None, {}

    def _admit(self, connection: Connection) -> None:
        """Records that the store of `connection` answers. Once all clients have agreed on the
        stores of the run, only these stores are used.
        """
        with self._changed:
            connection.since = 0.0
            self._judge(connection)
            if connection.told and not connection.ended:
                connection.told = False
                _log.warning("the store at %s answers again", connection.name)
            self._changed.notify_all()

    def _judge(self, connection: Connection) -> None:
        """Stops using a store whose process is not in the list of the run's stores. Such a process
        was restarted and has lost its promises, or it started too late.
        """
        if self._members is None or connection.identity in self._members:
            return
        connection.ended = True
        connection.told = False
        self._tell_lost(connection, "started after the run, so it is empty and not used")
        fresh = Connection(connection.number, connection.host, connection.port)
        fresh.ended = True
        fresh.why = connection.why
        # this ends the thread of the old connection
        self._connections[connection.number] = fresh

    def _lose(self, connection: Connection, error: Exception) -> None:
        with self._changed:
            connection.since = 0.0
            connection.lose(error)
            if not self._uses(connection):
                return
            self._tell_lost(connection, connection.why)
            for call in self._calls:
                call.lost(connection.number)
            self._drop_over()
            self._changed.notify_all()
        time.sleep(_RETRY_S)

    def _tell_lost(self, connection: Connection, why: str) -> None:
        """Logs once that a store does not answer. Logs nothing before all clients have agreed on
        the stores of the run.
        """
        connection.why = why
        if self._members is None or connection.told or self._closed:
            return
        connection.told = True
        left = sum(each.is_open and not each.why for each in self._connections)
        _log.warning(
            "the store at %s is lost (%s): %d of %d are left, %d are needed",
            *(connection.name, why, left, len(self._connections), self._majority),
        )

    # The methods below run at the start, when all clients agree on the stores of the run.

    def agree(self, limit_s: float) -> None:
        """Agrees with all other clients which processes are the stores of the run.

        A store that was started again has lost its promises, and a store that starts late has made
        none. Clients must not ask such a store. So the first client writes the identities of
        all stores that answer, and all clients use only these stores. Raises `ValueError` if no
        majority of the stores answers within `limit_s` seconds, or if the addresses are wrong.
        """
        awaited = Awaited("this replica", limit_s)
        while not self._agreed():
            try:
                awaited.wait(self._away, _LOOK_S)
            except TimeoutError as error:
                raise ValueError(
                    f"no majority of the stores answers ({self._away()}): start detonation meet at"
                    " each address"
                ) from error

    def _agreed(self) -> bool:
        """True once the identities of the run's stores are decided, and this client uses these
        stores.
        """
        ready = self._different()
        if len(ready) < self._majority:
            return False
        now = time.monotonic()
        self._ready_at = self._ready_at or now
        change: Change = reads
        if now - self._ready_at > ALL_S or len(ready) == len(self._connections):
            own = [each.identity for each in ready]
            text = " ".join([str(len(self._connections)), *sorted(own)])
            change = compares(b"", text.encode())
        proposal = self._proposal(change)
        self._decide({_MEMBERS: proposal})
        if proposal.result is None:
            return False
        self._adopt(proposal.result.decode(), proposal.cell.encode())
        return True

    def _different(self) -> list[Connection]:
        """Returns the connections to the stores that answer. Raises `ValueError` if two addresses
        lead to the same process.
        """
        ready = [each for each in list(self._connections) if each.is_open]
        first: dict[str, Connection] = {}
        for each in ready:
            other = first.setdefault(each.identity, each)
            if other is not each:
                raise ValueError(
                    f"{other.name} and {each.name} are one store: start detonation meet once for"
                    " each address"
                )
        return ready

    def _adopt(self, text: str, record: bytes) -> None:
        size, *members = text.split()
        if int(size) != len(self._connections):
            raise ValueError(
                f"{len(self._connections)} stores are named, but the run has {size}: give all"
                " replicas the same addresses"
            )
        with self._changed:
            self._members = frozenset(members)
            self._record = record
            for each in list(self._connections):
                if each.is_open:
                    self._judge(each)
                elif each.tried:  # the first attempt to connect has ended, and has failed
                    self._tell_lost(each, each.why)
            used = [each for each in self._connections if each.is_open]
            self._changed.notify_all()
        if sum(each.ended for each in self._connections) > len(self._connections) - self._majority:
            raise ValueError(
                f"too few stores have been up since the run began: {self._away()}: restart all"
                " stores, and then the replicas"
            )
        if used:
            self.host = used[0].host
            self.port = used[0].port
