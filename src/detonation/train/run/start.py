"""The start of a run: checks everything that needs no processes, and after this starts the
processes.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from detonation.checkpoint.gather import Texts
from detonation.cluster.init import LaunchPosition, gpus_for, launch_position, local_device
from detonation.cluster.launch import run_local, run_under_launcher
from detonation.cluster.processes.rendezvous import keep_to_loopback, use_interface
from detonation.cluster.survive.elastic_axis import Survival
from detonation.train.choice.asked import Asked, Auto
from detonation.train.loop.checks import check_config, check_sizes
from detonation.train.loop.world import require_same_command
from detonation.train.output import directory, screen, trackers
from detonation.train.recipe.resolve import Request, from_plain, to_plain
from detonation.train.recipe.schema import Config, MeshConfig, Table
from detonation.train.run.elastic_run import SetUp
from detonation.train.run.joining import RunTask, check_feed, check_place, meeting_of
from detonation.train.run.worker import train_on_rank

_W = TypeVar("_W")


def run_training(request: Request, fail: Callable[[Exception], int]) -> Table:
    """Trains in the processes of a launcher, or starts its own processes; returns the summary.

    Args:
        fail: Prints an error and returns the exit code. Used if another rank is lost while the main
            thread of this rank is blocked and cannot raise the error.

    Raises:
        ValueError: Bad input, before any process starts.
        WorldError: A rank failed.
    """
    place = launch_position(os.environ)
    set_up = SetUp(meeting_of(request), request.replica)
    with set_up.watched():
        return _run(request, fail, place, set_up)


def _run(
    request: Request,
    fail: Callable[[Exception], int],
    place: LaunchPosition | None,
    set_up: SetUp,
) -> Table:
    """Trains as `run_training` describes. Calls `set_up.done` before the work of the ranks, because
    ranks report their own failures.
    """
    if place is None:
        _require_out(request)
        compute_with_one_thread()
        finished = _finished(request, None)
        if finished is not None:
            return finished
        task = make_task(_with_length(request, _length(request, None)), None)
        return run_task(task, set_up)

    def on_this_rank() -> Table:
        # Rank 0 decides for all ranks whether the run resumes: nodes may see different files.
        said: list[Any] = []
        if place.rank == 0:
            said = [
                _finished(request, place),
                restarted(os.environ),
                restartable(os.environ),
                _length(request, place),
            ]
        texts = Texts(local_device())
        finished, again, may_start, length = json.loads(texts.broadcast(json.dumps(said)))
        if finished:
            return dict(finished)
        task = make_task(_with_length(request, length), place)
        require_same_command(texts, task.config, _flags(request, task.config))
        task = replace(task, resume=request.resume or again, may_start=may_start)
        if place.rank == 0 and not request.replica:
            _check_directory(task)
        set_up.done()
        return train_on_rank(task)

    def check() -> None:
        _require_out(request)
        request.layers(place).config()

    return run_under_launcher(place, on_this_rank, fail, check, request.interface)


def _require_out(request: Request) -> None:
    request.check()
    if restartable(os.environ) and request.out is None:
        raise ValueError(
            "a run that its launcher may start again needs --out: the run directory to continue"
        )


def _flags(request: Request, config: Config) -> dict[str, Any]:
    """Returns the flags, by name, that must be equal on all ranks of a launcher, in addition to the
    recipe.
    """
    return {
        "--resume": request.resume,
        "--stop-after": request.stop_after,
        "--out": "given" if request.out else "left out",
        "--elastic": config.mesh.elastic,
        "--replica": request.replica,
        "--join": request.join,
        "--publish": config.train.publish,
    }


def _length(request: Request, place: LaunchPosition | None) -> tuple[str, ...]:
    """Returns assignments, as for `--set`, that fix the length of a run whose recipe has epochs.

    The first start of a run computes its number of steps from the epochs. A resumed run keeps this
    number, even if the number of ranks changes. If steps are set, too, the epochs are set to 0, so
    that a later resume uses these steps.
    """
    train = request.layers(place).config().train
    if train.steps and train.epochs:
        return ("train.epochs=0",)
    if train.steps or request.out is None or not (request.resume or restarted(os.environ)):
        return ()
    if steps := directory.steps_of_epochs(request.out, train):
        return (f"train.steps={steps}",)
    return ()


def _with_length(request: Request, length: Iterable[str]) -> Request:
    return replace(request, overrides=(*request.overrides, *length))


def compute_with_one_thread() -> None:
    """Limits this process to one thread before it forks. A child process has no copies of other
    threads, and would wait for these threads forever.
    """
    torch.set_num_threads(1)


def make_task(request: Request, place: LaunchPosition | None) -> RunTask:
    """Reads the recipe, and checks everything that needs neither processes nor the run directory.

    Raises `ValueError` if the recipe or the flags are not valid.
    """
    layers = request.layers(place)
    config = layers.config()
    auto = Auto.of(config)
    asked = None
    if auto is None:
        config = check_config(config)
        check_sizes(config)
    else:
        asked = Asked(auto, layers)
        config = asked.check()
    source = config.train.init_from
    begins = restartable(os.environ) or not request.resume
    if source and begins and not Path(source).is_dir():
        raise ValueError(
            f"train.init_from is {source!r}, but must be the directory of a run or a model"
        )
    check_place(request, config, place, asked)
    if config.train.publish:
        check_feed(config.train.publish)
    if place is None or place.rank == 0:
        trackers.check_trackers(config.train.loggers)
    resume = request.resume or restarted(os.environ)
    return RunTask(request, config, asked, resume, restartable(os.environ))


def run_task(task: RunTask, set_up: SetUp | None = None) -> Table:
    """Trains on this machine; returns the summary. Calls `set_up.done` before it starts the ranks.

    Raises `ValueError` if the run cannot start in its directory, and `WorldError` if a rank fails.
    """
    if not task.request.replica and not task.request.join:
        _check_directory(task)
    use_interface(os.environ, task.request.interface)
    # All ranks of this process group are on this machine, so the loopback interface is enough.
    # An elastic axis chooses its own network interface.
    keep_to_loopback(os.environ)
    try:
        mesh = task.config.mesh
        # with --replica or --join this command starts only one replica
        if task.request.replica is not None or task.request.join:
            mesh = replace(
                mesh, replicas=task.config.nodes_inside, elastic=False, min_replicas=1, meet=""
            )
        plain = [to_plain(task.request), task.may_start]
        if set_up is not None:
            set_up.done()
        found = on_ranks(train_on_rank, task, train_afresh, plain, mesh, task.config.nodes_inside)
        return dict(next((each for each in found if "left" not in each), found[0]))
    finally:
        screen.clear(task.request.to_stderr)


def train_afresh(request: Table, may_start: bool) -> Table:
    """Trains in a spawned rank. Such a rank inherits no objects from its parent process, so the
    recipe is read again.
    """
    task = make_task(from_plain(Request, request), None)
    return train_on_rank(replace(task, may_start=may_start))


def on_ranks(
    work: Callable[[_W], Any],
    task: _W,
    afresh: Callable[..., Any],
    plain: list[Any],
    mesh: MeshConfig,
    nodes_inside: int = 1,
) -> list[Any]:
    """Runs all ranks of `mesh` on this machine. Returns the result of each rank.

    Args:
        work: Called with `task` on ranks without a GPU, which are forks of this process.
        afresh: Called with `plain` on ranks with a GPU, which are new processes.
        nodes_inside: Nodes of a replica of an elastic run; they are lost together.
    """
    size = sum(mesh.sizes)
    survival = None
    if mesh.elastic:
        survival = Survival(nodes_inside * mesh.shards, mesh.min_replicas, mesh.meet)
    if gpus_for(size):
        return run_local(afresh, size, plain, survival=survival)
    return run_local(work, size, [task], survival=survival)


def is_first() -> bool:
    """True in the process that prints the result: rank 0 of a launcher, or the parent process of
    all ranks.
    """
    place = launch_position(os.environ)
    return place is None or place.rank == 0


def _check_directory(task: RunTask) -> None:
    if task.request.out is not None:
        directory.check_free(task.request.out, task.resume, task.may_start, task.config.train)


def _finished(request: Request, place: LaunchPosition | None) -> Table | None:
    """Returns the summary of a run that finished before its launcher restarted it; None for any
    other run.
    """
    if request.out is None or not restarted(os.environ):
        return None
    summary = request.out / directory.SUMMARY
    if not summary.exists():
        return None
    if directory.steps_finished(request.out) < request.layers(place).config().train.steps:
        return None
    return {**directory.read_json(summary), "directory": str(request.out)}


def restarted(env: Mapping[str, str]) -> bool:
    """True if torchrun or SLURM has restarted the job. Both launchers count restarts in an
    environment variable.
    """
    return _count(env, "TORCHELASTIC_RESTART_COUNT") > 0 or _count(env, "SLURM_RESTART_COUNT") > 0


def restartable(env: Mapping[str, str]) -> bool:
    """True if the launcher may start the same command line again, or has started it again.

    >>> restartable({"TORCHELASTIC_MAX_RESTARTS": "3"})
    True
    >>> restartable({"TORCHELASTIC_MAX_RESTARTS": "0"})
    False
    """
    return _count(env, "TORCHELASTIC_MAX_RESTARTS") > 0 or restarted(env)


def _count(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "0")
    if text.isdigit():
        return int(text)
    return 0
