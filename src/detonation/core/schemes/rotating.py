"""Schemes that send a rotating subset of the momentum, the same on all replicas, without
indices.
"""

from detonation.core.codec.basis import Identity
from detonation.core.codec.selection import Random, Striding
from detonation.core.schemes.gradients import momentum
from detonation.core.schemes.registry import register
from detonation.core.schemes.scheme import GradientScheme, LinkKind


@register
def random(
    rate: float = 1 / 16,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error_feedback: bool = True,
    aggregate: str = "mean",
    delay: int = 0,
    link: LinkKind = "auto",
) -> GradientScheme:
    """Sends a random subset of the momentum, newly drawn at each step and equal on all replicas,
    without indices.

    Args:
        rate: The share of the coordinates sent per step, above 0 and at most 1, rounded down to one
            over a whole number. Every coordinate is sent once in a cycle of ceil(1 / rate) steps.
        decay, alpha, precision, error_feedback, aggregate, delay, link: As in `demo`.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> random(rate=1 / 16).codec.selection.period
        16

    Reference: From et al., FlexDeMo, arXiv 2502.06728.
    """
    selection = Random(rate)
    return momentum(
        Identity(), selection, decay, alpha, precision, error_feedback, aggregate, delay, link
    )


@register
def random_sign(
    rate: float = 1 / 8,
    decay: float = 0.9,
    alpha: float = 1.0,
    error_feedback: bool = False,
    cycle: bool = False,
    delay: int = 0,
    link: LinkKind = "auto",
) -> GradientScheme:
    """`random` in one bit per value with majority vote: replicas send signs, and the update is the
    sign of the majority.

    Neither indices nor magnitudes are sent, so it needs 1 / 32 of the bytes of `random`.

    Args:
        rate: The share of the coordinates sent per step, above 0 and at most 1, rounded down to one
            over a whole number.
        decay, alpha, error_feedback, delay, link: As in `demo`.
        cycle: Whether every coordinate is sent once in ceil(1 / rate) steps, as in `random`.
            Without a cycle each step draws a subset on its own. The loss is lower then
            (docs/findings.md), but a coordinate may wait long, and one that gets no gradient walks
            at random by single steps if the number of replicas is odd.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> random_sign(rate=1 / 8).codec.nbytes(rows=1024)
        1040

    Reference: Bernstein et al., signSGD with majority vote, arXiv 1810.05291; Park and Lee, sparse
    signSGD with majority vote, arXiv 2302.07475; the selection of arXiv 2502.06728.
    """
    selection = Random(rate, cycle)
    return momentum(
        Identity(), selection, decay, alpha, "sign", error_feedback, "majority_vote", delay, link
    )


@register
def striding(
    rate: float = 1 / 16,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error_feedback: bool = True,
    aggregate: str = "mean",
    delay: int = 0,
    link: LinkKind = "auto",
) -> GradientScheme:
    """Sends every n-th coordinate of the momentum, and shifts by one coordinate at each step.

    All coordinates are covered in turn; in the published code the offset does not move at
    power-of-two rates.

    Args:
        rate, decay, alpha, precision, error_feedback, aggregate, delay, link: As in `random`.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> striding(rate=1 / 4).codec.selection.chunk
        64

    Reference: From et al., FlexDeMo, arXiv 2502.06728.
    """
    selection = Striding(rate)
    return momentum(
        Identity(), selection, decay, alpha, precision, error_feedback, aggregate, delay, link
    )
