"""Schemes that exchange once per round how far the parameters moved from the last agreed
weights.
"""

from dataclasses import replace

from detonation.core.codec.basis import Basis, Identity
from detonation.core.codec.codec import Codec
from detonation.core.codec.selection import Everything, Selection
from detonation.core.flat.layout import FragmentUnit
from detonation.core.memory import Feedback
from detonation.core.round import Round
from detonation.core.schemes.registry import register
from detonation.core.schemes.scheme import (
    LinkKind,
    Outer,
    ParameterScheme,
    aggregation_named,
    precision_named,
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
    """A scheme whose signal is the movement of the parameters in a round.

    The DiLoCo family is built on it; use it as the base of new schemes.

    Args:
        every: Local steps per round, at least 1.
        outer_lr: Of the outer SGD, above 0.
        outer_momentum: Of the outer SGD, from 0 to below 1.
        nesterov: Whether that momentum is Nesterov's.
        precision: One of `PRECISIONS`.
        basis: The transform of each row before the selection; none when left out.
        selection: The coefficients of each row that are sent; all of them when left out.
        decay: Of the memory of the unsent part, from 0 to 1; without it the unsent part is lost.
        aggregate: One of `AGGREGATIONS`.
        delay: Steps that a message may be in flight, from 0 to below every.
        link: "all-reduce", "all-gather", "owner", or "auto" for the one with the fewest bytes among
            those without a loss of quality.

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
    """Local steps with any optimizer; every `every` steps the replicas average the movement of
    their parameters.

    The mean of anchor - parameters is the gradient of an outer SGD, which moves the anchor; all
    replicas start the next round from the anchor, bitwise equal. The state of the inner optimizer
    stays local. With outer_lr 1 and outer_momentum 0 this is plain averaging.

    Args:
        every: Local steps per round, at least 1.
        outer_lr: Of the outer SGD, above 0.
        outer_momentum: Of the outer SGD, from 0 to below 1. The paper has 0.9, for hundreds of
            rounds of 500 steps; over a hundred rounds of ten steps that was far worse
            (docs/findings.md).
        nesterov: Whether that momentum is Nesterov's.
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

    Fragments are as equal in size as their units allow. Fragment f (from 1) moves to its anchor
    after f * every / fragments steps and then every `every` steps, except for the share `keep` of
    its own movement; its message is sent `delay` steps earlier. torchft does the same. Anchors are
    bitwise equal on all replicas; parameters are equal only after `synchronize()`.

    Args:
        every, outer_lr, outer_momentum, precision: As in `diloco`.
        fragments: From 1 to every.
        delay: Steps, from 0 to below every.
        keep: From 0 to 1. With the paper's 0.5 replicas part in long rounds; with 1, until
            `synchronize()`.
        unit: "parameter", or "block" to keep the parameters of a numbered layer (layers.3) in one
            fragment, as the paper does; layers of equal size take turns.
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
    """Local steps with any optimizer; every `every` steps the replicas' parameters are averaged.

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
