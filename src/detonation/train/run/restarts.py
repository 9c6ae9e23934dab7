"""Restarts of a run by its launcher after a failure, as torchrun and SLURM note them in the environment."""

from collections.abc import Mapping


def restarted(env: Mapping[str, str]) -> bool:
    """True from the second start on: torchrun counts its restarts, SLURM the times it has queued the job again."""
    return _count(env, "TORCHELASTIC_RESTART_COUNT") > 0 or _count(env, "SLURM_RESTART_COUNT") > 0


def restartable(env: Mapping[str, str]) -> bool:
    """True where another start with the same command line may follow, or has come before.

    >>> restartable({"TORCHELASTIC_MAX_RESTARTS": "3"}), restartable({"TORCHELASTIC_MAX_RESTARTS": "0"})
    (True, False)
    """
    return _count(env, "TORCHELASTIC_MAX_RESTARTS") > 0 or restarted(env)


def _count(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "0")
    return int(text) if text.isdigit() else 0
