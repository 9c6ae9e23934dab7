"""Schemes that exchange once per round: the message is the movement of the parameters from the last
agreed weights.
"""

from dataclasses import replace

from detonation.core.codec import Basis, Codec, Everything, Identity, Random, Selection, TopK
from detonation.core.flat.layout import FragmentUnit
from detonation.core.memory import Feedback
from detonation.core.round import Round
from detonation.core.schemes.scheme import (
    LinkKind,
    Outer,
    ParameterScheme,
    aggregation_named,
    precision_named,
    register,
)


def outer_sgd(
    every: int,
    outer_lr: float,
    outer_momentum: float = 0.0,
    nesterov: bool = True,
    precision: str = "fp32",
    basis: Basis | None = None,
    selection: Selection | None = None,
    decay: float | None = None,
    aggregate: str = "mean",
    delay: int = 0,
    link: LinkKind = "auto",
) -> ParameterScheme:
    """A scheme whose messages contain the movement of the parameters in a round.

    The schemes of the DiLoCo family call this function. Call it to make new schemes, too.

    Args:
        every: Local steps per round, at least 1.
        outer_lr: Learning rate of the outer SGD, above 0.
        outer_momentum: Momentum of the outer SGD, from 0 to below 1.
        nesterov: Whether the outer momentum is Nesterov's.
        precision: One of `PRECISIONS`.
        basis: The transform of each row before the selection; by default no transform.
        selection: The coefficients of each row that are sent; by default all coefficients.
        decay: Decay of the memory of the unsent part, from 0 to 1. None: the unsent part is lost.
        aggregate: One of `AGGREGATIONS`.
        delay: Number of steps for which a message may be in flight, from 0 to below every.
        link: "all-reduce", "all-gather", "owner", or "auto", which chooses the one with the fewest
            bytes among those that hardly raise the loss.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> outer_sgd(every=50, outer_lr=0.7, outer_momentum=0.9).round.every
        50
    """
    feedback = None
    if decay is not None:
        feedback = Feedback(decay)
    return ParameterScheme(
        Codec(basis or Identity(), selection or Everything(), precision_named(precision)),
        feedback,
        aggregation_named(aggregate),
        Round(every, delay),
        link,
        outer=Outer(outer_lr, outer_momentum, outer_momentum > 0 and nesterov),
    )


@register
def diloco(
    every: int = 100,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    nesterov: bool = True,
    precision: str = "fp32",
) -> ParameterScheme:
    """Each replica takes local steps with any optimizer. After every `every` steps the replicas
    average the movement of their parameters.

    The anchor holds the weights on which all replicas agreed last. The mean of anchor - parameters
    is the gradient of an outer SGD, which moves the anchor. All replicas start the next round from
    the anchor, bitwise equal. The state of the inner optimizer stays local. With outer_lr 1 and
    outer_momentum 0 this is plain averaging.

    Args:
        every: Local steps per round, at least 1.
        outer_lr: Learning rate of the outer SGD, above 0.
        outer_momentum: Momentum of the outer SGD, from 0 to below 1. The paper uses 0.9 for
            hundreds of rounds of 500 steps. Over a hundred rounds of ten steps, 0.9 was far worse
            (docs/findings.md).
        nesterov: Whether the outer momentum is Nesterov's.
        precision: One of "fp32", "bf16", "int8", "4bit", "2bit", "sign".

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> diloco(every=20).outer
        Outer(lr=0.7, momentum=0.5, nesterov=True)

    Reference: Douillard et al., DiLoCo, arXiv 2311.08105.
    """
    return outer_sgd(every, outer_lr, outer_momentum, nesterov, precision)


@register
def streaming_diloco(
    every: int = 100,
    fragments: int = 4,
    delay: int = 5,
    keep: float = 0.0,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    precision: str = "4bit",
    unit: FragmentUnit = "parameter",
    link: LinkKind = "auto",
) -> ParameterScheme:
    """`diloco` in fragments that are sent at different steps, so that the network load is even.

    Fragments are as equal in size as the size of a `unit` allows. Fragment f (from 1) moves to its
    anchor after f * every / fragments steps, and then again after each further `every` steps. But
    it keeps the share `keep` of its own movement. The message of a fragment is sent `delay` steps
    earlier, as in torchft. Anchors are bitwise equal on all replicas; parameters are equal only
    after `synchronize()`.

    Args:
        every, outer_lr, outer_momentum, precision: As in `diloco`.
        fragments: Number of fragments, from 1 to every.
        delay: Steps between sending and applying a message, from 0 to below every.
        keep: The share of its own movement that a fragment keeps, from 0 to 1. With the paper's
            0.5, replicas drift apart in long rounds. With 1, they drift apart until
            `synchronize()`.
        unit: "parameter", or "block" to keep the parameters of a numbered layer (layers.3) in one
            fragment, as the paper does. Layers of equal size go to the fragments in turn.
        link: As in `demo`.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> [each.offset for each in streaming_diloco(every=100, fragments=4).rounds]
        [25, 50, 75, 0]

    Reference: Douillard et al., Streaming DiLoCo, arXiv 2501.18512.
    """
    scheme = outer_sgd(every, outer_lr, outer_momentum, True, precision, delay=delay, link=link)
    return replace(scheme, fragments=fragments, unit=unit, keep=keep)


@register
def local_sgd(every: int = 16, precision: str = "fp32") -> ParameterScheme:
    """Each replica takes local steps with any optimizer. After every `every` steps the parameters
    of all replicas are averaged.

    It is `diloco` without an outer optimizer (outer_lr 1, outer_momentum 0).

    Args:
        every, precision: As in `diloco`.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> local_sgd(every=16).outer
        Outer(lr=1.0, momentum=0.0, nesterov=False)

    Reference: Stich, arXiv 1805.09767.
    """
    return outer_sgd(every, outer_lr=1.0, precision=precision)


ROW = 256
"""Coefficients per row of `muloco` if the aggregation works by rows: enough for a meaningful norm,
few enough for small parameters.
"""


@register
def muloco(
    every: int = 30,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.6,
    precision: str = "4bit",
    decay: float = 1.0,
    aggregate: str = "mean",
    link: LinkKind = "auto",
) -> ParameterScheme:
    """`diloco` for the inner optimizer Muon, with few bits per value and error feedback.

    Orthogonalised steps have the same norm on all replicas, so their sum tolerates few bits and
    needs less outer momentum. The scheme does not choose the inner optimizer: use it with `Muon`.

    The replicas' movements point in different directions, so their mean has a smaller norm than
    each movement. Compensate with `outer_lr` above 1, or with `aggregate="rescaled_mean"` and
    `outer_lr=1`, which rescales each row of 256 values to the mean norm.

    Args:
        every, outer_lr, outer_momentum, precision: As in `diloco`.
        decay: The share of the rounding error that is sent in the next round, from 0 to 1.
        aggregate, link: As in `demo`.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> muloco(precision="2bit").feedback.decay
        1.0

    Reference: Thérien et al., MuLoCo, arXiv 2505.23725.
    """
    selection = Everything(ROW, ROW)
    if aggregate == "mean":
        selection = Everything()
    return outer_sgd(
        every,
        outer_lr,
        outer_momentum,
        True,
        precision,
        None,
        selection,
        decay,
        aggregate,
        link=link,
    )


@register
def sparta(rate: float = 1 / 200, precision: str = "fp32") -> ParameterScheme:
    """After every step, averages a random subset of the parameters over all replicas. The subset is
    the same on all replicas.

    Any local optimizer works. Replicas differ in the parameters that were not averaged. An anchor
    holds the last agreed value of each coordinate, bitwise equal on all replicas. `synchronize()`
    averages every coordinate once, in one whole cycle of messages, and so makes all replicas equal.
    The paper draws and broadcasts a random mask; here every replica computes the same mask, and
    each coordinate is sent once in 1 / rate steps. If `sparta` is the level before `diloco` on the
    same axis, it keeps replicas close to each other in long rounds.

    Args:
        rate: The share of the parameters averaged per step, above 0 and at most 1, rounded down to
            1 divided by an integer.
        precision: As in `diloco`.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> sparta(rate=1 / 200).resume_from
        'sent'

    Reference: Beton et al., SPARTA, 2025 (openreview stFPf3gzq1).
    """
    return replace(
        outer_sgd(1, 1.0, precision=precision, selection=Random(rate)), resume_from="sent"
    )


@register
def sparseloco(
    every: int = 15,
    topk: int = 64,
    chunk: int = 4096,
    decay: float = 0.95,
    outer_lr: float = 1.0,
    precision: str = "2bit",
    aggregate: str = "clipped_mean",
    link: LinkKind = "auto",
) -> ParameterScheme:
    """`diloco` that sends only the largest coordinates of the movement, with two bits each, and
    keeps the unsent rest for later rounds.

    It selects the top-k of each chunk without a transform, uses error feedback instead of an outer
    momentum, and scales down every message whose norm exceeds the median norm. The defaults send
    about 0.002 bytes per parameter and step.

    Args:
        every, outer_lr, precision: As in `diloco`.
        topk, chunk, aggregate, link: As in `demo`.
        decay: Decay of the memory of the unsent part, from 0 to 1.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> sparseloco().codec.selection == TopK(topk=64, chunk=4096)
        True

    Reference: Sarfi et al., SparseLoCo, arXiv 2508.15706.
    """
    selection = TopK(topk, chunk)
    return outer_sgd(
        every, outer_lr, 0.0, True, precision, Identity(), selection, decay, aggregate, link=link
    )
