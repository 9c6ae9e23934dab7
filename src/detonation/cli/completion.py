"""Completion scripts for shells: tyro's, which know every verb and flag, with file names where nothing else fits."""

import contextlib
import io
import re
from typing import Any

import tyro

_CHANGES = {
    "bash": (
        ('COMPREPLY=("${matches[@]}")', '[[ -z "$completions" ]] || COMPREPLY=("${matches[@]}")'),
        ("complete -F", "complete -o default -F"),
    ),
    "zsh": (
        ('if [[ "$completions" == "__', 'if [[ -z "$completions" || "$completions" == "__'),
        (
            '_tyro_detonation "$@"',
            'if [[ "${funcstack[1]}" == _detonation ]]; then _tyro_detonation "$@"; '
            "else compdef _tyro_detonation detonation; fi",
        ),  # the script works from fpath and by `source`
    ),
    "fish": (
        (
            "# Also register",
            "complete --command detonation --condition 'test (count (commandline -opc)) -gt 1' --force-files\n"
            "# Also register",
        ),
    ),
}
"""Text of tyro's scripts, and the text in its place, for each shell."""


def completion_script(shell: str, **arguments: Any) -> str:
    """The script that completes `detonation` in a shell.

    Args:
        shell: "bash", "zsh" or "fish".
        arguments: Those of `tyro.cli`, without `args`.

    Raises:
        ValueError: Another shell.
    """
    if shell not in _CHANGES:
        raise ValueError(f"--completion takes {', '.join(_CHANGES)}, not {shell!r}")
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        tyro.cli(**arguments, args=["--tyro-print-completion", shell])
    script = printed.getvalue()
    for old, new in _CHANGES[shell]:
        script = script.replace(old, new)
    # A shell reads one candidate per line, so the text of a flag has none.
    lines = script.splitlines()
    return "\n".join(re.sub(r"\\+n", " ", line) if "COMPLETION_SPEC = {" in line else line for line in lines)
