"""Schemes that exchange once a round: how far the parameters have moved from where all replicas last were."""

from dataclasses import replace

from detonation.core.basis import DCT, Identity
from detonation.core.codec import Codec
from detonation.core.combine import Combine
from detonation.core.memory import Feedback
from detonation.core.rounds import Round
from detonation.core.scheme import LinkKind, Outer, Scheme, combine_of, precision_of, whole
from detonation.core.selection import Everything, TopK


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
        "every": whole("every", every), "outer_lr": outer_lr, "outer_momentum": outer_momentum, "nesterov": nesterov,
        "precision": precision,
    }  # fmt: skip
    codec = Codec(Identity(), Everything(), precision_of(precision))
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
        "every": whole("every", every), "topk": whole("topk", topk), "chunk": whole("chunk", chunk), "decay": decay,
        "outer_lr": outer_lr, "outer_momentum": outer_momentum, "precision": precision, "link": link,
    }  # fmt: skip
    outer = Outer(outer_lr, outer_momentum, nesterov=outer_momentum > 0)
    codec = Codec(DCT(), TopK(topk, chunk), precision_of(precision))
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
        "every": whole("every", every), "fragments": whole("fragments", fragments), "delay": whole("delay", delay),
        "keep": keep, "outer_lr": outer_lr, "outer_momentum": outer_momentum, "precision": precision, "link": link,
    }  # fmt: skip
    return Scheme(
        "streaming_diloco",
        "parameters",
        Codec(Identity(), Everything(), precision_of(precision)),
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
        "every": whole("every", every), "topk": whole("topk", topk), "chunk": whole("chunk", chunk), "decay": decay,
        "outer_lr": outer_lr, "precision": precision, "combine": combine, "link": link,
    }  # fmt: skip
    return Scheme(
        "sparseloco",
        "parameters",
        Codec(Identity(), TopK(topk, chunk), precision_of(precision)),
        Feedback(decay),
        combine_of(combine),
        Round(every),
        Outer(outer_lr, momentum=0.0, nesterov=False),
        link=link,
        arguments=arguments,
    )
