"""Schemes by name: the only thing that the command line, recipes and the library exchange."""

from collections.abc import Callable, Mapping
from typing import Any

from detonation.choices import make
from detonation.core.schemes.gradients import (
    decoupled_adamw,
    demo,
    distro,
    full,
    none,
    random,
    random_sign,
    slicing,
    striding,
)
from detonation.core.schemes.parameters import (
    demo_diloco,
    diloco,
    eager_diloco,
    local_sgd,
    muloco,
    sparseloco,
    sparta,
    streaming_diloco,
)
from detonation.core.schemes.scheme import Scheme

SCHEMES: dict[str, Callable[..., Scheme]] = {
    "full": full,
    "none": none,
    "demo": demo,
    "decoupled_adamw": decoupled_adamw,
    "demo_diloco": demo_diloco,
    "distro": distro,
    "random": random,
    "random_sign": random_sign,
    "striding": striding,
    "slicing": slicing,
    "diloco": diloco,
    "eager_diloco": eager_diloco,
    "local_sgd": local_sgd,
    "muloco": muloco,
    "sparseloco": sparseloco,
    "sparta": sparta,
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
