"""Checks which schemes may be levels in which order, and how the rounds of the levels fit."""

from collections.abc import Sequence

from detonation.core.round import Round
from detonation.core.schemes.scheme import ParameterScheme, Scheme

Placed = tuple[object, Scheme]
"""The key of an axis, and the scheme on this axis. Levels on one axis have equal keys. The key of
an axis of one replica is None.
"""


def check_order(levels: Sequence[Placed]) -> None:
    """Raises `ValueError` if the schemes of `levels` cannot be levels in this order, from the
    innermost to the outermost."""
    signals = [scheme.signal for _, scheme in levels]
    if "parameters" in signals and "gradients" in signals[signals.index("parameters") :]:
        raise ValueError(
            "levels are in the wrong order: put levels that exchange gradients before levels"
            " that exchange parameters"
        )
    rounds = [(axis, each) for axis, each in levels if isinstance(each, ParameterScheme)]
    for _, scheme in rounds[:-1]:
        if not scheme.averages:
            raise ValueError(
                f"{scheme.name} is an inner level of rounds, and its anchor would undo the updates"
                " of the outer level: for the inner level, use a scheme that averages at once and"
                " in fp32, such as local_sgd()"
            )
    for number, (axis, outer) in enumerate(rounds):
        _check_inside(rounds[:number], axis, outer)


def _check_inside(
    inner: Sequence[tuple[object, ParameterScheme]], axis: object, outer: ParameterScheme
) -> None:
    """Raises `ValueError` if the replicas of an inner level can differ when `outer`, the scheme on
    `axis`, sends. The anchors that these replicas keep for `outer` would then differ for ever, and
    so would their weights after `synchronize`.

    An inner level on `axis` itself needs no check, because `outer` averages over its replicas. An
    axis with a single replica needs no check, either.
    """
    for other in dict.fromkeys(key for key, _ in inner if key not in (axis, None)):
        schemes = [scheme for key, scheme in inner if key == other]
        if not any(_equal_whenever(outer, scheme) for scheme in schemes):
            # the error names a level whose rounds can be made to fit, if there is one
            _refuse(max(reversed(schemes), key=lambda scheme: scheme.equalizes), outer)


def _equal_whenever(outer: ParameterScheme, inner: ParameterScheme) -> bool:
    """True if `inner` makes its replicas equal at each step at which `outer` sends."""
    if not inner.equalizes:
        return False
    return all(_sends_within(sent, made) for sent in outer.rounds for made in inner.rounds)


def _sends_within(outer: Round, inner: Round) -> bool:
    """True if `inner` sends at each step at which `outer` sends, with their delays taken into
    account.
    """
    apart = (outer.offset - outer.delay) - (inner.offset - inner.delay)
    return outer.every % inner.every == 0 and apart % inner.every == 0


def _refuse(inner: ParameterScheme, outer: ParameterScheme) -> None:
    if not inner.equalizes:
        raise ValueError(
            f"{inner.name} is inside {outer.name} on another axis, but it does not make all weights"
            " of its replicas equal at once: for the inner level, use local_sgd(), or use the axis"
            " of the outer level"
        )
    if inner.fragments > 1:
        raise ValueError(
            f"{outer.name} sends weights while replicas inside {inner.name} in {inner.fragments}"
            " fragments still differ: use one fragment in the inner level"
        )
    settings = f"every={outer.round.every}"
    multiples = "every"
    if outer.fragments > 1:
        settings += f" in {outer.fragments} fragments"
        multiples = "every / fragments"
    if outer.round.delay:
        settings += f" with delay={outer.round.delay}"
        multiples += " and delay"
    raise ValueError(
        f"{outer.name} with {settings} sends weights while replicas inside {inner.name} with"
        f" every={inner.round.every} still differ: make {multiples} of the outer level a multiple"
        " of every of the inner level"
    )
