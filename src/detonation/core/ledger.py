"""Ledger: what each replica failed to tell, counted and logged, and when that is reason to stop."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Literal, get_args

Policy = Literal["stop", "skip"]
POLICIES: tuple[str, ...] = get_args(Policy)
STRIKES = 3
"""Refused messages of one replica after which all stop."""
IN_A_ROW = 10
"""Contributions that one replica may skip, one after the other, before all stop."""
_NON_FINITE, _REFUSED, _DRIFT = 1, 2, 3
_log = logging.getLogger(__name__)


class NonFiniteGradient(ArithmeticError):
    """A gradient holds NaN, infinity or more than `guard.LIMIT`; it was caught before it reached a memory."""


class BadPeer(RuntimeError):
    """The messages of a replica were refused too often."""


class Drift(RuntimeError):
    """Replicas do not hold the same weights where they must."""


class Ledger:
    """Counts what the replicas along one axis could not tell, from what all of them see alike.

    skipped: contributions left out because a gradient was not finite; refused: messages that were not what they had to
    be. Both over all replicas and the whole run. fatal: 0, or a number that says why all must stop (`error` reads it).
    suspect: whether a replica says that it heard something else than the others.
    """

    def __init__(self, names: Sequence[str], replica: int, non_finite: Policy = "stop") -> None:
        if non_finite not in POLICIES:
            raise ValueError(f"non_finite is {non_finite!r}, must be 'stop' or 'skip'")
        self.skipped = self.refused = self.fatal = 0
        self.suspect = False
        self._names, self._replica, self._policy = list(names), replica, non_finite
        self._strikes: Counter[int] = Counter()
        self._row: Counter[tuple[int, int]] = Counter()
        self._said: set[tuple[int, int, str]] = set()

    def fine(self, sender: int, place: int) -> None:
        """A message of `sender` was taken in; place: which of those that it sends in a step."""
        self._row[sender, place] = 0

    def skip(self, sender: int, place: int, name: str, step: int) -> None:
        """`sender` tells nothing there at `step`, because the gradient of `name` is not finite."""
        self.skipped += 1
        self._row[sender, place] += 1
        allowed = IN_A_ROW if self._policy == "skip" else 0
        if self._row[sender, place] > allowed:
            self.stop(_NON_FINITE, sender, name)
        else:
            count = f"{self._row[sender, place]} of {allowed} allowed in a row"
            text = f"the gradient of {name} is not finite on replica {sender} at step {step}"
            self._warn(step, sender, f"{text}; contribution skipped ({count})")

    def refuse(self, sender: int, fault: str, step: int) -> None:
        """A message of `sender` at `step` is not used, because it `fault`."""
        self.refused += 1
        self._strikes[sender] += 1
        self._warn(step, sender, f"a message of replica {sender} was refused at step {step}: it {fault}")
        if self._strikes[sender] >= STRIKES:
            self.stop(_REFUSED, sender)

    def differ(self, sender: int, step: int) -> None:
        """`sender` heard something else before `step` than the others did."""
        self.suspect = True
        self._warn(step, sender, f"replica {sender} heard something else than the others before step {step}")

    def drift(self, sender: int, name: str) -> None:
        """`sender` holds other values than the others in `name`."""
        self.stop(_DRIFT, sender, name)

    def stop(self, kind: int, sender: int, name: str = "") -> None:
        what = self._names.index(name) if name else 0
        self.fatal = max(self.fatal, kind << 56 | sender << 32 | what)

    def error(self, fatal: int, step: int) -> Exception:
        """The error that the number `fatal` of any rank's ledger stands for, at `step`."""
        kind, sender, name = fatal >> 56, fatal >> 32 & 0xFFFFFF, self._names[fatal & 0xFFFFFFFF]
        if kind == _NON_FINITE:
            often = f" for the {IN_A_ROW + 1}th time in a row" if self._policy == "skip" else ""
            return NonFiniteGradient(f"the gradient of {name} is not finite on replica {sender} at step {step}{often}")
        if kind == _REFUSED:
            return BadPeer(
                f"{STRIKES} messages of replica {sender} were refused, the last at step {step} (see the log)"
            )
        return Drift(f"replica {sender} differs from the others in {name} after step {step}")

    def _warn(self, step: int, sender: int, text: str) -> None:
        """Once a step and sender, by the first replica and the one that it is about."""
        if (step, sender, text) not in self._said and self._replica in (0, sender):
            self._said = {(step, sender, text), *(said for said in self._said if said[0] == step)}
            _log.warning(text)
