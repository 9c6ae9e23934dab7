"""Schemes that exchange at every step: gradients, or a momentum of them."""

from detonation.core.codec import (
    DCT,
    Basis,
    Codec,
    Everything,
    Identity,
    Random,
    Selection,
    Striding,
    TileDCT,
    TopK,
)
from detonation.core.memory import Feedback
from detonation.core.round import Round
from detonation.core.schemes.scheme import (
    GradientScheme,
    LinkKind,
    Scheme,
    aggregation_named,
    precision_named,
    register,
)


def momentum(
    basis: Basis,
    selection: Selection,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error_feedback: bool = True,
    aggregate: str = "mean",
    link: LinkKind = "auto",
) -> GradientScheme:
    """A scheme that accumulates gradients in a momentum, and sends a selection of the momentum at
    every step.

    The schemes `demo`, `random` and `striding` call this function. Call it to make new schemes,
    too.

    Args:
        basis: The transform of each row before the selection.
        selection: The coefficients of each row that are sent.
        decay: Decay of the momentum, from 0 to 1; closer to 1 for longer runs.
        alpha: The share of the sent coefficients that is subtracted from the momentum, from 0 to 1.
        precision: One of `PRECISIONS`.
        error_feedback: Whether the rounding error of the precision stays in the momentum.
        aggregate: One of `AGGREGATIONS`.
        link: "all-reduce", "all-gather", "owner", or "auto", which chooses the one with the fewest
            bytes among those that hardly raise the loss.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> momentum(DCT(), TopK(4, 64), decay=0.9).codec.nbytes(rows=10)
        190
    """
    return GradientScheme(
        Codec(basis, selection, precision_named(precision)),
        Feedback(decay, alpha, error_feedback),
        aggregation_named(aggregate),
        Round(),
        link,
    )


@register
def full(precision: str = "fp32") -> GradientScheme:
    """Averages all gradients over all replicas at every step, as hybrid-sharded data parallelism
    does.

    Args:
        precision: One of "fp32", "bf16", "int8", "4bit", "2bit", "sign". Gradients are rounded to
            this precision.

    Raises:
        ValueError: The precision does not exist.

    Example:
        >>> full(precision="bf16").codec.summable
        True

    Reference: Zhao et al., PyTorch FSDP, arXiv 2304.11277 (hybrid sharding).
    """
    return GradientScheme(Codec(Identity(), Everything(), precision_named(precision)))


@register
def loco(precision: str = "4bit", decay: float = 1.0, link: LinkKind = "auto") -> GradientScheme:
    """`full` with few bits per coordinate and error feedback: sends every coordinate at every step,
    and adds rounding errors to the gradients of the next step.

    Use it for optimizers that need dense gradients, such as AdamW and Muon. Rounding errors cancel
    over time: with decay 1, the updates of many steps add up to the sum of the gradients. The paper
    averages the error over steps and stores it in 8 bits; this scheme stores the exact error in
    fp32.

    Args:
        precision: One of "bf16", "int8", "4bit", "2bit", "sign".
        decay: The share of the rounding error that is kept, from 0 to 1.
        link: As in `demo`.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> loco("4bit").feedback.decay, loco("4bit").codec.nbytes(rows=128)
        (1.0, 66)

    Reference: Xie et al., LoCo, arXiv 2407.04480; 1-bit Adam, arXiv 2102.02888.
    """
    if precision == "fp32":
        raise ValueError("precision is 'fp32', which leaves no error to feed back: use full()")
    return momentum(Identity(), Everything(), decay, precision=precision, link=link)


@register
def none() -> Scheme:
    """Exchanges nothing: every replica trains alone with FSDP.

    Example:
        >>> none().signal
        'nothing'
    """
    return Scheme()


@register
def demo(
    topk: int = 4,
    chunk: int = 64,
    tiles: bool = False,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error_feedback: bool = True,
    aggregate: str = "mean",
    link: LinkKind = "auto",
) -> GradientScheme:
    """Decoupled momentum: sends the `topk` largest DCT coefficients of every chunk of the momentum
    at every step.

    With several shards per replica this is FlexDeMo. The papers move the weights by the sign of the
    update: use `SignSGD` to do this. Any other optimizer works, too.

    Args:
        topk: Coefficients sent per chunk, from 1 to chunk; per tile with `tiles`, from 1 to chunk *
            chunk.
        chunk: Neighbouring coordinates that are transformed together, at least 1.
        tiles: Cut matrices into tiles of chunk x chunk, transformed along both sides, as the paper
            does. A parameter that fills no tile (a bias, a norm) is cut into rows as long as a
            tile.
        decay: Decay of the momentum, from 0 to 1; closer to 1 for longer runs.
        alpha: The share of the sent coefficients that is subtracted from the momentum, from 0 to 1;
            1 in DeMo v1, 0.2 is best in v2.
        precision: One of "fp32", "bf16", "int8", "4bit", "2bit", "sign" (DisTrO's single bit).
        error_feedback: Whether the rounding error of the precision stays in the momentum. False
            removes the whole coefficient, as DisTrO does. Use False with "sign", whose errors are
            as large as its values.
        aggregate: "mean" over all replicas as in the paper, "mean_nonzero" over the replicas that
            sent a coefficient as in the authors' package, "majority_vote", "clipped_mean" or
            "rescaled_mean".
        link: "all-gather", "owner" (the bytes do not grow with the number of replicas), or "auto",
            which chooses the one with fewer bytes from 8 replicas on.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> demo(topk=1, precision="sign", error_feedback=False).arguments["topk"]
        1

    Reference: Peng, Quesnelle & Kingma, DeMo, arXiv 2411.19870; From et al., FlexDeMo, arXiv
    2502.06728.
    """
    if tiles and chunk < 1:
        raise ValueError(f"chunk is {chunk}, must be at least 1")
    if tiles and not 1 <= topk <= chunk * chunk:
        raise ValueError(f"topk is {topk}, must be from 1 to chunk * chunk ({chunk * chunk})")
    basis: Basis = DCT()
    row = chunk
    if tiles:
        basis = TileDCT(chunk)
        row = chunk * chunk
    selection = TopK(topk, row)
    return momentum(basis, selection, decay, alpha, precision, error_feedback, aggregate, link)


@register
def decoupled_adamw(
    topk: int = 4,
    chunk: int = 64,
    tiles: bool = False,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error_feedback: bool = True,
    aggregate: str = "mean",
    link: LinkKind = "auto",
) -> GradientScheme:
    """`demo` under another name, for use with AdamW: no replica sends the two moments of AdamW.

    The moments are computed from the agreed update, so they are equal on all replicas. Unlike the
    published code, the scheme does not reduce the update to signs, which would make AdamW a
    smoothed `SignSGD`. The scheme does not choose the optimizer: use it with `torch.optim.AdamW`.
    You can use AdamW with `random` and `striding` in the same way.

    Args:
        topk, chunk, tiles, decay, alpha, precision, error_feedback, aggregate, link: As in `demo`.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> decoupled_adamw().codec == demo().codec
        True

    Reference: From et al., Decoupled AdamW, arXiv 2502.06728.
    """
    return demo(topk, chunk, tiles, decay, alpha, precision, error_feedback, aggregate, link=link)


@register
def random(
    rate: float = 1 / 16,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error_feedback: bool = True,
    aggregate: str = "mean",
    link: LinkKind = "auto",
) -> GradientScheme:
    """Sends a random subset of the momentum, newly drawn at each step and equal on all replicas,
    without indices.

    Args:
        rate: The share of the coordinates sent per step, above 0 and at most 1, rounded down to 1
            divided by an integer. Every coordinate is sent once in a cycle of ceil(1 / rate) steps.
        decay, alpha, precision, error_feedback, aggregate, link: As in `demo`.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> random(rate=1 / 16).codec.selection.period
        16

    Reference: From et al., FlexDeMo, arXiv 2502.06728.
    """
    selection = Random(rate)
    return momentum(Identity(), selection, decay, alpha, precision, error_feedback, aggregate, link)


@register
def random_sign(
    rate: float = 1 / 8,
    decay: float = 0.9,
    alpha: float = 1.0,
    error_feedback: bool = False,
    cycle: bool = False,
    link: LinkKind = "auto",
) -> GradientScheme:
    """`random` with one bit per value and a majority vote: each value of the update has the sign of
    the majority.

    A message holds no indices, and one mean magnitude per 1,024 signs. So it needs about 1 / 32 of
    the bytes of `random` in fp32.

    Args:
        rate: The share of the coordinates sent per step, above 0 and at most 1, rounded down to 1
            divided by an integer.
        decay, alpha, error_feedback, link: As in `demo`.
        cycle: Whether every coordinate is sent once in ceil(1 / rate) steps, as in `random`.
            Without a cycle, each step draws an independent subset. The loss is then lower
            (docs/findings.md), but a coordinate may wait long. With an odd number of replicas, a
            coordinate that gets no gradient makes a random walk of single steps.

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
        Identity(), selection, decay, alpha, "sign", error_feedback, "majority_vote", link
    )


@register
def striding(
    rate: float = 1 / 16,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error_feedback: bool = True,
    aggregate: str = "mean",
    link: LinkKind = "auto",
) -> GradientScheme:
    """Sends every n-th coordinate of the momentum, with n = 1 / rate, and begins one coordinate
    later at each step.

    All coordinates are covered in turn. In the published code, the same coordinates are sent at
    every step if the rate is a power of two.

    Args:
        rate, decay, alpha, precision, error_feedback, aggregate, link: As in `random`.

    Raises:
        ValueError: A value is out of range.

    Example:
        >>> striding(rate=1 / 4).codec.selection.chunk
        64

    Reference: From et al., FlexDeMo, arXiv 2502.06728.
    """
    selection = Striding(rate)
    return momentum(Identity(), selection, decay, alpha, precision, error_feedback, aggregate, link)
