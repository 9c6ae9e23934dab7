"""A scheme describes what the replicas of one level of replication exchange, and when. It is frozen
and can be serialised.

A scheme contains a codec and a round, but knows nothing of network links.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import (
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    Self,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from detonation.choices import checks_keywords, find_function, make, plain_types
from detonation.core.codec import (
    AGGREGATIONS,
    PRECISIONS,
    Aggregation,
    Codec,
    Everything,
    Identity,
    Mean,
    Precision,
    Selection,
    TopK,
)
from detonation.core.flat.layout import FragmentUnit, Layout
from detonation.core.memory import Feedback
from detonation.core.round import Round
from detonation.plugins import plugin, plugin_names

LinkKind = Literal["auto", "all-reduce", "all-gather", "owner"]
LINKS: tuple[str, ...] = get_args(LinkKind)
ALIGNMENT = 16
"""Messages begin at addresses that are multiples of this number of bytes, because NCCL and kernels
then move 16 bytes at a time instead of one.
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
    """The settings that all schemes share. A scheme of this base class exchanges nothing.

    Args:
        codec: Turns a signal into a message, and messages into an update.
        feedback: The memory of the unsent part of the signal; None for no memory.
        aggregation: Combines the messages of all replicas to one update.
        round: The steps at which messages are sent, and when their update is applied.
        link: The collective; "auto" chooses the one with the fewest bytes among those that hardly
            raise the loss.
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
    def identity(self) -> dict[str, Any]:
        """The scheme's arguments, by the names that messages, checkpoints and update logs use.

        Some schemes had a delay in earlier builds. Their identity still contains delay=0, so that
        this build can read files of those builds.
        """
        if self.name not in _HAD_DELAY:
            return dict(self.arguments)
        others = {name: value for name, value in self.arguments.items() if name != "link"}
        return {**others, "delay": 0, "link": self.link}

    @property
    def fragments(self) -> int:
        """Number of parts into which the parameters are divided. Each part is exchanged at steps of
        its own."""
        return 1

    @property
    def rounds(self) -> list[Round]:
        """The round (the schedule of exchanges) of each fragment. The offsets of the fragments are
        evenly spaced in a round; the last fragment has offset 0.
        """
        every = self.round.every
        count = self.fragments
        offsets = [turn * every // count % every for turn in range(1, count + 1)]
        return [replace(self.round, offset=offset) for offset in offsets]

    def divide(self, layout: Layout, sizes: Mapping[str, int] | None = None) -> list[Layout]:
        """Divides `layout` into fragments, and returns the layout of each fragment.

        Args:
            sizes: Number of coordinates of each parameter over all shards, by name; by default the
                sizes in `layout`.
        """
        return [layout]

    @property
    def divides_messages(self) -> bool:
        """True if each bucket is a message of its own; False if all buckets are pieces of one
        message with one header.
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
                "link is 'all-reduce', which needs precision fp32 or bf16, a shared selection and"
                " aggregate='mean': use link='auto'"
            )
        if not (self.aggregation.rowwise or hasattr(self.aggregation, "weights")):
            raise TypeError(
                f"{type(self.aggregation).__name__} does not aggregate row by row: define its"
                " `weights`, as in NormWeighing"
            )
        if self.link == "owner" and not self.aggregation.rowwise:
            raise ValueError(
                "link is 'owner', so an owner receives only some rows of each message, but"
                " aggregate='clipped_mean' needs the norm of the whole message: use"
                " link='all-gather'"
            )

    @property
    def summable(self) -> bool:
        """True if an all-reduce computes the update: messages are summable and aggregated by a mean
        over all replicas.
        """
        return self.codec.summable and isinstance(self.aggregation, Mean)

    def aligned(self, local_ranks: int = 1) -> Self:
        """Returns the scheme with messages that are padded for an accelerator. If `local_ranks`
        ranks share a gathered message, the part of each rank has a multiple of `ALIGNMENT` bytes.
        """
        return replace(self, codec=replace(self.codec, alignment=ALIGNMENT * local_ranks))

    def reply_codec(self, replicas: int) -> Codec:
        """Returns the codec for the replies of owners (replicas that aggregate some of the rows for
        all), among `replicas` replicas.

        If each sender selects its own coefficients, the aggregate of a row has more coefficients
        than a message. A reply as large as one message would leave most coefficients in the owner's
        residual until later steps, which raises the loss by up to a third. So a reply holds as many
        coefficients per row as can have arrived, up to a limit: the coefficients of four messages,
        or a quarter of the row if this is more. Each coefficient has two bits (research/log.md).
        With a shared selection a reply has the format of a message.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.round != Round():
            raise ValueError(
                f"round is {self.round}, but gradients are exchanged and used at every step: leave"
                " round out, or exchange parameters (ParameterScheme)"
            )


@dataclass(frozen=True)
class ParameterScheme(Scheme):
    """Exchanges the movement of the parameters from the anchor once per round.

    Args:
        outer: The optimizer that moves the anchor.
        fragments: Number of parts of the parameters, which are exchanged at different steps; from 1
            to `every`.
        unit: The part of the model that stays in one fragment; see `Layout.fragments`.
        keep: The share of their own movement that parameters keep when they follow the anchor; from
            0 to 1.
        resume_from: Where parameters continue after the anchor has moved. "anchor": at the anchor,
            plus the share `keep` of their own movement. "sent": sent coordinates continue at the
            anchor, and all other coordinates do not change; this needs a round without a delay.
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
        """True if every coordinate that a message contains becomes the mean over all replicas,
        whatever the anchor is.
        """
        whole = self.codec.selection.period == 1 or self.resume_from == "sent"
        exact = whole and self.summable and self.codec.precision == PRECISIONS["fp32"]
        return (
            exact
            and self.outer == Outer(1.0, 0.0, False)
            and self.feedback is None
            and not self.round.delay
        )

    @property
    def equalizes(self) -> bool:
        """True if the scheme averages (see `averages`), and each message makes the parameters of
        its fragment equal on all replicas.
        """
        return self.averages and self.codec.selection.period == 1 and not self.keep

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
            raise ValueError(f"delay is {self.round.delay}, must be 0 if resume_from is 'sent'")
        if self.round.delay >= self.round.every:
            raise ValueError(
                f"delay is {self.round.delay}, must be below every ({self.round.every})"
            )


def precision_named(name: str) -> Precision:
    """Returns the precision called `name`. Raises `ValueError` if there is no such precision."""
    if name not in PRECISIONS:
        raise ValueError(f"precision is {name!r}, must be one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def aggregation_named(name: str) -> Aggregation:
    """Returns the aggregation called `name`. Raises `ValueError` if there is no such rule."""
    if name not in AGGREGATIONS:
        raise ValueError(f"aggregate is {name!r}, must be one of {', '.join(AGGREGATIONS)}")
    return AGGREGATIONS[name]


P = ParamSpec("P")
S = TypeVar("S", bound=Scheme)

SCHEMES: dict[str, Callable[..., Scheme]] = {}
"""Every registered scheme, in order of registration."""


_HAD_DELAY = {"loco", "demo", "random", "random_sign", "striding"}
"""Schemes whose messages could arrive `delay` steps later in earlier builds."""


def known_schemes() -> Mapping[str, Callable[..., Scheme]]:
    """Returns `SCHEMES`, after importing the schemes that installed packages provide."""
    for name in plugin_names("schemes"):
        _import_installed(name)
    return SCHEMES


def _import_installed(name: str) -> None:
    """Imports the scheme `name` of an installed package. The import registers the scheme.

    Raises `ValueError` if the module registers no scheme of that name.
    """
    if name in SCHEMES:
        return
    function = plugin("schemes", name)
    if name not in SCHEMES:
        raise ValueError(
            f"the entry point {name!r} of detonation.schemes is the function {function.__name__}:"
            " decorate this function with @register, and give it the name of the entry point"
        )


def register(function: Callable[P, S]) -> Callable[P, S]:
    """Registers the scheme that `function` makes, under the name of `function`.

    Recipes, `--help`, `compare` and `plan` then offer the scheme, and
    `detonation.testing.check_scheme` checks it against the laws that every scheme must follow. The
    decorator records the name and the arguments, defaults included, in the scheme, and checks the
    type of each argument.

    Args:
        function: Returns a `GradientScheme` or a `ParameterScheme`; every parameter is annotated
            with `int`, `float`, `bool`, `str` or a `Literal`, and has a default.

    Returns:
        The function, which now raises `ValueError` for an argument of another type.

    Raises:
        ValueError: Another function has this name already.

    Example:
        >>> from detonation.extend import DCT, TopK, momentum, register
        >>> @register
        ... def half(chunk: int = 64) -> Scheme:
        ...     return momentum(DCT(), TopK(chunk // 2, chunk), decay=0.9)
        >>> half(chunk=8).arguments, scheme("half", {"chunk": 8}) == half(chunk=8)
        ({'chunk': 8}, True)
        >>> del SCHEMES["half"]
    """
    name = function.__name__
    if name in SCHEMES and SCHEMES[name].__module__ != function.__module__:
        raise ValueError(
            f"scheme {name} is registered already, by {SCHEMES[name].__module__}: choose"
            " another name"
        )
    SCHEMES[name] = recorded = _recorded(function, name)
    return recorded


def _without_delay(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `given` without delay=0. Raises `ValueError` for any other delay, if the scheme
    `name` had a delay in earlier builds.
    """
    if name not in _HAD_DELAY or "delay" not in given:
        return dict(given)
    if given["delay"] != 0:
        raise ValueError(
            f"{name} has no delay any more, because late updates raise the loss: leave delay out;"
            " overlap() sends messages during backward"
        )
    return {key: value for key, value in given.items() if key != "delay"}


def _recorded(function: Callable[P, S], name: str) -> Callable[P, S]:
    """Wraps `function` so that each call checks the arguments, and records `name` and the arguments
    in the scheme that `function` makes.
    """
    signature = inspect.signature(function)
    hints = get_type_hints(function)

    @checks_keywords(f"argument of scheme {name}")
    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> S:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for argument, value in bound.arguments.items():
            _require_type(argument, value, hints.get(argument))
        found = function(*args, **kwargs)
        if not isinstance(found, Scheme):
            raise ValueError(
                f"scheme {name} is {found!r}, must be a Scheme: return what momentum(...) or"
                " outer_sgd(...) makes"
            )
        return replace(found, name=name, arguments=dict(bound.arguments))

    if name not in _HAD_DELAY:
        return made

    @functools.wraps(made)
    def without_delay(*args: P.args, **kwargs: P.kwargs) -> S:
        return made(*args, **_without_delay(name, kwargs))

    return without_delay


def scheme(name: str, arguments: Mapping[str, Any] | None = None) -> Scheme:
    """Makes a scheme from its name and arguments, as written in a recipe.

    Args:
        name: A scheme that is registered or that an installed package adds, or
            "package.module:function" for a function that returns a scheme.
        arguments: Arguments of the function; all other arguments have their defaults.

    Raises:
        ValueError: A name or an argument does not exist (the message lists the valid names), or a
            value is out of range.

    Example:
        >>> scheme("demo", {"topk": 2}).arguments["chunk"]
        64
    """
    if name in plugin_names("schemes"):
        _import_installed(name)
    function = find_function("scheme", name, SCHEMES)
    if name not in SCHEMES:
        function = _recorded(function, name)
    given = _without_delay(name, arguments or {})
    made: Scheme = make("scheme", {name: function}, name, given)
    return made


def _require_type(name: str, value: object, hint: Any) -> None:
    """Raises `ValueError` unless `value` matches `hint`: a value of a `Literal`, or a plain
    type.
    """
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ValueError(
                f"{name} is {value!r}, must be one of {', '.join(map(str, get_args(hint)))}"
            )
        return
    if allowed := plain_types(value, hint):
        text = f"{name} is {value!r}, must be {allowed}"
        if hasattr(value, "item"):
            text += f": pass its .item(), not a {type(value).__name__}"
        raise ValueError(text)
