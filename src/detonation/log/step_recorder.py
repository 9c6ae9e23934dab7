"""The recorder: a tape that makes records of each step's messages, as the replicas received them."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from detonation.core.integrity.readback import Readback
from detonation.core.integrity.tape import Tape
from detonation.core.optimizer.replicated import Replicated
from detonation.log.records import MESSAGE, STEP, SYNCHRONIZE, LogRecord, noted

Copy = tuple[int, int, Readback]
"""The place, the step and the bytes of a message."""
Copies = list[Copy]


class StepRecorder(ABC):
    """Copies the messages of each step, and hands them on as records once the host has them.

    On an accelerator the records of a step follow one step later, so that the host does not wait.
    """

    plays = False

    def __init__(self) -> None:
        self.records = True  # false where there is nobody to record for
        self._messages: list[tuple[int, Copy]] = []  # each with the steps that were taken when it came
        self._waiting: list[tuple[Copies, LogRecord]] = []
        self._late = 0  # steps whose messages are on their way to the host
        self._spare: list[Tensor] = []  # buffers that nobody reads any more: fresh memory costs more than the copy
        self._options: list[dict[str, Any]] = []  # of each group, as they were recorded last
        self._optimizer: Replicated | None = None  # of the last end
        self._last = -1  # steps that were taken at that end

    @abstractmethod
    def hand_on(self, records: Sequence[LogRecord], kept: Sequence[Tensor] = ()) -> None:
        """Takes the records of one step or call of `synchronize`: its messages, and its end.

        Args:
            kept: The tensors that hold the messages; `recycle` takes them back once nobody reads the records.

        Shapes: any.
        """

    def put(self, place: int, step: int, message: Tensor) -> None:
        """Takes in the messages of all replicas.

        Shapes: any.
        """
        if self.records:
            on_device = message.device.type != "cpu"
            copied = message.contiguous() if on_device else self._buffer(message.nbytes).view(message.dtype)
            if on_device and copied.data_ptr() == message.data_ptr():
                copied = copied.clone()
            elif not on_device:
                copied.view(message.shape).copy_(message)
            taken = self._optimizer.step_count if self._optimizer else 0
            self._messages.append((taken, (place, step, Readback(copied))))
            self._late = int(on_device)

    def take(self, place: int, step: int) -> Tensor:
        """Never called: this tape records."""
        raise NotImplementedError

    def take_messages(self, what: str, optimizer: Replicated) -> tuple[Copies, bool]:
        """The messages of a step or call of `synchronize` that ends, and whether it follows the one that ended last.

        Where training went back to an earlier state in between, those that were then on their way are left out: the
        steps that are taken anew have others.
        """
        before, same = optimizer.step_count - (what == "step"), optimizer is self._optimizer
        messages = [copy for taken, copy in self._messages if taken == before or not same]
        goes_on = self._last in (-1, before)
        self._messages, self._optimizer, self._last = [], optimizer, optimizer.step_count
        return messages, goes_on

    def add(self, messages: Copies, what: str, optimizer: Replicated, more: Mapping[str, Any] | None = None) -> None:
        """Ends a step, or a call of `synchronize`, to which `messages` belong.

        Args:
            more: Of a step, beside the options of the parameter groups.
        """
        kind = STEP if what == "step" else SYNCHRONIZE
        changed = self._changed(optimizer.param_groups)
        about = {"groups": changed, **(more or {})} if kind == STEP or any(changed) else {}
        self._waiting.append((messages, noted(kind, optimizer.step_count, about)))
        self.flush(self._late)

    @property
    def waiting(self) -> int:
        """The steps that were not handed on yet."""
        return len(self._waiting)

    def flush(self, late: int = 0) -> None:
        """Hands on all steps but the last `late`."""
        while len(self._waiting) > late:
            messages, end = self._waiting.pop(0)
            kept = [(place, step, copy.wait()) for place, step, copy in messages]
            records = [LogRecord(MESSAGE, place, step, _octets(tensor)) for place, step, tensor in kept]
            self.hand_on([*records, end], [tensor for _, _, tensor in kept])

    def recycle(self, kept: Sequence[Tensor]) -> None:
        """Takes back the tensors of a step, for the messages of another.

        Shapes: any.
        """
        self._spare = [tensor.view(-1).view(torch.uint8) for tensor in kept]

    def _buffer(self, nbytes: int) -> Tensor:
        """Memory for a message."""  # [nbytes] uint8
        for index, spare in enumerate(self._spare):
            if len(spare) == nbytes:
                return self._spare.pop(index)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def forget(self) -> None:
        """Drops all that was not handed on; the next step records all options of the groups."""
        self._messages, self._waiting, self._options = [], [], []

    def _changed(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The options of each parameter group that were not recorded yet."""
        plain = [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]
        now = [{key: value for key, value in group.items() if _is_plain(value)} for group in plain]
        before, self._options = [*self._options, *[{}] * (len(now) - len(self._options))], now
        return [
            {k: v for k, v in mine.items() if k not in old or old[k] != v}
            for mine, old in zip(now, before, strict=True)
        ]


class Tapes:
    """Several tapes that take in the same messages."""

    plays = False

    def __init__(self, tapes: Sequence[Tape]) -> None:
        self._tapes = tapes

    def put(self, place: int, step: int, message: Tensor) -> None:
        """Takes in the messages of all replicas.

        Shapes: any.
        """
        for tape in self._tapes:
            tape.put(place, step, message)

    def take(self, place: int, step: int) -> Tensor:
        """Never called: these tapes record."""
        raise NotImplementedError

    def end(self, what: str, optimizer: Any) -> None:
        """Ends a step, or a call of `synchronize`."""
        for tape in self._tapes:
            tape.end(what, optimizer)


def _octets(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host, which must live as long."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | None) and value == value  # JSON has no NaN
