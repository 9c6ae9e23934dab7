"""A scheme is a frozen, serialisable description of one level of replication.

It knows codec and round, but no link.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, get_args

from detonation.core.codec.aggregate import AGGREGATIONS, Aggregation, Mean
from detonation.core.codec.basis import Identity
from detonation.core.codec.codec import Codec
from detonation.core.codec.precision import PRECISIONS, Precision
from detonation.core.codec.selection import Everything, Selection, TopK
from detonation.core.flat.layout import FragmentUnit, Layout
from detonation.core.memory import Feedback
from detonation.core.round import Round

LinkKind = Literal["auto", "all-reduce", "all-gather", "owner"]
LINKS: tuple[str, ...] = get_args(LinkKind)
ALIGNMENT = 16
"""Messages begin at multiples of this number of bytes: NCCL and kernels then move 16 bytes at once
instead of one.
"""


@dataclass(frozen=True)
class Outer:
    """DiLoCo's outer optimizer: SGD on the anchor.

    Args:
        lr: Above 0.
        momentum: From 0 to below 1.
        nesterov: Whether the momentum is Nesterov's.

    Raises:
        ValueError: A value is out of range.
    """

    lr: float
    momentum: float
    nesterov: bool

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"outer_lr is {self.lr}, must be a number above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer_momentum is {self.momentum}, must be from 0 to below 1")


@dataclass(frozen=True)
class Scheme:
    """The settings that all schemes share. The base class exchanges nothing.

    Args:
        codec: Turns a signal into a message, and messages into an update.
        feedback: The memory of the unsent part of the signal; None for no memory.
        aggregation: Makes one update of the messages of all replicas.
        round: The steps at which messages are sent, and when their update is applied.
        link: The collective; "auto" for the one with the fewest bytes among those without a loss of
            quality.
        name: The name in a recipe; `register` sets it.
        arguments: The arguments in a recipe, defaults included; `register` sets them.

    Raises:
        ValueError: The link does not exist, is "all-reduce" for messages that cannot be added, or
            is "owner" for an aggregation of whole messages.

    Example:
        >>> scheme = Scheme(round=Round(every=10))
        >>> scheme.signal, scheme.round.sends(9), scheme.summable
        ('nothing', True, True)
    """

    signal: ClassVar[Literal["gradients", "parameters", "nothing"]] = "nothing"

    codec: Codec = field(default=Codec(Identity(), Everything(), PRECISIONS["fp32"]))
    feedback: Feedback | None = None
    aggregation: Aggregation = field(default=Mean())
    round: Round = field(default=Round())
    link: LinkKind = "auto"
    name: str = "unnamed"
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def fragments(self) -> int:
        """Parts of the parameters that are exchanged at different steps."""
        return 1

    @property
    def rounds(self) -> list[Round]:
        """The round of each fragment; their offsets are evenly spaced, and the last fragment's is
        0.
        """
        every = self.round.every
        count = self.fragments
        offsets = [turn * every // count % every for turn in range(1, count + 1)]
        return [replace(self.round, offset=offset) for offset in offsets]

    def divide(self, layout: Layout, sizes: Mapping[str, int] | None = None) -> list[Layout]:
        """The layout of each fragment of `layout`.

        Args:
            sizes: Coordinates of each parameter over all shards, by name; those of `layout` when
                left out.
        """
        return [layout]

    @property
    def worth_overlapping(self) -> bool:
        """True if sending during backward hides the exchange: for gradients of which the same step
        needs the mean.
        """
        return self.signal == "gradients" and not self.round.delay

    @property
    def divides_messages(self) -> bool:
        """True if each bucket is a message of its own; else all buckets are pieces of one message
        with one header.
        """
        return self.signal == "parameters" and self.aggregation.rowwise

    @property
    def needs_own_update(self) -> bool:
        """True if the replicator needs the update that would result if every replica had sent this
        replica's message.
        """
        return False

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise ValueError(f"link is {self.link!r}, must be one of {', '.join(LINKS)}")
        if self.link == "all-reduce" and not self.summable:
            raise ValueError(
                "link is 'all-reduce', which needs fp32 or bf16 at shared indices and"
                " aggregate='mean'"
            )
        if not (self.aggregation.rowwise or hasattr(self.aggregation, "weights")):
            raise TypeError(
                f"{type(self.aggregation).__name__} is not rowwise: it needs `weights`, see"
                " NormWeighing"
            )
        if self.link == "owner" and not self.aggregation.rowwise:
            raise ValueError(
                "link is 'owner', which shows an owner some rows of each message;"
                " aggregate='clipped_mean' needs the norm of the whole: use link='all-gather'"
            )

    @property
    def summable(self) -> bool:
        """True if an all-reduce computes the update: messages are summable and aggregated by a mean
        over all replicas.
        """
        return self.codec.summable and isinstance(self.aggregation, Mean)

    def aligned(self, local_ranks: int = 1) -> Self:
        """The scheme as an accelerator sends it: the ranks that share a gathered message pad it to
        whole `ALIGNMENT` bytes each.
        """
        return replace(self, codec=replace(self.codec, alignment=ALIGNMENT * local_ranks))

    def reply_codec(self, replicas: int) -> Codec:
        """The codec for the replies of owners among `replicas` replicas.

        If each sender selects its own coefficients, messages contain different ones. A reply as
        large as one message would leave most of them in the server residual, to be sent late, which
        costs up to a third of loss. A reply therefore holds as many coefficients per row as may
        have arrived, at most a quarter of the row or four messages, in two bits each
        (research/log.md). With a shared selection a reply has the format of a message.

        Example:
            >>> from detonation import demo
            >>> demo(topk=1).reply_codec(replicas=4).selection
            TopK(topk=4, chunk=64, shared=False, period=0)
            >>> demo(topk=4).reply_codec(replicas=4).selection.k
            16
        """
        if self.codec.selection.shared:
            return self.codec
        k = self.codec.selection.k
        chunk = self.codec.selection.chunk
        most = min(replicas * k, max(4 * k, chunk // 4))
        selection: Selection = Everything(chunk, chunk)
        if most < chunk:
            selection = TopK(most, chunk)
        return replace(self.codec, selection=selection, precision=PRECISIONS["2bit"])


@dataclass(frozen=True)
class GradientScheme(Scheme):
    """Exchanges gradients, or a momentum of them, at every step."""

    signal = "gradients"


@dataclass(frozen=True)
class ParameterScheme(Scheme):
    """Exchanges the movement of the parameters from the anchor once per round.

    Args:
        outer: The optimizer that moves the anchor.
        fragments: Parts of the parameters whose rounds take turns; from 1 to `every`.
        unit: The part of the model that stays in one fragment; see `Layout.fragments`.
        keep: The share of their own movement that stays when parameters follow the anchor; from 0
            to 1.
        resume_from: Where parameters go when the anchor has moved. "anchor": to it, except for
            `keep`. "sent": to the anchor in the coordinates that were sent; the rest stays. Needs a
            round without a delay.
    """

    signal = "parameters"
    outer: Outer = Outer(1.0, 0.0, False)
    fragments: int = 1
    unit: FragmentUnit = "parameter"
    keep: float = 0.0
    resume_from: Literal["anchor", "sent"] = "anchor"

    @property
    def needs_own_update(self) -> bool:
        return self.resume_from == "sent"

    @property
    def averages(self) -> bool:
        """True if a round ends at the mean of the parameters, independent of the anchor."""
        whole = self.codec.selection.period == 1 or self.resume_from == "sent"
        exact = whole and self.summable and self.codec.precision == PRECISIONS["fp32"]
        return (
            exact
            and self.outer == Outer(1.0, 0.0, False)
            and self.feedback is None
            and not self.round.delay
        )

    def divide(self, layout: Layout, sizes: Mapping[str, int] | None = None) -> list[Layout]:
        return layout.fragments(self.fragments, self.unit, sizes)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.fragments <= self.round.every:
            raise ValueError(
                f"fragments is {self.fragments}, must be from 1 to every ({self.round.every})"
            )
        if not 0 <= self.keep <= 1:
            raise ValueError(f"keep is {self.keep}, must be from 0 to 1")
        if self.resume_from == "sent" and self.round.delay:
            raise ValueError(
                f"delay is {self.round.delay}, must be 0 if parameters follow the sent values"
            )
        if self.round.delay >= self.round.every:
            raise ValueError(
                f"delay is {self.round.delay}, must be below every ({self.round.every})"
            )


def precision_named(name: str) -> Precision:
    """The precision called `name`; raises `ValueError` if there is none."""
    if name not in PRECISIONS:
        raise ValueError(f"precision is {name!r}, must be one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def aggregation_named(name: str) -> Aggregation:
    """The aggregation called `name`; raises `ValueError` if there is none."""
    if name not in AGGREGATIONS:
        raise ValueError(f"aggregate is {name!r}, must be one of {', '.join(AGGREGATIONS)}")
    return AGGREGATIONS[name]
