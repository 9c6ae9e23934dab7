"""Schemes: a frozen, serialisable description of one level of replication. It knows codec and round, no link."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from detonation.choices import make
from detonation.core.basis import DCT, Basis, Identity
from detonation.core.codec import Codec
from detonation.core.combine import COMBINES, Combine
from detonation.core.memory import Error, Feedback
from detonation.core.precision import PRECISIONS, Precision
from detonation.core.rounds import Round
from detonation.core.selection import Everything, Random, Rotation, Selection, Slicing, Striding, TopK

LinkKind = Literal["auto", "all-reduce", "all-gather", "owner"]
LINKS: tuple[str, ...] = get_args(LinkKind)


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
    arguments: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def rounds(self) -> list[Round]:
        """The round of each fragment: they take turns."""
        every, count = self.round.every, self.fragments
        return [replace(self.round, offset=fragment * every // count) for fragment in range(count)]

    def __post_init__(self) -> None:
        if self.link not in LINKS:
            raise ValueError(f"link is {self.link!r}, must be one of {', '.join(LINKS)}")
        if self.link == "all-reduce" and not (self.codec.summable and self.combine == "replicas"):
            raise ValueError("link is 'all-reduce', which needs fp32 or bf16 at shared places and combine='replicas'")
        if not 1 <= self.fragments <= self.round.every:
            raise ValueError(f"fragments is {self.fragments}, must be from 1 to every ({self.round.every})")
        if not 0 <= self.keep < 1:
            raise ValueError(f"keep is {self.keep}, must be from 0 to below 1")
        if self.outer and self.round.delay >= self.round.every:
            raise ValueError(f"delay is {self.round.delay}, must be below every ({self.round.every})")


def full(precision: str = "fp32") -> Scheme:
    """Gradients averaged over all replicas at every step: what hybrid-sharded data parallel does.

    precision: one of `PRECISIONS`, how the gradients are written on the wire; below bf16 they lose what it cannot say.
    """
    codec = Codec(Identity(), Everything(), _precision(precision))
    return Scheme("full", "gradients", codec, arguments={"precision": precision})


def none() -> Scheme:
    """No exchange: every replica trains alone, as under FSDP inside its node."""
    return Scheme("none", "nothing")


def demo(
    topk: int = 4,
    chunk: int = 64,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error: Error = "keep",
    combine: Combine = "replicas",
    delay: int = 0,
    lookahead: bool = True,
    link: LinkKind = "auto",
) -> Scheme:
    """Decoupled momentum: the `topk` largest DCT coefficients of every chunk of the momentum, at every step.

    Peng, Quesnelle & Kingma, arXiv 2411.19870; with more than one shard it is FlexDeMo (From et al., arXiv 2502.06728).
    The papers step with the sign of the update: use it with `SignSGD`. Any other optimizer works too.

    topk: from 1 to chunk. chunk: neighbouring coordinates that are transformed together, at least 1.
    decay: of the momentum, from 0 to 1; the longer the run, the closer to 1. alpha, error: see `Feedback`.
    precision: one of `PRECISIONS`; "sign" is DisTrO's single bit. combine: see `combined`; "replicas" as the paper
    says, or "senders" as the code published with it does.
    delay: steps that a message may be on its way while training goes on, at least 0. lookahead: take the gradient where
    this replica expects to be by then (see `LookAhead`), which needs an optimizer without state.
    link: "all-gather", "owner" (bytes that do not grow with the replicas), or "auto", whichever sends less.
    """
    arguments = {
        "topk": _whole("topk", topk), "chunk": _whole("chunk", chunk), "decay": decay, "alpha": alpha,
        "precision": precision, "error": error, "combine": combine, "delay": delay,
        "lookahead": lookahead, "link": link,
    }  # fmt: skip
    return _momentum("demo", DCT(), TopK(topk, chunk), arguments)


def distro(topk: int = 4, chunk: int = 64, decay: float = 0.999, delay: int = 1, link: LinkKind = "auto") -> Scheme:
    """`demo` in signs of its coefficients, one step late, with look-ahead: nobody waits for the network.

    DisTrO (Nous Research, 2024), as run by Psyche for Consilience. There a coefficient leaves the momentum one step
    after it was told; here at once. Use it with `SignSGD`; arguments as in `demo`.
    """
    momentum = demo(topk, chunk, decay, precision="sign", error="drop", delay=delay, link=link)
    return replace(momentum, name="distro", arguments=_only(momentum.arguments, "topk chunk decay delay link"))


def random(
    rate: float = 1 / 16,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error: Error = "keep",
    combine: Combine = "replicas",
    delay: int = 0,
    lookahead: bool = True,
    link: LinkKind = "auto",
) -> Scheme:
    """A random subset of the momentum, the same on all replicas and fresh at every step, without indices.

    From et al., arXiv 2502.06728. rate: the part of the coordinates told in a step, above 0 and at most 1, rounded
    down to one over a whole number; every coordinate is told once in a cycle of ceil(1 / rate) steps. The rest as in
    `demo`.
    """
    return _rotating("random", Random(rate), decay, alpha, precision, error, combine, delay, lookahead, link)


def random_sign(
    rate: float = 1 / 8,
    decay: float = 0.95,
    alpha: float = 1.0,
    error: Error = "drop",
    delay: int = 0,
    lookahead: bool = True,
    link: LinkKind = "auto",
) -> Scheme:
    """`random` with one bit a value and a vote: the replicas send signs, the majority's is taken.

    Neither indices nor magnitudes are sent, 1 / 32 of the bytes of `random`. Arguments as there.
    """
    rotating = _rotating("random_sign", Random(rate), decay, alpha, "sign", error, "majority", delay, lookahead, link)
    return replace(rotating, arguments=_only(rotating.arguments, "rate decay alpha error delay lookahead link"))


def striding(
    rate: float = 1 / 16,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error: Error = "keep",
    combine: Combine = "replicas",
    delay: int = 0,
    lookahead: bool = True,
    link: LinkKind = "auto",
) -> Scheme:
    """Every n-th coordinate of the momentum, the comb moving on by one each step. Arguments as in `random`.

    From et al., arXiv 2502.06728, with a rotation that covers everything (in the published code it stands still at
    power-of-two rates).
    """
    return _rotating("striding", Striding(rate), decay, alpha, precision, error, combine, delay, lookahead, link)


def slicing(
    rate: float = 1 / 16,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error: Error = "keep",
    combine: Combine = "replicas",
    delay: int = 0,
    lookahead: bool = True,
    link: LinkKind = "auto",
) -> Scheme:
    """Blocks of neighbouring coordinates of the momentum, the next ones each step. Arguments as in `random`.

    In the code published with arXiv 2502.06728, where it sends zeros; this one sends the momentum.
    """
    return _rotating("slicing", Slicing(rate), decay, alpha, precision, error, combine, delay, lookahead, link)


def diloco(
    every: int = 100,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    precision: str = "fp32",
) -> Scheme:
    """Local steps with any optimizer; every `every` steps the replicas average how far their parameters moved.

    Douillard et al., arXiv 2311.08105: the mean of anchor - parameters is the gradient of an outer SGD (`outer_lr`,
    `outer_momentum`, `nesterov`) that moves the anchor, from which all replicas start the next round, bitwise equal.
    The inner optimizer's state stays private. With outer_lr 1 and outer_momentum 0 this is plain averaging.
    """
    arguments = {
        "every": _whole("every", every), "outer_lr": outer_lr, "outer_momentum": outer_momentum, "nesterov": nesterov,
        "precision": precision,
    }  # fmt: skip
    codec = Codec(Identity(), Everything(), _precision(precision))
    outer = Outer(outer_lr, outer_momentum, nesterov and outer_momentum > 0)
    return Scheme("diloco", "parameters", codec, round=Round(every), outer=outer, arguments=arguments)


def demo_diloco(
    every: int = 30,
    topk: int = 4,
    chunk: int = 64,
    decay: float = 0.95,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    precision: str = "fp32",
    link: LinkKind = "auto",
) -> Scheme:
    """`diloco` that tells the largest DCT coefficients of what moved and remembers the rest.

    After Nedelkoski et al., arXiv 2510.03371, with one difference: there each replica also applies the part that it did
    not tell, to itself, so that replicas are never quite equal; here it waits in the memory until it is told.
    """
    arguments = {
        "every": _whole("every", every), "topk": _whole("topk", topk), "chunk": _whole("chunk", chunk), "decay": decay,
        "outer_lr": outer_lr, "outer_momentum": outer_momentum, "precision": precision, "link": link,
    }  # fmt: skip
    outer = Outer(outer_lr, outer_momentum, nesterov=outer_momentum > 0)
    codec = Codec(DCT(), TopK(topk, chunk), _precision(precision))
    return Scheme(
        "demo_diloco",
        "parameters",
        codec,
        Feedback(decay),
        round=Round(every),
        outer=outer,
        link=link,
        arguments=arguments,
    )


def streaming_diloco(
    every: int = 100,
    fragments: int = 4,
    delay: int = 5,
    keep: float = 0.5,
    outer_lr: float = 0.4,
    outer_momentum: float = 0.9,
    precision: str = "4bit",
    link: LinkKind = "auto",
) -> Scheme:
    """`diloco` in fragments that take turns, so that the network is never asked for much at once.

    Douillard et al., arXiv 2501.18512. Every n-th parameter makes a fragment; each has its round of `every` steps,
    offset against the others. A message has `delay` steps to arrive; then the fragment follows its anchor, but keeps
    the share `keep` of where it has got to meanwhile. The anchors are bitwise equal on all replicas, the parameters
    are once they are settled.

    fragments: from 1 to every. delay: from 0 to below every. keep: from 0 to below 1. The rest as in `diloco`.
    """
    arguments = {
        "every": _whole("every", every), "fragments": _whole("fragments", fragments), "delay": _whole("delay", delay),
        "keep": keep, "outer_lr": outer_lr, "outer_momentum": outer_momentum, "precision": precision, "link": link,
    }  # fmt: skip
    return Scheme(
        "streaming_diloco",
        "parameters",
        Codec(Identity(), Everything(), _precision(precision)),
        round=Round(every, delay),
        outer=Outer(outer_lr, outer_momentum, nesterov=outer_momentum > 0),
        link=link,
        fragments=fragments,
        keep=keep,
        arguments=arguments,
    )


def local_sgd(every: int = 16, precision: str = "fp32") -> Scheme:
    """Local steps with any optimizer; every `every` steps the replicas' parameters are averaged.

    Stich, arXiv 1805.09767: `diloco` without an outer optimizer (outer_lr 1, outer_momentum 0).
    """
    averaging = diloco(every, outer_lr=1.0, outer_momentum=0.0, precision=precision)
    return replace(averaging, name="local_sgd", arguments={"every": every, "precision": precision})


def sparseloco(
    every: int = 15,
    topk: int = 64,
    chunk: int = 4096,
    decay: float = 0.95,
    outer_lr: float = 1.0,
    precision: str = "2bit",
    combine: Combine = "clipped",
    link: LinkKind = "auto",
) -> Scheme:
    """`diloco` that tells only the largest of what moved, in two bits, and remembers the rest.

    Sarfi et al., arXiv 2508.15706: top-k of each chunk without a transform, error feedback in the place of an outer
    momentum, every replica clipped to the median norm. With the defaults about 0.002 bytes a parameter and step.
    Arguments as in `demo` and `diloco`.
    """
    arguments = {
        "every": _whole("every", every), "topk": _whole("topk", topk), "chunk": _whole("chunk", chunk), "decay": decay,
        "outer_lr": outer_lr, "precision": precision, "combine": combine, "link": link,
    }  # fmt: skip
    return Scheme(
        "sparseloco",
        "parameters",
        Codec(Identity(), TopK(topk, chunk), _precision(precision)),
        Feedback(decay),
        _combine(combine),
        Round(every),
        Outer(outer_lr, momentum=0.0, nesterov=False),
        link=link,
        arguments=arguments,
    )


SCHEMES: dict[str, Callable[..., Scheme]] = {
    "full": full,
    "none": none,
    "demo": demo,
    "demo_diloco": demo_diloco,
    "distro": distro,
    "random": random,
    "random_sign": random_sign,
    "striding": striding,
    "slicing": slicing,
    "diloco": diloco,
    "local_sgd": local_sgd,
    "sparseloco": sparseloco,
    "streaming_diloco": streaming_diloco,
}


def scheme(name: str, arguments: Mapping[str, Any] | None = None) -> Scheme:
    """The scheme called `name` with `arguments`, as a recipe says it.

    Raises `ValueError` for a name or an argument that does not exist (listing those that do), and for a value out of
    range.

    >>> scheme("demo", {"topk": 2}).arguments["chunk"]
    64
    """
    return make("scheme", SCHEMES, name, arguments or {})


def _rotating(
    name: str,
    selection: Rotation,
    decay: float,
    alpha: float,
    precision: str,
    error: Error,
    combine: Combine,
    delay: int,
    lookahead: bool,
    link: LinkKind,
) -> Scheme:
    arguments = {
        "rate": selection.rate, "decay": decay, "alpha": alpha, "precision": precision, "error": error,
        "combine": combine, "delay": delay,
        "lookahead": lookahead, "link": link,
    }  # fmt: skip
    return _momentum(name, Identity(), selection, arguments)


def _only(arguments: Mapping[str, Any], names: str) -> dict[str, Any]:
    return {name: arguments[name] for name in names.split()}


def _momentum(name: str, basis: Basis, selection: Selection, arguments: Mapping[str, Any]) -> Scheme:
    """A scheme that keeps a momentum of the gradients and tells of it at every step."""
    return Scheme(
        name,
        "gradients",
        Codec(basis, selection, _precision(arguments["precision"])),
        Feedback(arguments["decay"], arguments["alpha"], arguments["error"]),
        _combine(arguments["combine"]),
        Round(delay=_whole("delay", arguments["delay"])),
        lookahead=arguments["lookahead"] and arguments["delay"] > 0,
        link=arguments["link"],
        arguments=arguments,
    )


def _combine(name: Combine) -> Combine:
    if name not in COMBINES:
        raise ValueError(f"combine is {name!r}, must be one of {', '.join(COMBINES)}")
    return name


def _precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ValueError(f"precision is {name!r}, must be one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def _whole(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}, must be a whole number")
    return value
