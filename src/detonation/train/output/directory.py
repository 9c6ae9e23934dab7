"""The run directory: its lock, atomic writes of its files, and a description of the software and
the machine.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import time
from contextlib import nullcontext, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import tomli_w

from detonation.cluster.processes.failure import RunError
from detonation.train.recipe.schema import TrainConfig
from detonation.whole_files import (
    PROBE,
    json_text,
    make_directories,
    open_lock,
    parse_toml,
    read_text,
    write_whole,
)
from detonation.whole_files import read_json as read_json

_PACKAGES = (
    "detonation-torch", "torch", "transformers", "safetensors", "numpy", "tyro", "rich", "tomli-w",
    "matplotlib",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Returns the versions of Python and of important packages, the platform, the processors, the
    threads and the GPUs.
    """
    import torch

    return {
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in _PACKAGES},
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def environment_lines(found: dict[str, Any]) -> list[str]:
    """Returns lines that describe the environment (the result of `environment`) for a bug
    report.
    """
    flat = {**found, **found["packages"]}
    del flat["packages"]
    flat["gpus"] = ", ".join(found["gpus"]) or "none"
    return [f"- {key}: {'none' if value is None else value}" for key, value in flat.items()]


_SINGLY = " rounded singly"


def bits_of_steps() -> dict[str, str]:
    """Returns hashes of the weights after three steps of each optimizer, by name of the optimizer.
    The steps start from fixed weights and use fixed gradients.

    If these hashes are equal on two machines, replicas on these machines stay bitwise equal.
    """
    import torch

    from detonation.gates.single_rounding import SingleRounding
    from detonation.train.recipe.optimizers import optimizer_classes

    classes = optimizer_classes()
    optimizers: dict[str, Any] = {
        name: classes[name] for name in ("SignSGD", "SGD", "AdamW", "Muon")
    }
    optimizers["AdamW(fused=True)"] = partial(classes["AdamW"], fused=True)
    contexts: dict[str, Any] = dict.fromkeys(optimizers, nullcontext)
    contexts |= {f"{name}{_SINGLY}": SingleRounding for name in optimizers}
    integers = torch.arange(2**16, dtype=torch.int64) * 2654435761 % 1048573 - 524286
    numbers = integers.float() / 65536
    found = {}
    for name, context in contexts.items():
        weight = torch.nn.Parameter(numbers.view(256, 256).clone())
        optimizer = optimizers[name.removesuffix(_SINGLY)]([weight], lr=1e-3)
        for scale in (1.0, 0.7, 0.3):
            weight.grad = numbers.flip(0).view(256, 256) * scale
            with context():
                optimizer.step()
        content = bytes(weight.detach().view(torch.uint8).view(-1).tolist())
        found[name] = hashlib.sha256(content).hexdigest()[:16]
    return found


def compare_machines(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """Returns lines that say how the environments of two machines differ, and whether the machines
    can train together.

    Each environment holds the result of `bits_of_steps` under "steps".
    """
    mine = {**here, **here["packages"]}
    theirs = {**there, **there["packages"]}
    own = here["steps"]
    other = there["steps"]
    lines = [
        f"- {key}: {mine.get(key)} here, {theirs.get(key)} there"
        for key in mine.keys() - {"packages", "steps"}
        if mine.get(key) != theirs.get(key)
    ]
    different = [key for key in ("torch", "detonation-torch") if mine.get(key) != theirs.get(key)]
    if bool(here["gpus"]) != bool(there["gpus"]):
        different.append("GPUs")
    if different:
        return [
            *sorted(lines),
            (
                f"They will not train together, because these differ: {', '.join(different)}. Make"
                " them equal."
            ),
        ]
    same = [name for name in own if own[name] == other.get(name)]
    names = [name for name in own if not name.endswith(_SINGLY)]
    alike = [name for name in names if name in same]
    slower = [name for name in names if name not in same and name + _SINGLY in same]
    rest = [name for name in names if name not in same and name not in slower]
    scope = "bit for bit"
    if here["gpus"]:
        scope = "on their CPUs; the first step compares their GPUs"
    last = (
        f"If a scheme exchanges gradients, replicas stay equal with {', '.join(alike) or 'none'}"
        f" ({scope})"
    )
    if slower:
        last += f"; with {', '.join(slower)}, too, in slower steps"
    if rest:
        last += f"; close, but not equal, with {', '.join(rest)}"
    return [
        *sorted(lines),
        f"{last}.",
        "If a scheme has rounds (diloco, ...), any optimizer works.",
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_log = logging.getLogger("detonation")

LOCK = ".lock"
CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
PLAN = "plan.json"
UPDATES = "updates"
CHECKPOINTS = "checkpoints"
DIVERGED = "diverged"
"""Folder of the state before a loss that was not finite. No run resumes from it."""
_PROBE_BYTES = 65536


class InUse(ValueError):
    """Another process already writes to the run directory."""


def log_starts(path: Path) -> list[int]:
    """Returns the steps at which the files of the run's update log begin. The names of the files
    contain these steps.

    A new file begins after each checkpoint.
    """
    files = (path / UPDATES).glob("*-*.updates")
    steps = [file.stem.rpartition("-")[2] for file in files]
    return [int(step) for step in steps if step.isdecimal()]


def check_free(
    path: Path, resume: bool, may_start: bool = False, train: TrainConfig | None = None
) -> None:
    """Raises `ValueError` if no run can start in `path`. With `resume`, raises `ValueError` if the
    run in `path` cannot continue.

    Changes no files.

    Args:
        may_start: With `resume`, a run without a checkpoint may start from the beginning.
        train: With `resume`, a finished run may continue if `train` has more steps, and a run
            without a checkpoint may continue from its log if `train` keeps one.
    """
    _require_directory(path)
    entries = []
    if path.is_dir():
        entries = [entry.name for entry in path.iterdir()]
    # Check the lock after listing files: a process locks a directory before it creates files.
    _require_unlocked(path)
    held = [
        name
        for name in entries
        if name not in (LOCK, f"{CONFIG}.part") and not name.startswith(PROBE)
    ]
    _require_unfinished(path, resume, train)
    saved = (path / CHECKPOINTS).is_dir()
    logged = 0 in log_starts(path)
    if resume and not (may_start or saved or (logged and train and train.log_updates)):
        remedy = "leave --resume out to start"
        if held:
            remedy = "remove it, or choose another --out"
        if logged:
            remedy = "add --log to continue from its log of updates"
        raise ValueError(f"nothing to resume in {path}, which has no checkpoints; {remedy}")
    if held:
        _require_own_run(path, resume, saved or logged)


def _require_directory(path: Path) -> None:
    """Raises `ValueError` if `path` is a file, a symbolic link without a target, or an impossible
    name.
    """
    try:
        path.exists()
    except OSError as error:
        raise ValueError(
            f"the run directory {str(path)!r} cannot be opened: {error.strerror}; choose another"
            " --out"
        ) from error
    if path.exists() and not path.is_dir():
        raise ValueError(f"the run directory {str(path)!r} is a file: choose another --out")
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"the run directory {str(path)!r} is a symbolic link without a target: create the"
            " target, or choose another --out"
        )


def _require_unlocked(path: Path) -> None:
    """Raises `InUse` if another process holds the lock of the run directory `path`."""
    if not (path / LOCK).exists():
        return
    try:
        with open_lock(path / LOCK) as file:
            _take(file, path)
    except OSError as error:
        raise unwritable(path / LOCK, error) from error


def _require_unfinished(path: Path, resume: bool, train: TrainConfig | None) -> None:
    """Raises `ValueError` if the run in `path` is finished, unless the run resumes and `train` asks
    for more steps.
    """
    finished = steps_finished(path)
    if not (path / SUMMARY).exists() or (resume and train and train.steps > finished):
        return
    more = f"its {SUMMARY} is damaged, and --resume writes it anew"
    if finished:
        more = f"give --resume and more --steps than {finished} to continue it"
    raise ValueError(
        f"run directory {path} holds a finished run: choose another --out, or remove it; {more}"
    )


def _require_own_run(path: Path, resume: bool, saved: bool) -> None:
    """Raises `ValueError` unless the files in `path` belong to a run and `resume` asks to continue
    this run.
    """
    ours = saved or (path / CONFIG).exists()
    if resume and ours:
        return
    remedy = "choose"
    if ours:
        remedy = "remove it, or choose"
    if saved:
        remedy = "continue it with --resume, or choose"
    raise ValueError(f"run directory {path} is not empty: {remedy} another --out")


def steps_finished(path: Path) -> int:
    """Returns the number of steps of the finished run in `path`; 0 if its summary does not contain
    this number.
    """
    try:
        return _integer(read_json(path / SUMMARY)["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def steps_of_epochs(path: Path, train: TrainConfig) -> int:
    """Returns the number of steps in `train.epochs` epochs, as computed when the run in `path`
    began; 0 if this number was not saved, or if `train` has other epochs or batches.
    """
    saved = config_in(path).get("train")
    same = ("epochs", "batch_size", "accumulate")
    if not isinstance(saved, dict) or any(saved.get(key) != getattr(train, key) for key in same):
        return 0
    return _integer(saved.get("steps"))


def _integer(value: object) -> int:
    if type(value) is int:
        return value
    return 0


def config_in(path: Path) -> dict[str, Any]:
    """Returns the configuration with which the run in `path` last started, as a table; {} if the
    configuration cannot be read.
    """
    try:
        return parse_toml(read_text(path / CONFIG))
    except (OSError, ValueError):
        return {}


def fresh_directory(name: str) -> Path:
    """Creates a new directory in `runs`. If several runs start at the same time, each gets its own
    directory.
    """
    now = time.time()
    name = name.replace(":", ".")
    while True:
        path = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
        try:
            make_directories(path, exist_ok=False)
            return path
        except FileExistsError:
            now += 1
        except OSError as error:
            raise unwritable(path, error) from error


class RunDirectory:
    """Creates the directory of a run, and locks the directory until `close` or the end of the
    process.

    Raises `InUse` if another process holds the lock, and `Unwritable` if the directory cannot be
    written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            make_directories(path)
            _refuse_links(path)
            self._lock = open_lock(path / LOCK)
            _take(self._lock, path)
        except OSError as error:
            raise unwritable(path, error) from error
        except InUse:
            self._lock.close()
            raise
        owner = {"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._lock.truncate(0)
        self._lock.write(json.dumps(owner))
        self._lock.flush()

    def close(self) -> None:
        self._lock.close()


def _refuse_links(path: Path) -> None:
    """Raises `ValueError` if one of the folders in which a run writes and removes files is a
    symbolic link.
    """
    for folder in (path / CHECKPOINTS, path / DIVERGED, path / UPDATES):
        if folder.is_symlink():
            raise ValueError(
                f"{folder} is a link to {folder.readlink()}, but a run writes only in its own"
                f" directory: make {path} itself the link, or choose another --out"
            )


def require_writable(path: Path) -> None:
    """Creates the directory `path`. Raises `Unwritable` if no file can be written there, for
    example because the disk is full.
    """
    probe = path / f"{PROBE}{os.getpid()}"
    try:
        make_directories(path)
        write_whole(probe, bytes(_PROBE_BYTES))
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        probe.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes `text` to the file `path` atomically: readers see the old or the new text."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise unwritable(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Writes `value` to `path` as indented JSON, atomically."""
    write_text(path, json_text(value, indent=2) + "\n")


class Unwritable(RunError):
    """A file of the run cannot be written, for example because the disk is full."""


def unwritable(path: Path, error: Exception) -> Unwritable:
    """Returns an error for a file that cannot be written. Its message is one line with the
    remedy.
    """
    remedy = f"{remedy_of(error)}; everything written earlier is complete"
    return Unwritable(
        f"cannot write {path}: {getattr(error, 'strerror', None) or error} ({remedy})"
    )


def remedy_of(error: Exception) -> str:
    """Returns a text that says what a user can do about an error in writing a file."""
    number = getattr(error, "errno", None)
    if number in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    if number == errno.EROFS:
        return "mount the disk with write access, or choose another --out"
    if number == errno.ENOENT:
        return "do not remove the directory of a run that trains, or choose another --out"
    if number in (errno.EACCES, errno.EPERM):
        return "give this user write permission, or choose another --out"
    if number in (errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.EISDIR):
        return "remove that entry, or choose another --out"
    if number in (errno.ENOTDIR, errno.ENAMETOOLONG):
        return "choose another --out"
    return "free some space or choose another --out"


def begin_run(path: Path, config: dict[str, Any], plan: Any = None) -> None:
    """Writes the configuration, the environment and, if given, the plan of a run. Removes the
    summary of an earlier start.
    """
    write_text(path / CONFIG, tomli_w.dumps(config))
    write_json(path / ENVIRONMENT, environment())
    (path / SUMMARY).unlink(missing_ok=True)
    if plan is not None:
        write_json(path / PLAN, plan)


def _take(file: IO[str], path: Path) -> None:
    """Locks `file`, the lock of the run directory `path`. Raises `InUse` if another process holds
    this lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        who = "another process"
        # `file` may be incomplete, because the process with the lock may still write it
        with suppress(ValueError, LookupError, TypeError):
            owner = json.loads(file.read())
            who = f"process {owner['pid']} since {owner['since']}"
        raise InUse(
            f"run directory {path} is in use by {who}: wait for it, or choose another --out"
        ) from error
    except OSError as error:  # some file systems have no locks
        _log.warning(
            "%s cannot be locked (%s): let no other process write into it", path, error.strerror
        )
