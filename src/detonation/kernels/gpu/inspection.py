"""Inspection: messages sealed before they leave, and inspected where they arrive, in a few launches for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from detonation.kernels.gpu.launching import INTERPRETED, KIND_OF, Addresses, Coding, Places, Slots, launch
from detonation.kernels.gpu.messages import (
    align_kernel,
    decide_kernel,
    facts_kernel,
    scan_kernel,
    seal_kernel,
    settle_kernel,
    sums_kernel,
)

LINE_BYTES, HEADER_WORDS, CHECKSUM_WORD = 4096, 16, 14
PARTS = 2 if INTERPRETED else 128
"""The programs that sum or inspect one message."""
OCTETS = 4096
"""The bytes, or the values, that a program looks at together."""


ROW, SCANNING = 1024, 512
"""The coordinates that are looked at together, and the most programs, which look at one row after the other."""


@dataclass(frozen=True)
class Limits:
    """The constants of `validate.decide_usable`: what a norm may be, and how the usual norm is remembered."""

    limit: float
    louder: float
    forget: float


class Inspector:
    """Seals and inspects `count` messages at a time, in memory that it keeps."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._columns = torch.empty(count, PARTS, LINE_BYTES // 4, dtype=torch.int32, device=device)
        self._sums = torch.empty(count, PARTS, dtype=torch.int64, device=device)
        self._firsts = torch.empty(count, dtype=torch.int32, device=device)
        self._squares = torch.empty(count, PARTS, dtype=torch.float32, device=device)
        self._faults = torch.empty(count, PARTS, dtype=torch.int32, device=device)
        self._table = torch.empty(count, 13, dtype=torch.int64, device=device)

    def seal(
        self, messages: Tensor, nbytes: int, identity: int, schema: int, step: int, origin: int, status: Tensor,
        received: int,
    ) -> None:  # fmt: skip
        """Writes the header of each message, which begins at an address for any type.

        Shapes: messages `[count, 64 + nbytes + padding]` uint8, status `[]` int64.
        """
        self._sum(messages, nbytes, skipped=0)
        launch(
            seal_kernel, self._count, messages, messages.stride(0), self._columns, self._sums, self._firsts, PARTS,
            identity, schema, step, origin, nbytes, status, received,
        )  # fmt: skip

    def inspect(
        self, messages: Tensor, nbytes: int, coding: Coding, places: Places, identity: int, schema: int, step: int,
        place: int, parameters: int, usual: Tensor, signals: bool, limits: Limits,
      ) -> Tensor:  # fmt: skip
        """Decides which messages are refused, replaces these by zeros, and returns the table of `decide_usable`.

        Shapes: messages `[count, 64 + nbytes + padding]` uint8 -> `[count, 13]` int64.
        """
        self._sum(messages, nbytes, skipped=CHECKSUM_WORD)
        body = messages[:, 4 * HEADER_WORDS :]
        constants = coding.constants
        del constants["BASIS"], constants["SELECTION"]
        launch(
            facts_kernel, self._count * PARTS, body, body.stride(0), places.statistics_at, places.indices_at,
            places.owned, self._squares, self._faults, PARTS, **constants, SOME=OCTETS,
        )  # fmt: skip
        values = places.owned * coding.k
        scale = min(coding.block, values) ** 0.5 if coding.block > 1 else 1.0
        launch(
            decide_kernel, 1, messages, messages.stride(0), self._columns, self._sums, self._firsts, PARTS,
            self._squares, self._faults, PARTS, scale, identity, schema, step, place, nbytes, parameters,
            usual, limits.limit, limits.louder, limits.forget, self._table, self._count,
            REPLICAS=1 << (self._count - 1).bit_length(), SIGNALS=signals,
        )  # fmt: skip
        return self._table

    def _sum(self, messages: Tensor, nbytes: int, skipped: int) -> None:
        total = 4 * HEADER_WORDS + nbytes
        launch(
            sums_kernel, self._count * PARTS, messages, messages.stride(0), total, -(-total // LINE_BYTES),
            self._columns, self._sums, self._firsts, PARTS, SKIPPED=skipped,
        )  # fmt: skip


def align(source: Tensor, target: Tensor) -> None:
    """Copies messages to where each begins at an address for any type.

    Shapes: source `[messages, nbytes]`, target `[messages, nbytes or more]` uint8.
    """
    launch(
        align_kernel, len(source) * PARTS, source, source.stride(0), target, target.stride(0), source.shape[1], PARTS,
        SOME=OCTETS,
    )  # fmt: skip


class Scanner:
    """Looks for values that are not finite in tensors of the same sizes, step after step."""

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        starts, row = [], 0
        for numel in numels:
            starts.append(row)
            row += -(-numel // ROW)
        self._slots, self._addresses = Slots(starts, numels, row, device), Addresses(device)
        self._rows = 64 if INTERPRETED else 4
        self._programs = max(1, min(SCANNING, -(-row // self._rows)))
        self._found = torch.empty(self._programs, dtype=torch.int64, device=device)

    def first_beyond(self, signals: Sequence[Tensor | None], limit: float) -> Tensor:
        """1 + the number of the first signal with a value that is not finite or above `limit`; 0 where none has.

        Shapes: any -> `[]` int64.
        """
        slots, device = self._slots, self._slots.device
        read = [s if s is None or s.dtype in KIND_OF else s.float() for s in signals]
        table = self._addresses.update([None if s is None else s.contiguous() for s in read])
        status = torch.empty((), dtype=torch.int64, device=device)
        launch(
            scan_kernel, self._programs, table.table, slots.starts, slots.numels, slots.count, slots.rows, limit,
            self._found, ROW=ROW, ROWS=self._rows, KINDS=table.kinds, SEARCH=slots.search,
        )  # fmt: skip
        launch(settle_kernel, 1, self._found, self._programs, slots.count, status, SOME=SCANNING)
        return status
