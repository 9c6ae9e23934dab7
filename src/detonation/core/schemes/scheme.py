"""Scheme: a frozen, serialisable description of one level of replication. It knows codec and round, no link."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from detonation.core.codec.aggregate import COMBINES, Combine
from detonation.core.codec.basis import Identity
from detonation.core.codec.codec import Codec
from detonation.core.codec.precision import PRECISIONS, Precision
from detonation.core.codec.selection import Everything
from detonation.core.memory import Feedback
from detonation.core.round import Round

LinkKind = Literal["auto", "all-reduce", "all-gather", "owner"]
LINKS: tuple[str, ...] = get_args(LinkKind)
Follow = Literal["anchor", "share", "told"]


@dataclass(frozen=True)
class Outer:
    """SGD on the anchor: DiLoCo's outer optimizer. lr above 0; momentum from 0 to below 1."""

    lr: float
    momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"outer_lr is {self.lr}, must be above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer_momentum is {self.momentum}, must be from 0 to below 1")


@dataclass(frozen=True)
class Scheme:
    """One level: what is told (`signal`), how (`codec`, `feedback`, `combine`) and when (`round`).

    Made by `demo(...)`, `diloco(...)` and so on, or from a recipe by `scheme(name, arguments)`; `name` and `arguments`
    are its spelling there, defaults included.

    follow: where parameters go when the anchor moved. "anchor": to it, but for the share `keep` of where they are.
    "share": a round starts where this replica's own share of the outer step that is on its way leads. "told": to it in
    what this replica told; the rest stays where it is.
    """

    name: str
    signal: Literal["gradients", "parameters", "nothing"]
    codec: Codec = field(default=Codec(Identity(), Everything(), PRECISIONS["fp32"]))
    feedback: Feedback | None = None
    combine: Combine = "replicas"
    round: Round = field(default=Round())
    outer: Outer | None = None
    lookahead: bool = False
    link: LinkKind = "auto"
    fragments: int = 1
    keep: float = 0.0
    follow: Follow = "anchor"
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def rounds(self) -> list[Round]:
        """The round of each fragment: they take turns."""
        every, count = self.round.every, self.fragments
        return [replace(self.round, offset=fragment * every // count) for fragment in range(count)]

    @property
    def worth_overlapping(self) -> bool:
        """Whether it gains from sending during backward: gradients that the same step waits for."""
        return self.signal == "gradients" and not self.round.delay

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise ValueError(f"link is {self.link!r}, must be one of {', '.join(LINKS)}")
        if self.link == "all-reduce" and not (self.codec.summable and self.combine == "replicas"):
            raise ValueError("link is 'all-reduce', which needs fp32 or bf16 at shared places and combine='replicas'")
        if not 1 <= self.fragments <= self.round.every:
            raise ValueError(f"fragments is {self.fragments}, must be from 1 to every ({self.round.every})")
        if not 0 <= self.keep < 1:
            raise ValueError(f"keep is {self.keep}, must be from 0 to below 1")
        if self.outer and self.follow != "share" and self.round.delay >= self.round.every:
            raise ValueError(f"delay is {self.round.delay}, must be below every ({self.round.every})")


def precision_of(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ValueError(f"precision is {name!r}, must be one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}, must be a whole number")
    return value


def combine_of(name: Combine) -> Combine:
    if name not in COMBINES:
        raise ValueError(f"combine is {name!r}, must be one of {', '.join(COMBINES)}")
    return name
