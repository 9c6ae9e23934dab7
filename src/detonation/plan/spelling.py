"""A scheme as short text, for tables, logs and as a key."""

from detonation.core.schemes.registry import scheme
from detonation.core.schemes.scheme import Scheme


def spelled(chosen: Scheme) -> str:
    """Writes a scheme with the arguments that differ from its defaults.

    Example:
        >>> spelled(scheme("demo", {"topk": 1, "chunk": 64}))
        'demo(topk=1)'
    """
    defaults = scheme(chosen.name, {}).arguments
    changed = {name: value for name, value in chosen.arguments.items() if value != defaults[name]}
    return f"{chosen.name}({', '.join(f'{name}={_short(value)}' for name, value in changed.items())})"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
