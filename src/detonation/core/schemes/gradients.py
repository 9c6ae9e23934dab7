"""Schemes that exchange at every step: the gradients, or what a momentum of them has to tell."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from detonation.core.codec.aggregate import Combine
from detonation.core.codec.basis import DCT, Basis, Identity, TileDCT
from detonation.core.codec.codec import Codec
from detonation.core.codec.selection import Everything, Random, Rotation, Selection, Slicing, Striding, TopK
from detonation.core.memory import Error, Feedback
from detonation.core.round import Round
from detonation.core.schemes.scheme import LinkKind, Scheme, combine_of, precision_of, whole


def full(precision: str = "fp32") -> Scheme:
    """Gradients averaged over all replicas at every step: what hybrid-sharded data parallel does.

    precision: one of `PRECISIONS`, how the gradients are written on the wire; below bf16 they lose what it cannot say.
    """
    codec = Codec(Identity(), Everything(), precision_of(precision))
    return Scheme("full", "gradients", codec, arguments={"precision": precision})


def none() -> Scheme:
    """No exchange: every replica trains alone, as under FSDP inside its node."""
    return Scheme("none", "nothing")


def demo(
    topk: int = 4,
    chunk: int = 64,
    tiles: bool = False,
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
    tiles: cut matrices into tiles of chunk x chunk, transformed along both sides, as the paper does; topk then counts
    in each tile, from 1 to chunk * chunk. What fills no tile (biases, norms) is cut into rows as long as one.
    decay: of the momentum, from 0 to 1; the longer the run, the closer to 1. alpha, error: see `Feedback`.
    precision: one of `PRECISIONS`; "sign" is DisTrO's single bit. combine: see `combined`; "replicas" as the paper
    says, or "senders" as the code published with it does.
    delay: steps that a message may be on its way while training goes on, at least 0. lookahead: take the gradient where
    this replica expects to be by then (see `LookAhead`), which needs an optimizer without state.
    link: "all-gather", "owner" (bytes that do not grow with the replicas), or "auto", whichever sends less.
    """
    arguments = {
        "topk": whole("topk", topk), "chunk": whole("chunk", chunk), "tiles": tiles, "decay": decay, "alpha": alpha,
        "precision": precision, "error": error, "combine": combine, "delay": delay,
        "lookahead": lookahead, "link": link,
    }  # fmt: skip
    if tiles and not 1 <= topk <= chunk * chunk:
        raise ValueError(f"topk is {topk}, must be from 1 to chunk * chunk ({chunk * chunk})")
    basis, row = (TileDCT(chunk), chunk * chunk) if tiles else (DCT(), chunk)
    return _momentum("demo", basis, TopK(topk, row), arguments)


def decoupled_adamw(
    topk: int = 4,
    chunk: int = 64,
    tiles: bool = False,
    decay: float = 0.999,
    alpha: float = 1.0,
    precision: str = "fp32",
    error: Error = "keep",
    combine: Combine = "replicas",
    link: LinkKind = "auto",
) -> Scheme:
    """`demo` by the name that it has with AdamW, whose two moments no replica ever sends.

    Decoupled AdamW of From et al., arXiv 2502.06728. The moments are fed with the update that all agreed on, and so are
    equal everywhere all the same. The update keeps its magnitude: signs, as in the published code, would make AdamW a
    smoothed `SignSGD`. The scheme does not choose the optimizer: use it with `torch.optim.AdamW`. Arguments as in
    `demo`; `random`, `striding` and `slicing` go with AdamW in the same way.
    """
    momentum = demo(topk, chunk, tiles, decay, alpha, precision, error, combine, link=link)
    arguments = _only(momentum.arguments, "topk chunk tiles decay alpha precision error combine link")
    return replace(momentum, name="decoupled_adamw", arguments=arguments)


def distro(
    topk: int = 4,
    chunk: int = 64,
    tiles: bool = False,
    decay: float = 0.999,
    delay: int = 1,
    link: LinkKind = "auto",
) -> Scheme:
    """`demo` in signs of its coefficients, one step late, with look-ahead: nobody waits for the network.

    DisTrO (Nous Research, 2024), as run by Psyche for Consilience. There the look-ahead goes along the sign of the
    whole momentum, which what was told leaves one step later; here it goes along what was told, which leaves at once.
    Use it with `SignSGD`; arguments as in `demo`.
    """
    momentum = demo(topk, chunk, tiles, decay, precision="sign", error="drop", delay=delay, link=link)
    return replace(momentum, name="distro", arguments=_only(momentum.arguments, "topk chunk tiles decay delay link"))


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
        Codec(basis, selection, precision_of(arguments["precision"])),
        Feedback(arguments["decay"], arguments["alpha"], arguments["error"]),
        combine_of(arguments["combine"]),
        Round(delay=whole("delay", arguments["delay"])),
        lookahead=arguments["lookahead"] and arguments["delay"] > 0,
        link=arguments["link"],
        arguments=arguments,
    )
