"""Faults of each replica: counted, logged, and turned into a reason to stop."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from detonation.core.base_error import DetonationError
from detonation.core.runtime import Readback

Policy = Literal["stop", "skip"]
POLICIES: tuple[str, ...] = get_args(Policy)
STRIKES = 3
"""Refused messages of one replica after which all stop."""
FORGIVEN = 1000
"""Messages of one replica that are used in a row, after which earlier refusals no longer count."""
IN_A_ROW = 10
"""Contributions in a row that one replica may skip before all stop."""
_NON_FINITE, _REFUSED, _DESYNC, _CHANGING, _CHANGED_APART, _MISPLACED = 1, 2, 3, 4, 5, 6
_NO_NAME = 0xFFFFFFFF
_ALL_REPLICAS = 0xFFFFFF
"""Stands for the sender of a sum, which the network adds up."""
_NAMED_REPLICAS = 24
_REPLICAS = (1 << _NAMED_REPLICAS) - 1 << 32
NEW_PARAMETER = "a new parameter"
"""Stands for a parameter that joined the model after the names were agreed on."""
OPTIONS = "options of the parameter groups"
_log = logging.getLogger("detonation")


class NonFiniteGradient(DetonationError, ArithmeticError):
    """A gradient holds NaN, infinity or above `nonfinite.SIGNAL_LIMIT`: caught before it reached a
    memory."""


class BadPeer(DetonationError, RuntimeError):
    """The messages of a replica were refused too often."""


class Desync(DetonationError, RuntimeError):
    """Replicas hold different tensors where they must be equal, or train different parameters."""


class Changed(str):
    """The name of a parameter that the sender of an empty message began or ceased to train."""

    __slots__ = ()


AGAIN = (
    "It ended this optimizer, which takes no step until the state is replaced on all ranks: load a "
    "checkpoint or a state dict"
)
"""What an error says that is raised again."""


class FaultCounts:
    """Counts the faults of the replicas of one level, from messages that all of them receive.

    skipped: contributions left out because a gradient was not finite; by_parameter: the same for
    each parameter; refused: messages that failed validation; each over all replicas. fatal: 0, or a
    number for the reason why all must stop, which `error` decodes on any rank. due: steps at which
    messages are due, until `StopConsensus` takes them. reports: those for which the host would have
    to wait, and which `catch_up` counts. names: of all parameters of the model, for errors.
    changed: by replica, the parameter of which it announced that it begins or ceases to train it.
    changing: how many replicas must announce that together; 0 where this rank did not. missing:
    those of them that were lost, and need not. options: of the parameter groups, whose digest
    messages carry. number: of the level, below 16, by which ranks tell each other whose reason to
    stop they mean.
    """

    def __init__(
        self,
        names: Sequence[str],
        replica: int,
        policy: Policy = "stop",
        repairs: bool = False,
        signal: str = "the gradient",
    ) -> None:
        self.skipped = self.refused = 0
        self.by_parameter: Counter[str] = Counter()
        self.names, self.options = list(names), b""
        self.number = 0
        self._replica, self._signal = replica, signal
        self._policy, self._repairs = policy, repairs
        self._warned: set[tuple[int, int]] = set()
        self.forget()

    def forget(self) -> None:
        """Forgets all that could end the next steps, because those before them were undone: a
        checkpoint was loaded."""
        self.fatal = self.changing = 0
        self._raised = 0, 0  # the number of the last error, and its step
        self.due, self.changed = set[int](), dict[int, str]()
        self.missing = set[int]()
        self.reports: list[tuple[int, Readback, Callable[[list[Any]], object]]] = []
        self._strikes, self._row = Counter[int](), Counter[tuple[int, int]]()
        self._good = Counter[int]()  # messages of each replica in use since the last refusal

    def report_later(
        self, due: int, numbers: Readback, report: Callable[[list[Any]], object]
    ) -> None:
        """Makes `catch_up` call `report` with `numbers`, which are about a message due at step
        `due`."""
        self.reports.append((due, numbers, report))

    def catch_up(self, until: float) -> None:
        """Counts the messages due at steps up to `until`, so that all ranks have the same counts."""
        ready = [each for each in self.reports if each[0] <= until]
        self.reports = [each for each in self.reports if each[0] > until]
        for _, numbers, report in ready:
            report(numbers.read())

    def stop_if_apart(self) -> None:
        """Records a reason to stop where some replicas, but not all, announced a change."""
        if self.changed_apart:
            replicas = sum({_bit(sender) for sender in self.changed})
            self._stop(_CHANGED_APART, replicas, self.changed[min(self.changed)])

    @property
    def changed_apart(self) -> bool:
        """True where some replicas, but not all, announced a change of the trained parameters."""
        return bool(self.changed) and len({*self.changed, *self.missing}) != self.changing

    def announced(self, sender: int, name: str) -> None:
        """Records that `sender` announced a change of `name`."""
        self.changed[sender] = name

    def miss(self, absent: Collection[int]) -> None:
        """Records that the replicas `absent` were lost before their message was whole."""
        if self.changing:
            self.missing.update(absent)

    def end_change(self) -> None:
        """Forgets what replicas have announced: the change was made."""
        self.changing, self.changed = 0, {}
        self.missing = set()

    def announcement(self, name: str) -> int:
        """The number by which a rank says over other links that it announced a change of `name`."""
        return _CHANGING << 56 | _bit(self._replica) << 32 | self.names.index(name)

    @staticmethod
    def is_announcement(fatal: int) -> bool:
        """True for the number of `announcement`, which ends no rank that announced the same."""
        return fatal >> 56 == _CHANGING

    @staticmethod
    def announced_apart(announcements: Sequence[int]) -> int:
        """The largest of the announcements of some ranks; a reason to stop unless all announced the
        same."""
        largest = max(announcements)
        if largest >> 56 == _CHANGING and len({each & ~_REPLICAS for each in announcements}) > 1:
            return largest & ~(_CHANGING << 56) | _CHANGED_APART << 56
        return largest

    def renumber(self, kept: Sequence[int], replica: int) -> None:
        """Goes on with the counts of the replicas `kept`, by their old numbers, as the replicas 0,
        1, ..."""
        number = {old: new for new, old in enumerate(kept)}
        self._replica = replica
        self._strikes = Counter(
            {number[sender]: n for sender, n in self._strikes.items() if sender in number}
        )
        self._good = Counter(
            {number[sender]: n for sender, n in self._good.items() if sender in number}
        )
        self._row = Counter(
            {(number[sender], at): n for (sender, at), n in self._row.items() if sender in number}
        )

    def accept(self, senders: Iterable[int], place: int) -> None:
        """Records that a message of each of `senders` was used; place: which of a replica's
        messages per step."""
        for sender in senders:
            self._row[sender, place] = 0
            self._good[sender] += 1

    def skip(self, sender: int, place: int, name: str, step: int) -> None:
        """Counts zeros from `sender`, in part of its message or all: its `name` is not finite, or
        has `Changed`."""
        if isinstance(name, Changed):
            self.announced(sender, name)
            return
        self.skipped += 1
        self.by_parameter[name] += 1
        self._row[sender, place] += 1
        allowed = IN_A_ROW if self._policy == "skip" else 0
        if self._row[sender, place] > allowed:
            self._stop(_NON_FINITE, sender, name)
        else:
            count = f"{self._row[sender, place]} of {allowed} allowed in a row"
            text = f"{self._signal} of {name} is not finite on replica {sender} at step {step}"
            self._warn(step, sender, f"{text}; contribution skipped ({count})")

    def refuse(self, sender: int, fault: str, step: int) -> None:
        """Counts a message of `sender` at `step` that is not used, because it `fault`."""
        self.refused += 1
        self._strikes[sender] = 1 + (self._strikes[sender] if self._good[sender] < FORGIVEN else 0)
        self._good[sender] = 0
        text = (
            f"a message of {_sender(sender)} was refused at step {step}, and what it carried is"
            f" lost: it {fault}"
        )
        self._warn(step, sender, text)
        if self._strikes[sender] >= STRIKES:
            self._stop(_REFUSED, sender)

    def refuse_sum(self, step: int) -> None:
        """Counts a sum of the network at `step` that is not finite, though each replica's part was."""
        self.refuse(
            _ALL_REPLICAS, "added up to what is not finite: a link damages what it carries", step
        )

    def misplace(self, sender: int, step: int) -> None:
        """Records that `sender` added to the sum of `step` what does not belong to it."""
        self._stop(_MISPLACED, sender)

    def differ(self, digests: Mapping[int, int], step: int) -> None:
        """Records which senders have other parameter groups than most at `step`, or received other
        messages before.

        Args:
            digests: By sender, of messages in the upper bits and of options in the lower 32
                (`Header.received`).
        """
        for sender in _odd({sender: digest & 0xFFFFFFFF for sender, digest in digests.items()}):
            here = self.options.decode()
            text = (
                f"replica {sender} has other {OPTIONS} (lr, betas, ...) than the others at step"
                f" {step}, here "
            )
            remedy = "set them alike on all replicas, such as by a loss that is averaged over them"
            self._warn(
                step, sender, f"{text}{here if len(here) <= 200 else here[:200] + '...'}: {remedy}"
            )
            self._stop(_DESYNC, sender, OPTIONS)
        for sender in _odd({sender: digest >> 32 for sender, digest in digests.items()}):
            self._warn(
                step,
                sender,
                f"replica {sender} received other messages than the others before step {step}",
            )
            if not self._repairs:
                self._stop(_DESYNC, sender)

    def desync(self, sender: int, name: str) -> None:
        """Records that the `name` of `sender` differs from the other replicas."""
        self._stop(_DESYNC, sender, name)

    def error(self, fatal: int, step: int) -> Exception:
        """The error at `step` for the number `fatal` of any rank of this level.

        A rank raises it again at each later step, until `forget`, with the first step and a remedy.
        """
        if fatal == self._raised[0]:
            found = self._error(fatal, self._raised[1])
            found.args = (f"{found}. {AGAIN}",)
            return found
        self._raised = fatal, step
        return self._error(fatal, step)

    def _error(self, fatal: int, step: int) -> Exception:
        kind, sender, number = fatal >> 56, fatal >> 32 & 0xFFFFFF, fatal & _NO_NAME
        name = self.names[number] if number < len(self.names) else "a state that its log names"
        if kind == _NON_FINITE:
            often = f" for the {IN_A_ROW + 1}th time in a row" if self._policy == "skip" else ""
            scaler = (
                ""
                if often or "gradient" not in self._signal
                else '; a GradScaler needs Safety(non_finite="skip")'
            )
            text = (
                f"{self._signal} of {name} is not finite on replica {sender} at step {step}{often}"
            )
            return NonFiniteGradient(f"{text}: lower lr, or clip{scaler}")
        if kind == _REFUSED:
            text = f"{STRIKES} messages of {_sender(sender)} were refused, the last at step {step}"
            return BadPeer(f"{text}: the log says why")
        if kind == _MISPLACED:
            return Desync(
                f"replica {sender} added a message of another step, level or optimizer to the sum"
                f" of step {step}: start the same collectives in the same order on all replicas"
            )
        if kind in (_CHANGING, _CHANGED_APART):
            return Desync(
                f"{_replicas(sender)} began or ceased to train {name}, the others did not: freeze,"
                " unfreeze and add parameters on all ranks between the same two steps"
            )
        return Desync(f"replica {sender} differs from the others in {name} after step {step}")

    def _stop(self, kind: int, sender: int, name: str = "") -> None:
        parameter = name.partition(" (")[0]
        number = self.names.index(parameter) if parameter in self.names else _NO_NAME
        self.fatal = max(self.fatal, kind << 56 | sender << 32 | number)

    def _warn(self, step: int, sender: int, text: str) -> None:
        """Logs once per step and sender, on the first replica and on the sender."""
        if (step, sender) not in self._warned and self._replica in (0, sender):
            self._warned = {(step, sender), *(pair for pair in self._warned if pair[0] == step)}
            _log.warning(text)


def _odd(words: Mapping[int, int]) -> list[int]:
    """The senders of other words than most, or than the first where there is no majority."""
    usual = Counter(words.values()).most_common(1)[0][0]
    return [sender for sender, word in words.items() if word != usual]


def _sender(sender: int) -> str:
    return "all replicas together" if sender == _ALL_REPLICAS else f"replica {sender}"


def _bit(replica: int) -> int:
    """The bit of a replica in a set of replicas; the last one stands for all from there on."""
    return 1 << min(replica, _NAMED_REPLICAS - 1)


def _replicas(bits: int) -> str:
    """A set of replicas in words.

    >>> _replicas(_bit(0) | _bit(2))
    'replicas 0, 2'
    """
    found = [str(replica) for replica in range(_NAMED_REPLICAS) if bits >> replica & 1]
    return f"replica{'s' * (len(found) > 1)} {', '.join(found)}"
