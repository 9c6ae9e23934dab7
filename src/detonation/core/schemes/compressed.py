"""Schemes that exchange the movement of the parameters once per round, compressed to a selection or
to few bits.
"""

from dataclasses import replace

from detonation.core.codec.basis import Identity
from detonation.core.codec.selection import Everything, Random, TopK
from detonation.core.schemes.parameters import outer_sgd
from detonation.core.schemes.registry import register
from detonation.core.schemes.scheme import LinkKind, ParameterScheme

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
    """`diloco` for Muon as inner optimizer, in few bits with error feedback.

    Orthogonalised steps have the same norm on all replicas, so their sum tolerates few bits and
    needs less outer momentum. The scheme does not choose the inner optimizer: use it with `Muon`.

    The replicas' movements point in different directions, so their mean has a smaller norm than
    each. Compensate with `outer_lr` above 1, or with `aggregate="rescaled_mean"` and `outer_lr=1`,
    which rescales each row of 256 values to the mean norm.

    Args:
        every, outer_lr, outer_momentum, precision: As in `diloco`.
        decay: Of the rounding error of the precision, which is sent in the next round; from 0
            (lost) to 1.
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
    """Averages a random subset of the parameters themselves after every step, the same subset on
    all replicas.

    Any local optimizer works; between two steps replicas differ. An anchor holds the last agreed
    value of each coordinate, bitwise equal on all replicas; `synchronize()` averages every
    coordinate once, in one whole cycle of messages, and so makes all replicas equal. The paper
    draws and broadcasts a random mask; here every replica computes it, and each coordinate is sent
    once in 1 / rate steps. Chained before `diloco` on the same axis, it keeps replicas close to
    each other in long rounds.

    Args:
        rate: The share of the parameters averaged per step, above 0 and at most 1, rounded down to
            one over a whole number.
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
    """`diloco` that sends only the largest coordinates of the movement in two bits, and keeps the
    rest in memory.

    It selects the top-k of each chunk without a transform, uses error feedback instead of an outer
    momentum, and clips every replica to the median norm. The defaults send about 0.002 bytes per
    parameter and step.

    Args:
        every, outer_lr, precision: As in `diloco`.
        topk, chunk, aggregate, link: As in `demo`.
        decay: Of the memory of the unsent part, from 0 to 1.

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
