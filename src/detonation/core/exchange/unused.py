"""Finds the unused parameters of a step, which are the parameters for which no replica had a
gradient.
"""

from collections.abc import Sequence
from zlib import crc32

import torch

from detonation.core.flat.layout import Layout
from detonation.core.integrity.guard import Guard
from detonation.core.integrity.message import (
    FIRST_KNOWN,
    MOST_KNOWN,
    NEW_SET,
    NO_PARAMETERS,
    NONE_MISSING,
    UNUSED_PLACE,
    Message,
    Missing,
    MissingSets,
    in_all,
    packed,
)
from detonation.core.link import Link
from detonation.core.memory import Memory


class Unused:
    """Lets the replicas of a channel agree on the unused parameters of a step, for which no replica
    had a gradient.

    Each message reports whether its sender lacks any gradient. If one replica has all gradients, no
    parameter is unused, and nothing more is sent. If every replica lacks a gradient, each replica
    sends the set of its missing gradients, with one bit per parameter. All replicas remember the
    exchanged sets. A later message can therefore name a remembered set of its sender by a short
    code. If the messages of all replicas name remembered sets, nothing more is sent.

    For an unused parameter the step is undone: the parameter's rows in the memory of unsent values
    get their previous values back, and the base optimizer gets no gradient of this parameter.

    Args:
        guard: The guard of the channel's messages.
    """

    def __init__(self, link: Link, layout: Layout, memory: Memory | None, guard: Guard) -> None:
        self._link = link
        self._layout = layout
        self._memory = memory
        self._guard = guard
        self._most_known = min(guard.most_known, MOST_KNOWN)
        self._known: list[MissingSets] = []
        self._next = 0

    def forget(self) -> None:
        """Forgets the remembered sets of missing gradients. All replicas must call this method
        after they have loaded a new state."""
        self._known = []
        self._next = 0

    def miss(self, message: Message, numbers: Sequence[int]) -> None:
        """Records in `message` that this replica has no gradients for the parameters with the
        indices `numbers`. Must be called before the rows of these parameters are encoded, and
        before the message gets its header."""
        octets = packed(numbers, len(self._layout.slots))
        own = [sets[self._link.replica] for sets in self._known]
        if octets in own:
            says = FIRST_KNOWN + own.index(octets)
        else:
            says = NEW_SET
        rows = self._layout.row_numbers(numbers)
        missing = Missing(octets, says, tuple(self._known), rows)
        if self._memory:
            missing.kept.append(self._memory.keep(rows))
        message.missing = missing

    def settle(self, missing: Missing | None, step: int) -> frozenset[int]:
        """Returns the indices of the parameters that no replica used at `step`. Undoes the step in
        the rows of these parameters in the memory of unsent values. Called after the messages of
        `step` were received.

        Collective, but sends data only under two conditions. Every replica lacks at least one
        gradient, not necessarily of the same parameter. And at least one replica's set of missing
        gradients is not among the remembered sets.

        Args:
            missing: None if this replica has all gradients.
        """
        playback = self._link.playback
        place = UNUSED_PLACE | self._guard.place
        if playback:
            found = playback.find(place, step)
            if found is not None:
                return in_all([bytes(found.tolist())])
            return NO_PARAMETERS
        if missing is None:
            return NO_PARAMETERS
        unused = self._agree(missing)
        for kept in missing.kept:
            kept.restore(unused)
        observer = self._link.observer
        if observer and unused:
            octets = bytearray(packed(unused, len(self._layout.slots)))
            observer.received(place, step, torch.frombuffer(octets, dtype=torch.uint8))
        return unused

    def _agree(self, missing: Missing) -> frozenset[int]:
        assert missing.said is not None
        said = missing.said()
        end = FIRST_KNOWN + len(missing.known)
        if any(says == NONE_MISSING or says >= end for says in said.values()):
            return NO_PARAMETERS
        if NEW_SET in said.values():
            return in_all(self._exchanged(missing))
        return in_all(missing.known[says - FIRST_KNOWN][sender] for sender, says in said.items())

    def _exchanged(self, missing: Missing) -> MissingSets:
        """Exchanges the sets of missing gradients, and returns the sets of all replicas except lost
        replicas. Collective."""
        mine = torch.frombuffer(bytearray(missing.octets), dtype=torch.uint8)
        arriving = self._link.all_gather(mine.to(self._guard.usual.device))
        (arrived,), absent = self._link.wait([arriving])
        sets = [bytes(row) for row in arrived.tolist()]
        # Later messages carry a digest of these sets, which shows if a replica received other sets.
        self._guard.noted = crc32(b"".join(sets), self._guard.noted) >> 1
        self._known[self._next : self._next + 1] = [sets]
        self._next = (self._next + 1) % self._most_known
        return [each for sender, each in enumerate(sets) if sender not in absent]
