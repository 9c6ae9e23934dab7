"""Safety: settings for the reaction to nonfinite gradients and to replicas that are out of sync."""

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
    """Settings that say how training reacts to nonfinite gradients, and to replicas that differ in
    tensors that must be equal.

    Args:
        non_finite: If a replica's gradient is not finite: "stop", or "skip" its contribution. On an
            accelerator, "stop" also skips the contribution, and stops one or two steps later.
        verify_every: Steps between two comparisons of the tensors and parameter-group options that
            must be equal on all replicas; 0 for never.
        on_desync: If these tensors differ: "stop", or "repair" them with the majority's value.
        equal: How equal replicas must be. "bits" raises an error at the first step if replicas
            round differently, even with each operation of the optimizer rounded separately.
            "close" lets replicas differ by rounding: each step makes a thousandth of the agreed
            state equal, and comparisons measure distances. "auto" chooses after a self-test at the
            first step: "bits" if all processes round alike, directly or after each operation of
            the optimizer is rounded separately; else "close", with a warning.

    Raises:
        TypeError: verify_every is not an int.
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
        least = 0
        if self.on_desync == "repair":
            least = 1
        if self.verify_every < least:
            raise ValueError(
                f"verify_every is {self.verify_every}, must be at least {least} if on_desync is"
                f" {self.on_desync!r}"
            )


_checked = checks_keywords("argument of Safety")(Safety.__init__)
Safety.__init__ = _checked  # type: ignore[method-assign]
