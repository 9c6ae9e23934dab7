"""Counts and logs the faults of each replica. Severe or frequent faults become a reason to stop all
ranks.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from detonation.core.base_error import DetonationError
from detonation.core.runtime import Readback

Policy = Literal["stop", "skip"]
POLICIES: tuple[str, ...] = get_args(Policy)
STRIKES = 3
"""Number of refused messages of one replica after which all replicas stop."""
FORGIVEN = 1000
"""Number of consecutive used messages of one replica after which its earlier refusals are
forgotten.
"""
IN_A_ROW = 10
"""Number of consecutive contributions that one replica may skip before all replicas stop."""
_NON_FINITE = 1
_REFUSED = 2
_DESYNC = 3
_CHANGING = 4
_CHANGED_APART = 5
_MISPLACED = 6
_NO_NAME = 0xFFFFFFFF
_ALL_REPLICAS = 0xFFFFFF
"""Stands for the sender of a sum, because all replicas contribute to a sum."""
_NAMED_REPLICAS = 24
_REPLICAS = (1 << _NAMED_REPLICAS) - 1 << 32
NEW_PARAMETER = "a new parameter"
"""Name for a parameter that was added to the model after the replicas had compared names."""
OPTIONS = "options of the parameter groups"
_log = logging.getLogger("detonation")


class NonFiniteGradient(DetonationError, ArithmeticError):
    """A gradient, or the change of a parameter in a round, contains NaN, infinity or a magnitude
    above `nonfinite.SIGNAL_LIMIT`. The replica has not added this gradient or change to its memory
    of unsent values.
    """


class BadPeer(DetonationError, RuntimeError):
    """Raised on all ranks after validation refused several messages (`STRIKES`) of one replica."""


class Desync(DetonationError, RuntimeError):
    """Tensors that must be equal differ between replicas, or replicas train different
    parameters.
    """


class Changed(str):
    """The name of a parameter that the sender of an empty message has started or stopped training.
    If the name is a plain `str` instead, the parameter's gradient or movement is not finite.
    """

    __slots__ = ()


AGAIN = (
    "After this error the optimizer takes no more steps: load a checkpoint or a state dict on all"
    " ranks"
)
"""Text that is appended to the message of an error when the error is raised again."""


class FaultCounts:
    """Counts the faults of the replicas of one level of replication, from messages that all these
    replicas receive.

    Attributes:
        skipped: Count of contributions, of all replicas, that were omitted because a gradient was
            not finite.
        by_parameter: The count `skipped` of each parameter.
        refused: Count of messages, of all replicas, that failed validation.
        fatal: 0, or the code of a reason for which all ranks must stop; `error` decodes the code on
            any rank.
        due: Steps at which messages are due, until `StopConsensus` has handled them.
        reports: One entry for each message that the device is still checking: the step at which the
            message is due, the tensor with the result of the check, and the function to which
            `catch_up` passes this result.
        names: Names of all parameters of the model, for errors.
        changed: For each replica that announced a change of its trained parameters, the parameter
            that this replica started or stopped training.
        changing: Count of replicas that must announce the same change; 0 if this rank announced no
            change.
        missing: Lost replicas, which need not announce a change of the trained parameters.
        options: Options of the parameter groups, such as lr; messages carry a digest of these
            options.
        number: Code of the level, below 16. It identifies the level in a reason to stop.
    """

    def __init__(
        self,
        names: Sequence[str],
        replica: int,
        policy: Policy = "stop",
        repairs: bool = False,
        signal: str = "the gradient",
    ) -> None:
        self.skipped = 0
        self.refused = 0
        self.by_parameter: Counter[str] = Counter()
        self.names = list(names)
        self.options = b""
        self.number = 0
        self._replica = replica
        self._signal = signal
        self._policy = policy
        self._repairs = repairs
        self._warned: set[tuple[int, int]] = set()
        self.forget()

    def forget(self) -> None:
        """Forgets all reasons to stop, because a loaded checkpoint replaced the state."""
        self.fatal = 0
        self.changing = 0
        # the last reason to stop that `error` turned into an error, and the step of this error
        self._raised = (0, 0)
        self.due: set[int] = set()
        self.changed: dict[int, str] = {}
        self.missing: set[int] = set()
        self.reports: list[tuple[int, Readback, Callable[[list[Any]], object]]] = []
        self._strikes: Counter[int] = Counter()
        self._row: Counter[tuple[int, int]] = Counter()
        # for each replica: count of messages that were used since its last refused message
        self._good: Counter[int] = Counter()

    def catch_up(self, until: float) -> None:
        """Waits for the messages that are due at steps up to `until`, and counts the faults of
        these messages. Afterwards all ranks have equal fault counts.
        """
        ready = [each for each in self.reports if each[0] <= until]
        self.reports = [each for each in self.reports if each[0] > until]
        for _, numbers, report in ready:
            report(numbers.read())

    def stop_if_apart(self) -> None:
        """Records a reason to stop if some, but not all, replicas announced a change of their
        trained parameters. Lost replicas need not announce it.
        """
        if self.changed_apart:
            replicas = sum({_bit(sender) for sender in self.changed})
            self._stop(_CHANGED_APART, replicas, self.changed[min(self.changed)])

    @property
    def changed_apart(self) -> bool:
        """True if some but not all replicas announced a change of the trained parameters."""
        return bool(self.changed) and len({*self.changed, *self.missing}) != self.changing

    def announced(self, sender: int, name: str) -> None:
        """Records that `sender` announced that it began or stopped training the parameter
        `name`."""
        self.changed[sender] = name

    def miss(self, absent: Collection[int]) -> None:
        """Records that the replicas `absent` were lost before their message was complete. These
        replicas need not announce a change of the trained parameters.
        """
        if self.changing:
            self.missing.update(absent)

    def end_change(self) -> None:
        """Forgets the announced change of the trained parameters, because all ranks have made
        it."""
        self.changing = 0
        self.changed = {}
        self.missing = set()

    def announcement(self, name: str) -> int:
        """Returns the code that this rank sends in place of a reason to stop, after it announced
        that it began or stopped training the parameter `name`.
        """
        return _CHANGING << 56 | _bit(self._replica) << 32 | self.names.index(name)

    @staticmethod
    def is_announcement(fatal: int) -> bool:
        """True if `fatal` is a code that `announcement` returned, for a rank that began or stopped
        training a parameter. Such a code does not stop a rank that announced the same parameter.
        """
        return fatal >> 56 == _CHANGING

    @staticmethod
    def announced_apart(announcements: Sequence[int]) -> int:
        """Combines `announcements`, the codes that the ranks of a group sent. If the ranks
        announced changes of different parameters, returns the code of a reason to stop. Otherwise
        returns the largest of the codes.
        """
        largest = max(announcements)
        if largest >> 56 == _CHANGING and len({each & ~_REPLICAS for each in announcements}) > 1:
            return largest & ~(_CHANGING << 56) | _CHANGED_APART << 56
        return largest

    def renumber(self, kept: Sequence[int], replica: int) -> None:
        """Keeps the fault counts of the replicas `kept`, which are given by their old numbers. The
        new numbers of these replicas are 0, 1, ...
        """
        number = {old: new for new, old in enumerate(kept)}
        self._replica = replica
        strikes = {number[old]: n for old, n in self._strikes.items() if old in number}
        good = {number[old]: n for old, n in self._good.items() if old in number}
        row = {(number[old], at): n for (old, at), n in self._row.items() if old in number}
        self._strikes = Counter(strikes)
        self._good = Counter(good)
        self._row = Counter(row)

    def accept(self, senders: Iterable[int], place: int) -> None:
        """Records that a message of each of `senders` was used.

        Args:
            place: Number of the message among a replica's messages of a step.
        """
        for sender in senders:
            self._row[sender, place] = 0
            self._good[sender] += 1

    def skip(self, sender: int, place: int, name: str, step: int) -> None:
        """Counts a message of `sender` in which zeros replace values, because the signal of the
        parameter `name` is not finite.

        If `name` is a `Changed`, the message is no fault, but announces a change of the trained
        parameters. This method then only records the change.
        """
        if isinstance(name, Changed):
            self.announced(sender, name)
            return
        self.skipped += 1
        self.by_parameter[name] += 1
        self._row[sender, place] += 1
        allowed = 0
        if self._policy == "skip":
            allowed = IN_A_ROW
        if self._row[sender, place] > allowed:
            self._stop(_NON_FINITE, sender, name)
        else:
            count = f"{self._row[sender, place]} of {allowed} allowed in a row"
            text = f"{self._signal} of {name} is not finite on replica {sender} at step {step}"
            self._warn(step, sender, f"{text}; contribution skipped ({count})")

    def refuse(self, sender: int, fault: str, step: int) -> None:
        """Counts and logs a message of `sender` that was refused at `step` because of its
        `fault`."""
        self.refused += 1
        if self._good[sender] >= FORGIVEN:
            self._strikes[sender] = 0
        self._strikes[sender] += 1
        self._good[sender] = 0
        text = (
            f"a message of {_sender(sender)} was refused at step {step}, and its values are"
            f" lost: the message {fault}"
        )
        self._warn(step, sender, text)
        if self._strikes[sender] >= STRIKES:
            self._stop(_REFUSED, sender)

    def refuse_sum(self, step: int) -> None:
        """Counts a fault of the all-reduce at `step`: its sum is not finite, although the values of
        all replicas were finite.
        """
        fault = (
            "has a sum that is not finite, although all added values are finite: a link damages"
            " the data"
        )
        self.refuse(_ALL_REPLICAS, fault, step)

    def misplace(self, sender: int, step: int) -> None:
        """Records a reason to stop: `sender` took part in the all-reduce of `step` with the message
        of another step, level of replication or optimizer.
        """
        self._stop(_MISPLACED, sender)

    def differ(self, digests: Mapping[int, int], step: int) -> None:
        """Finds the senders that differ from most replicas at `step`, and logs each difference.

        If a sender has different options of the parameter groups, this is always a reason to stop.
        If a sender received different messages in earlier steps, this is a reason to stop, unless
        `Safety` repairs replicas that differ.

        Args:
            digests: By sender, the digests of messages in the upper bits and of options in the
                lower 32 (`Header.received`).
        """
        for sender in _odd({sender: digest & 0xFFFFFFFF for sender, digest in digests.items()}):
            here = self.options.decode()
            if len(here) > 200:
                here = here[:200] + "..."
            text = (
                f"replica {sender} has other {OPTIONS} (lr, betas, ...) than the other replicas"
                f" at step {step}; this replica has {here}: set the same options on all"
                " replicas (a scheduler that reads the loss needs the mean loss of all replicas)"
            )
            self._warn(step, sender, text)
            self._stop(_DESYNC, sender, OPTIONS)
        for sender in _odd({sender: digest >> 32 for sender, digest in digests.items()}):
            text = (
                f"replica {sender} received other messages than the other replicas before step"
                f" {step}"
            )
            self._warn(step, sender, text)
            if not self._repairs:
                self._stop(_DESYNC, sender)

    def desync(self, sender: int, name: str) -> None:
        """Records a reason to stop: the tensor `name`, or the options of the parameter groups,
        differ between the replica `sender` and the other replicas.
        """
        self._stop(_DESYNC, sender, name)

    def error(self, fatal: int, step: int) -> Exception:
        """Returns the error for `fatal`, a reason to stop that any rank of this level of
        replication may have found at `step`.

        If the same reason occurs again, the error still names the first step, and adds a remedy.
        """
        raised, first_step = self._raised
        if fatal == raised:
            found = self._error(fatal, first_step)
            found.args = (f"{found}. {AGAIN}",)
            return found
        self._raised = (fatal, step)
        return self._error(fatal, step)

    def _error(self, fatal: int, step: int) -> Exception:
        kind = fatal >> 56
        sender = fatal >> 32 & 0xFFFFFF
        number = fatal & _NO_NAME
        name = "a tensor that the log of that replica names"
        if number < len(self.names):
            name = self.names[number]
        if kind == _NON_FINITE:
            text = f"{self._signal} of {name} is not finite on replica {sender} at step {step}"
            remedy = "lower lr, or clip"
            if self._policy == "skip":
                text += f" for the {IN_A_ROW + 1}th time in a row"
            elif "gradient" in self._signal:
                remedy += '; a GradScaler needs Safety(non_finite="skip")'
            return NonFiniteGradient(f"{text}: {remedy}")
        if kind == _REFUSED:
            text = f"{STRIKES} messages of {_sender(sender)} were refused, the last at step {step}"
            return BadPeer(f"{text}: read the reasons in the log")
        if kind == _MISPLACED:
            return Desync(
                f"replica {sender} added a message of another step, level or optimizer to the sum"
                f" of step {step}: start the same collectives in the same order on all replicas"
            )
        if kind in (_CHANGING, _CHANGED_APART):
            return Desync(
                f"{_replicas(sender)} began or ceased to train {name}, but the other replicas"
                " did not: freeze, unfreeze and add parameters on all ranks between the same"
                " two steps"
            )
        return Desync(
            f"replica {sender} differs from the other replicas in {name} after step {step}"
        )

    def _stop(self, kind: int, sender: int, name: str = "") -> None:
        parameter = name.partition(" (")[0]
        number = _NO_NAME
        if parameter in self.names:
            number = self.names.index(parameter)
        self.fatal = max(self.fatal, kind << 56 | sender << 32 | number)

    def _warn(self, step: int, sender: int, text: str) -> None:
        """Logs `text` on replica 0 and on the sender, at most once for each step and sender."""
        if (step, sender) not in self._warned and self._replica in (0, sender):
            self._warned = {(step, sender), *(pair for pair in self._warned if pair[0] == step)}
            _log.warning(text)


def _odd(words: Mapping[int, int]) -> list[int]:
    """Returns the senders whose value in `words` differs from the most frequent value. If several
    values are equally frequent, the first of them counts as the most frequent.
    """
    most_frequent = Counter(words.values()).most_common(1)[0][0]
    return [sender for sender, word in words.items() if word != most_frequent]


def _sender(sender: int) -> str:
    if sender == _ALL_REPLICAS:
        return "all replicas together"
    return f"replica {sender}"


def _bit(replica: int) -> int:
    """Returns the bit that stands for `replica` in a set of replicas. All replicas from number 23
    on share the last bit.
    """
    return 1 << min(replica, _NAMED_REPLICAS - 1)


def _replicas(bits: int) -> str:
    """Returns text that names the replicas in the bit set `bits`.

    >>> _replicas(_bit(0) | _bit(2))
    'replicas 0, 2'
    """
    found = [str(replica) for replica in range(_NAMED_REPLICAS) if bits >> replica & 1]
    return f"replica{'s' * (len(found) > 1)} {', '.join(found)}"
