"""Safety: the reaction to gradients that are not finite, and to replicas that are out of sync."""

from dataclasses import dataclass
from typing import Literal, get_args

from detonation.choices import checks_keywords
from detonation.core.integrity.fault_counts import POLICIES, Policy

OnDesync = Literal["stop", "repair"]
ON_DESYNC: tuple[str, ...] = get_args(OnDesync)
Equal = Literal["auto", "bits", "close"]
EQUAL: tuple[str, ...] = get_args(Equal)


@dataclass(frozen=True)
class Safety:
    """The reaction of `replicate` to gradients that are not finite, and to replicas that are out of
    sync.

    Args:
        non_finite: Where a replica's gradient is not finite: "stop", or "skip" its contribution. On
            an accelerator "stop" skips it too, and stops one or two steps later.
        verify_every: Steps after which the tensors that must be equal on all replicas are compared,
            and the options of the parameter groups; 0 for never.
        on_desync: Where these tensors differ: "stop", or "repair" them from the majority.
        equal: What replicas must be. With "bits" those that round differently are refused at the
            first step. With "close" they stay within rounding of each other: each step makes a
            thousandth of the agreed state equal, and comparisons measure distances. With "auto" the
            self-test of the first step decides: "bits" where all processes round alike, or do so
            once each operation of the optimizer is rounded by itself; otherwise "close". A warning
            says so.

    Raises:
        TypeError: verify_every is no whole number.
        ValueError: A value is out of range.

    Example:
        >>> Safety(on_desync="repair")
        Safety(non_finite='stop', verify_every=100, on_desync='repair', equal='auto')
    """

    non_finite: Policy = "stop"
    verify_every: int = 100
    on_desync: OnDesync = "stop"
    equal: Equal = "auto"

    def __post_init__(self) -> None:
        if self.non_finite not in POLICIES:
            raise ValueError(
                f"non_finite is {self.non_finite!r}, must be one of {', '.join(POLICIES)}"
            )
        if self.on_desync not in ON_DESYNC:
            raise ValueError(
                f"on_desync is {self.on_desync!r}, must be one of {', '.join(ON_DESYNC)}"
            )
        if self.equal not in EQUAL:
            raise ValueError(f"equal is {self.equal!r}, must be one of {', '.join(EQUAL)}")
        if type(self.verify_every) is not int:
            raise TypeError(
                f"verify_every is {self.verify_every!r}, must be a whole number of steps"
            )
        least = 1 if self.on_desync == "repair" else 0
        if self.verify_every < least:
            raise ValueError(
                f"verify_every is {self.verify_every}, must be at least {least} with this on_desync"
            )


Safety.__init__ = checks_keywords("argument of Safety")(Safety.__init__)  # type: ignore[method-assign]
