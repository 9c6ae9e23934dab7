"""The run directory: its lock, files that are written whole or not at all, and the environment of
the run."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import time
import tomllib
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import tomli_w

from detonation.cluster.processes.failure import RunError
from detonation.train.recipe.schema import TrainConfig
from detonation.whole_files import open_lock, read_text, write_whole
from detonation.whole_files import read_json as read_json

_PACKAGES = (
    "detonation-torch", "torch", "transformers", "safetensors", "numpy", "tyro", "rich", "tomli-w", "matplotlib",
)  # fmt: skip


def environment() -> dict[str, Any]:
    """Versions of Python and the packages that matter, platform, processors, threads and GPUs."""
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
    """The environment as lines to paste into a bug report."""
    flat = {**found, **found["packages"]}
    del flat["packages"]
    flat["gpus"] = ", ".join(found["gpus"]) or "none"
    return [f"- {key}: {'none' if value is None else value}" for key, value in flat.items()]


_SINGLY = " rounded singly"


def bits_of_steps() -> dict[str, str]:
    """A hash of three steps of each optimizer on fixed numbers, by name: what rounds alike trains
    replicas together."""
    import torch

    from detonation.gates.single_rounding import SingleRounding
    from detonation.train.recipe.optimizers import optimizer_classes

    classes = optimizer_classes()
    optimizers: dict[str, Any] = {
        name: classes[name] for name in ("SignSGD", "SGD", "AdamW", "Muon")
    }
    optimizers["AdamW(fused=True)"] = partial(classes["AdamW"], fused=True)
    contexts = dict.fromkeys(optimizers, nullcontext) | {
        f"{name}{_SINGLY}": SingleRounding for name in optimizers
    }
    numbers = (
        torch.arange(2**16, dtype=torch.int64) * 2654435761 % 1048573 - 524286
    ).float() / 65536
    found = {}
    for name, context in contexts.items():
        weight = torch.nn.Parameter(numbers.view(256, 256).clone())
        optimizer = optimizers[name.removesuffix(_SINGLY)]([weight], lr=1e-3)
        for scale in (1.0, 0.7, 0.3):
            weight.grad = numbers.flip(0).view(256, 256) * scale
            with context():
                optimizer.step()
        found[name] = hashlib.sha256(
            bytes(weight.detach().view(torch.uint8).view(-1).tolist())
        ).hexdigest()[:16]
    return found


def compare_machines(here: dict[str, Any], there: dict[str, Any]) -> list[str]:
    """Differences between the environments of two machines, with their `bits_of_steps`, and what to
    expect of them."""
    mine, theirs = ({**found, **found["packages"]} for found in (here, there))
    own, other = here["steps"], there["steps"]
    lines = [
        f"- {key}: {mine.get(key)} here, {theirs.get(key)} there"
        for key in mine.keys() - {"packages", "steps"}
        if mine.get(key) != theirs.get(key)
    ]
    kinds = [bool(found["gpus"]) for found in (here, there)]
    odd = [key for key in ("torch", "detonation-torch") if mine.get(key) != theirs.get(key)]
    if odd or len({*kinds}) > 1:
        what = [*odd, *["GPUs"] * (kinds[0] != kinds[1])]
        return [
            *sorted(lines),
            f"They will not train together: other {', '.join(what)}. Make these alike.",
        ]
    same = [name for name in own if own[name] == other.get(name)]
    names = [name for name in own if not name.endswith(_SINGLY)]
    alike = [name for name in names if name in same]
    slower = [name for name in names if name not in same and name + _SINGLY in same]
    rest = [name for name in names if name not in same and name not in slower]
    scope = "on their CPUs; the first step compares their GPUs" if any(kinds) else "bit for bit"
    last = (
        f"Under schemes of gradients they will train alike with {', '.join(alike) or 'none'}"
        f" ({scope})"
    )
    last += f"; with {', '.join(slower)} in steps that take longer" if slower else ""
    last += f"; closely, not alike, with {', '.join(rest)}" if rest else ""
    return [
        *sorted(lines),
        f"{last}.",
        "Under schemes of rounds (diloco, ...) any optimizer will do.",
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
_PROBE = ".volume-"  # of a start that was killed while it looked who sees the directory
_PROBE_BYTES = 65536


class InUse(ValueError):
    """Another process writes to the run directory."""


def log_starts(path: Path) -> list[int]:
    """The steps after which files of the run's log begin, by their names, as one does with each
    checkpoint."""
    return [
        int(n)
        for each in (path / UPDATES).glob("*-*.updates")
        if (n := each.stem.rpartition("-")[2]).isdecimal()
    ]


def check_free(
    path: Path, resume: bool, may_start: bool = False, train: TrainConfig | None = None
) -> None:
    """Raises `ValueError` unless a run can start in `path`, or continue there with `resume`.
    Changes nothing.

    may_start: with `resume`, a run may start from the beginning where no checkpoint was saved yet.
    train: with `resume`, a finished run of fewer steps goes on, and one that keeps a log from its
    first step alone.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"the run directory {str(path)!r} is a file: choose another --out")
    if path.is_symlink() and not path.exists():
        raise ValueError(
            f"the run directory {str(path)!r} is a link to nowhere: make its target, or choose"
            " another --out"
        )
    entries = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    if (
        path / LOCK
    ).exists():  # looked at last: whoever made these entries and still runs has it by now
        try:
            with open_lock(path / LOCK) as file:
                _take(file, path)
        except OSError as error:
            raise unwritable(path / LOCK, error) from error
    held = [
        name
        for name in entries
        if name not in (LOCK, f"{CONFIG}.part") and not name.startswith(_PROBE)
    ]
    finished = steps_finished(path)
    if (path / SUMMARY).exists() and not (resume and train and train.steps > finished):
        more = f"with --resume and more --steps than {finished} it goes on"
        more = more if finished else f"its {SUMMARY} is damaged, and --resume writes it anew"
        raise ValueError(
            f"run directory {path} holds a finished run: choose another --out, or remove it; {more}"
        )
    saved, logged = (path / CHECKPOINTS).is_dir(), 0 in log_starts(path)
    if resume and not (may_start or saved or (logged and train and train.log_updates)):
        remedy = "remove it, or choose another --out" if held else "leave --resume out to start"
        remedy = "add --log, to go on from its log of updates" if logged else remedy
        raise ValueError(f"nothing to resume in {path}: it has no checkpoints; {remedy}")
    saved |= logged
    ours = (path / CONFIG).exists() or saved
    if held and not (resume and ours):
        remedy = (
            "continue it with --resume, or choose"
            if saved
            else "remove it, or choose"
            if ours
            else "choose"
        )
        raise ValueError(f"run directory {path} is not empty: {remedy} another --out")


def steps_finished(path: Path) -> int:
    """The number of steps of the finished run in `path`; 0 where its summary says none."""
    try:
        found = read_json(path / SUMMARY)["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return found if type(found) is int else 0


def steps_of_epochs(path: Path, epochs: float) -> int:
    """The number of steps that so many epochs took when the run in `path` began; 0 where it says
    none."""
    train = config_in(path).get("train")
    steps = train.get("steps") if isinstance(train, dict) and train.get("epochs") == epochs else 0
    return steps if type(steps) is int else 0


def config_in(path: Path) -> dict[str, Any]:
    """The configuration with which the run in `path` began or went on, as a table; {} where it
    cannot be read."""
    try:
        return tomllib.loads(read_text(path / CONFIG))
    except (OSError, ValueError):
        return {}


def fresh_directory(name: str) -> Path:
    """A directory in `runs` that was not there before, so that runs that start at once get one
    each."""
    now, name = time.time(), name.replace(":", ".")
    while True:
        path = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            now += 1
        except OSError as error:
            raise unwritable(path, error) from error


class RunDirectory:
    """A run's files. Makes the directory and holds its lock until closed, or until the process
    ends, however it ends.

    Raises `InUse` when another process holds the lock, and `Unwritable`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            _refuse_links(path)
            self._lock = open_lock(path / LOCK)
            _take(self._lock, path)
        except OSError as error:
            raise unwritable(path, error) from error
        except InUse:
            self._lock.close()
            raise
        self._lock.truncate(0)
        self._lock.write(
            json.dumps({"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")})
        )
        self._lock.flush()

    def close(self) -> None:
        self._lock.close()


def _refuse_links(path: Path) -> None:
    """Raises `ValueError` where a folder in which a run writes and removes is a link."""
    for folder in (path / CHECKPOINTS, path / UPDATES):
        if folder.is_symlink():
            raise ValueError(
                f"{folder} is a link to {folder.readlink()}, and a run writes in its own directory "
                f"alone: make {path} itself the link, or choose another --out"
            )


def require_writable(path: Path) -> None:
    """Raises `Unwritable` where no file can be written in `path`, which is made, or the disk is
    full."""
    probe = path / f"{_PROBE}{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_whole(probe, bytes(_PROBE_BYTES))
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        probe.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Puts `text` at `path`, whole or not at all."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise unwritable(path, error) from error


def write_json(path: Path, value: Any) -> None:
    """Puts `value` at `path` as readable JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


class Unwritable(RunError):
    """The disk is full, or the directory may not be written to."""


def unwritable(path: Path, error: Exception) -> Unwritable:
    """The error for a file that cannot be written, in one line with the remedy."""
    remedy = f"{remedy_of(error)}; what was written before is whole"
    return Unwritable(
        f"cannot write {path}: {getattr(error, 'strerror', None) or error} ({remedy})"
    )


def remedy_of(error: Exception) -> str:
    """What to do where a file of a run cannot be written, by the error of the system."""
    number = getattr(error, "errno", None)
    if number in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    if number == errno.EROFS:
        return "mount the disk to be written to, or choose another --out"
    if number == errno.ENOENT:
        return "leave the directory of a run that trains, or choose another --out"
    if number in (errno.EACCES, errno.EPERM):
        return "make it yours to write, or choose another --out"
    if number in (errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.EISDIR):
        return "remove that entry, or choose another --out"
    return "free some space or choose another --out"


def begin_run(path: Path, config: dict[str, Any], environment: Any, plan: Any) -> None:
    """Writes what a run begins with, or goes on with, whose summary is gone then; no plan for None."""
    write_text(path / CONFIG, tomli_w.dumps(config))
    write_json(path / ENVIRONMENT, environment)
    (path / SUMMARY).unlink(missing_ok=True)
    if plan is not None:
        write_json(path / PLAN, plan)


def _take(file: IO[str], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        owner = json.loads(file.read() or "{}")
        who = (
            f"process {owner['pid']} since {owner['since']}"
            if "pid" in owner
            else "another process"
        )
        raise InUse(
            f"run directory {path} is in use by {who}: wait for it, or choose another --out"
        ) from error
    except OSError as error:  # a file system without locks
        _log.warning(
            "%s cannot be locked (%s): let no other process write into it", path, error.strerror
        )
