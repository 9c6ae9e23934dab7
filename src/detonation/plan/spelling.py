"""A scheme as short text, for tables, logs and as a key."""

from detonation.core.schemes.registry import scheme
from detonation.core.schemes.scheme import Scheme


def spelled(chosen: Scheme) -> str:
    """Writes a scheme with the arguments that differ from its defaults.

    Example:
        >>> spelled(scheme("demo", {"topk": 1, "chunk": 64}))
        'demo(topk=1)'
    """
    return f"{chosen.name}({', '.join(f'{name}={_short(value)}' for name, value in changed(chosen).items())})"


def changed(chosen: Scheme) -> dict[str, object]:
    """The arguments that differ from the scheme's defaults.

    Example:
        >>> changed(scheme("demo", {"topk": 1, "chunk": 64}))
        {'topk': 1}
    """
    defaults = scheme(chosen.name, {}).arguments
    return {name: value for name, value in chosen.arguments.items() if value != defaults[name]}


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
