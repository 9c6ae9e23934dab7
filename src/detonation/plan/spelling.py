"""Spelling: a scheme in the words of a recipe, as short as it goes."""

from detonation.core.schemes.registry import scheme
from detonation.core.schemes.scheme import Scheme


def spelled(chosen: Scheme) -> str:
    """The scheme with the arguments that differ from its defaults.

    >>> spelled(scheme("demo", {"topk": 1, "chunk": 64}))
    'demo(topk=1)'
    """
    plain = scheme(chosen.name, {}).arguments
    said = ", ".join(f"{name}={_short(value)}" for name, value in chosen.arguments.items() if plain[name] != value)
    return f"{chosen.name}({said})"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
