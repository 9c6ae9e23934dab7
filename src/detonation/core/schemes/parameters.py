"""Schemes that exchange once a round: how far the parameters have moved from where all replicas last were."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from detonation.core.codec.aggregate import Combine
from detonation.core.codec.basis import DCT, Identity
from detonation.core.codec.codec import Codec
from detonation.core.codec.selection import Everything, Random, TopK
from detonation.core.memory import Feedback
from detonation.core.round import Round
from detonation.core.schemes.scheme import LinkKind, Outer, Scheme, combine_of, precision_of, whole


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
    return _outer("diloco", codec, Round(every), arguments)


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
    codec = Codec(DCT(), TopK(topk, chunk), precision_of(precision))
    return _outer("demo_diloco", codec, Round(every), arguments, Feedback(decay))


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
    codec = Codec(Identity(), Everything(), precision_of(precision))
    rounds = Round(every, delay)
    return replace(_outer("streaming_diloco", codec, rounds, arguments), fragments=fragments, keep=keep)


def eager_diloco(
    every: int = 100,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    precision: str = "fp32",
    link: LinkKind = "auto",
) -> Scheme:
    """`diloco` that never waits: a message has a whole round to arrive; until then a replica goes by its own share.

    Kale et al., arXiv 2502.12996: the outer gradient is this replica's fresh part and the others' part of the round
    before. Here the anchor holds what has arrived, bitwise equal on all replicas, and a round starts from it and the
    own share of the next outer step: the same sum. Equal parameters everywhere there are only once they are settled.
    With one replica it is `diloco`. Arguments as there.
    """
    arguments = {
        "every": whole("every", every), "outer_lr": outer_lr, "outer_momentum": outer_momentum,
        "precision": precision, "link": link,
    }  # fmt: skip
    codec = Codec(Identity(), Everything(), precision_of(precision))
    scheme = _outer("eager_diloco", codec, Round(every), arguments)
    return replace(scheme, round=Round(every, delay=every), follow="share")


def muloco(
    every: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
    precision: str = "4bit",
    decay: float = 1.0,
    link: LinkKind = "auto",
) -> Scheme:
    """`diloco` for Muon inside, in few bits with error feedback.

    Thérien et al., arXiv 2505.23725. Orthogonal steps are equally long on all replicas, so their sum is one that can be
    written in few bits and wants less outer momentum. The scheme does not choose the inner optimizer: use it with
    `Muon`. decay: of what the precision got wrong, which is told in the next round; from 0 (forgotten) to 1. The rest
    as in `diloco`.
    """
    arguments = {
        "every": whole("every", every), "outer_lr": outer_lr, "outer_momentum": outer_momentum, "precision": precision,
        "decay": decay, "link": link,
    }  # fmt: skip
    codec = Codec(Identity(), Everything(), precision_of(precision))
    return _outer("muloco", codec, Round(every), arguments, Feedback(decay))


def sparta(rate: float = 1 / 200, precision: str = "fp32") -> Scheme:
    """A random subset of the parameters themselves is averaged after every step, the same on all replicas.

    Beton et al., 2025 (openreview stFPf3gzq1). The optimizer is local and any; between steps no two replicas are equal.
    An anchor holds what was agreed on last of each coordinate, bitwise equal on all; settling averages every coordinate
    once, in one whole cycle of messages, after which all replicas are equal. There the mask is drawn at random and
    broadcast; here every replica knows it and each coordinate has its turn once in 1 / rate steps. As a level before
    `diloco` on the same axis it keeps long rounds together.

    rate: the part of the parameters averaged in a step, above 0 and at most 1, rounded down to one over a whole number.
    """
    arguments = {"rate": rate, "precision": precision}
    codec = Codec(Identity(), Random(rate), precision_of(precision))
    outer = Outer(1.0, momentum=0.0, nesterov=False)
    return Scheme("sparta", "parameters", codec, outer=outer, follow="told", arguments=arguments)


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
    codec = Codec(Identity(), TopK(topk, chunk), precision_of(precision))
    scheme = _outer("sparseloco", codec, Round(every), arguments, Feedback(decay))
    return replace(scheme, combine=combine_of(combine))


def _outer(
    name: str, codec: Codec, rounds: Round, arguments: Mapping[str, Any], feedback: Feedback | None = None
) -> Scheme:
    """A scheme whose signal is how far parameters moved; its outer optimizer and its link are among the `arguments`."""
    momentum = arguments.get("outer_momentum", 0.0)
    outer = Outer(arguments["outer_lr"], momentum, momentum > 0 and arguments.get("nesterov", True))
    link = arguments.get("link", "auto")
    return Scheme(name, "parameters", codec, feedback, round=rounds, outer=outer, link=link, arguments=arguments)
