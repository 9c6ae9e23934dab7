"""Ledger: what each replica failed to tell, counted and logged, and when that is reason to stop."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from detonation.core.integrity.readback import Later

Policy = Literal["stop", "skip"]
POLICIES: tuple[str, ...] = get_args(Policy)
STRIKES = 3
"""Refused messages of one replica after which all stop."""
IN_A_ROW = 10
"""Contributions that one replica may skip, one after the other, before all stop."""
_NON_FINITE, _REFUSED, _DRIFT = 1, 2, 3
_log = logging.getLogger("detonation")


class NonFiniteGradient(ArithmeticError):
    """A gradient holds NaN, infinity or more than `guard.LIMIT`; it was caught before it reached a memory."""


class BadPeer(RuntimeError):
    """The messages of a replica were refused too often."""


class Drift(RuntimeError):
    """Replicas do not hold the same where they must."""


class Ledger:
    """Counts what the replicas of one level could not tell, from what all of them see alike.

    skipped: contributions left out because a gradient was not finite, by_parameter: those of each; refused: messages
    that were not what they had to be; all over all replicas. fatal: 0, or a number that says why all must stop, which
    `error` reads on any rank.
    What the host does not know yet, because it would have to wait for a device, is counted when somebody catches up.
    """

    def __init__(
        self,
        names: Sequence[str],
        replica: int,
        policy: Policy = "stop",
        repairs: bool = False,
        what: str = "the gradient",
    ) -> None:
        self.skipped = self.refused = self.fatal = 0
        self.by_parameter: Counter[str] = Counter()
        self._due: set[int] = set()
        self._names, self._replica, self._what = list(names), replica, what
        self._policy, self._repairs = policy, repairs
        self._strikes: Counter[int] = Counter()
        self._row: Counter[tuple[int, int]] = Counter()
        self._said: set[tuple[int, int]] = set()
        self._reports: list[tuple[int, Later, Callable[[list[Any]], object]]] = []

    def expect(self, step: int) -> None:
        """Something is to arrive at `step`."""
        self._due.add(step)

    def news(self, until: float) -> bool:
        """Whether anything was to arrive at steps up to `until` since somebody asked; the same on all ranks."""
        came = {step for step in self._due if step <= until}
        self._due -= came
        return bool(came)

    def hear(self, due: int, numbers: Later, report: Callable[[list[Any]], object]) -> None:
        """Lets `report` count what `numbers` say of what was to arrive at step `due`, when they are read."""
        self._reports.append((due, numbers, report))

    def catch_up(self, until: float) -> None:
        """Counts what was to arrive at steps up to `until`: all ranks know the same, whoever looked before its time."""
        ready = [each for each in self._reports if each[0] <= until]
        self._reports = [each for each in self._reports if each[0] > until]
        for _, numbers, report in ready:
            report(numbers.read())

    def fine(self, sender: int, place: int) -> None:
        """A message of `sender` was taken in; place: which of those that it sends in a step."""
        self._row[sender, place] = 0

    def skip(self, sender: int, place: int, name: str, step: int) -> None:
        """`sender` tells nothing there at `step`, because what it has of `name` is not finite."""
        self.skipped += 1
        self.by_parameter[name] += 1
        self._row[sender, place] += 1
        allowed = IN_A_ROW if self._policy == "skip" else 0
        if self._row[sender, place] > allowed:
            self._stop(_NON_FINITE, sender, name)
        else:
            count = f"{self._row[sender, place]} of {allowed} allowed in a row"
            text = f"{self._what} of {name} is not finite on replica {sender} at step {step}"
            self._warn(step, sender, f"{text}; contribution skipped ({count})")

    def refuse(self, sender: int, fault: str, step: int) -> None:
        """A message of `sender` at `step` is not used, because it `fault`."""
        self.refused += 1
        self._strikes[sender] += 1
        self._warn(step, sender, f"a message of replica {sender} was refused at step {step}: it {fault}")
        if self._strikes[sender] >= STRIKES:
            self._stop(_REFUSED, sender)

    def refuse_sum(self, step: int) -> None:
        """What the network added up at `step` is not finite, though what each replica gave was."""
        self.refuse(self._replica, "added up to what is not finite: a link damages what it carries", step)

    def differ(self, sender: int, step: int) -> None:
        """`sender` heard something else before `step` than the others did."""
        self._warn(step, sender, f"replica {sender} heard something else than the others before step {step}")
        if not self._repairs:
            self._stop(_DRIFT, sender)

    def drift(self, sender: int, name: str) -> None:
        """`sender` holds something else than the others in `name`."""
        self._stop(_DRIFT, sender, name)

    def error(self, fatal: int, step: int) -> Exception:
        """The error that the number `fatal` of any rank's ledger of this level stands for, at `step`."""
        kind, sender, name = fatal >> 56, fatal >> 32 & 0xFFFFFF, self._names[fatal & 0xFFFFFFFF]
        if kind == _NON_FINITE:
            often = f" for the {IN_A_ROW + 1}th time in a row" if self._policy == "skip" else ""
            return NonFiniteGradient(f"{self._what} of {name} is not finite on replica {sender} at step {step}{often}")
        if kind == _REFUSED:
            text = f"{STRIKES} messages of replica {sender} were refused, the last at step {step}"
            return BadPeer(f"{text}: the log says why")
        return Drift(f"replica {sender} differs from the others in {name} after step {step}")

    def _stop(self, kind: int, sender: int, name: str = "") -> None:
        parameter = name.partition(" (")[0]
        what = self._names.index(parameter) if parameter in self._names else 0
        self.fatal = max(self.fatal, kind << 56 | sender << 32 | what)

    def _warn(self, step: int, sender: int, text: str) -> None:
        """Once a step and sender, on the first replica and the one that it is about."""
        if (step, sender) not in self._said and self._replica in (0, sender):
            self._said = {(step, sender), *(said for said in self._said if said[0] == step)}
            _log.warning(text)
