"""The start of a run: everything that can be checked is checked, then the processes start."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from detonation.checkpoint.gather import Texts
from detonation.cluster.init import LaunchPosition, gpus_for, launch_position, local_device
from detonation.cluster.launch import run_local, run_under_launcher
from detonation.cluster.processes.rendezvous import keep_to_loopback, use_interface
from detonation.cluster.survive.elastic_axis import Survival
from detonation.feed.frames import host_and_port
from detonation.feed.token import read_token
from detonation.train.loop.session import check_config, check_sizes
from detonation.train.loop.world import require_same_command
from detonation.train.output import directory, trackers
from detonation.train.output.screen import clear
from detonation.train.recipe.resolve import Request, from_plain, to_plain
from detonation.train.recipe.schema import Config, MeshConfig, Table
from detonation.train.run.decide import Asked, Auto
from detonation.train.run.elastic_run import SetUp, check_place, meeting_of
from detonation.train.run.worker import RunTask, train_on_rank

_W = TypeVar("_W")


def run_training(request: Request, fail: Callable[[Exception], int]) -> Table:
    """Trains in the world that a launcher started, or in one of its own; returns the summary.

    Where the main thread of a rank waits for a lost one, `fail` shows the error and returns the
    exit code.

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
    """`run_training`; `set_up` is done where the ranks tell by themselves what they cannot do."""
    if restartable(os.environ) and request.out is None:
        raise ValueError(
            "a run that its launcher may start again needs --out: the run directory to continue"
        )
    if place is None:
        compute_with_one_thread()
        finished = _finished(request, None)
        if finished is not None:
            return finished
        task = make_task(_with_steps(request, _steps_begun(request, None)), None)
        return run_task(task, set_up)

    def on_this_rank() -> Table:
        # what launcher and directory say on rank 0 counts: nodes may be restarted apart, and share
        # no file system
        said: list[Any] = []
        if place.rank == 0:
            environment = (restarted(os.environ), restartable(os.environ))
            said = [_finished(request, place), *environment, _steps_begun(request, place)]
        texts = Texts(local_device())
        finished, again, may_start, steps = json.loads(texts.broadcast(json.dumps(said)))
        if finished:
            return dict(finished)
        task = make_task(_with_steps(request, steps), place)
        require_same_command(texts, task.config, _flags(request, task.config))
        task = replace(task, resume=request.resume or again, may_start=may_start)
        if place.rank == 0 and not request.replica:
            _check_directory(task)
        set_up.done()
        return train_on_rank(task)

    return run_under_launcher(
        place, on_this_rank, fail, lambda: request.layers(place).config(), request.interface
    )


def _flags(request: Request, config: Config) -> dict[str, Any]:
    """What else all ranks of a launcher must have alike, by the names of flags."""
    return {
        "--resume": request.resume,
        "--stop-after": request.stop_after,
        "--out": "given" if request.out else "left out",
        "--elastic": config.mesh.elastic,
        "--replica": request.replica,
        "--join": request.join,
        "--publish": config.train.publish,
    }


def _steps_begun(request: Request, place: LaunchPosition | None) -> int:
    """The steps that the epochs of a resumed run took at its start: a world of another size keeps
    them.

    0 for a run that begins, and where the recipe says how many steps.
    """
    if request.out is None or not (request.resume or restarted(os.environ)):
        return 0
    train = request.layers(place).config().train
    return 0 if train.steps else directory.steps_of_epochs(request.out, train.epochs)


def _with_steps(request: Request, steps: int) -> Request:
    return (
        replace(request, overrides=(*request.overrides, f"train.steps={steps}"))
        if steps
        else request
    )


def compute_with_one_thread() -> None:
    """Makes this process fit to be forked: a fork of one with several threads would wait for those
    it lacks."""
    torch.set_num_threads(1)


def make_task(request: Request, place: LaunchPosition | None) -> RunTask:
    """Reads the recipe once, and checks everything that needs neither processes nor the run
    directory.

    Raises `ValueError` for bad input.
    """
    layers = request.layers(place)
    config = layers.config()
    auto = Auto.of(config)
    asked = None if auto is None else Asked(auto, layers)
    config = check_config(config) if asked is None else asked.check()
    if asked is None:
        check_sizes(config)
    begins = restartable(os.environ) or not request.resume
    if (source := config.train.init_from) and begins and not Path(source).is_dir():
        raise ValueError(
            f"train.init_from is {source!r}, but must be the directory of a run or a model"
        )
    check_place(request, config, place, asked)
    if place is None or place.rank == 0:
        trackers.check_trackers(config.train.loggers)
    if config.train.publish:
        host_and_port(config.train.publish)
        read_token()
    return RunTask(
        request, config, asked, request.resume or restarted(os.environ), restartable(os.environ)
    )


def run_task(task: RunTask, set_up: SetUp | None = None) -> Table:
    """Trains in a world on this machine; returns the summary. `set_up` is done once the ranks
    begin.

    Raises `ValueError` where the run cannot start in its directory, and `WorldError` when a rank
    fails.
    """
    if not task.request.replica and not task.request.join:
        _check_directory(task)
    use_interface(os.environ, task.request.interface)
    keep_to_loopback(os.environ)  # between the ranks here; an elastic axis finds its own way
    try:
        mesh = task.config.mesh
        if (
            task.request.replica is not None or task.request.join
        ):  # this machine has one replica of them
            mesh = replace(
                mesh, replicas=task.config.nodes_inside, elastic=False, min_replicas=1, meet=""
            )
        afresh = [to_plain(task.request), task.may_start]
        if set_up is not None:
            set_up.done()
        found = on_ranks(train_on_rank, task, train_afresh, afresh, mesh, task.config.nodes_inside)
        return dict(next((each for each in found if "left" not in each), found[0]))
    finally:
        clear(task.request.to_stderr)


def train_afresh(request: Table, may_start: bool) -> Table:
    """Trains on a rank that shares no memory with the process that started it: it reads the recipe
    by itself."""
    task = make_task(from_plain(Request, request), None)  # the world is that of the recipe
    return train_on_rank(replace(task, may_start=may_start))


def on_ranks(
    work: Callable[[_W], Any],
    task: _W,
    afresh: Callable[..., Any],
    plain: list[Any],
    mesh: MeshConfig,
    nodes_inside: int = 1,
) -> list[Any]:
    """The results of each rank of a world on this machine, of which an elastic run loses
    `nodes_inside` together.

    Ranks on CPU are forks, and do `work(task)` on the task in memory. Ranks with a GPU each start
    afresh: they do `afresh(*plain)`, with the request in plain values.
    """
    size = sum(mesh.sizes)
    survival = (
        Survival(nodes_inside * mesh.shards, mesh.min_replicas, mesh.meet) if mesh.elastic else None
    )
    if gpus_for(size):
        return run_local(afresh, size, plain, survival=survival)
    return run_local(work, size, [task], survival=survival)


def is_first() -> bool:
    """True on the process that reports the result: rank 0 under a launcher, or the one that started
    the ranks."""
    place = launch_position(os.environ)
    return place is None or place.rank == 0


def _check_directory(task: RunTask) -> None:
    if task.request.out is not None:
        directory.check_free(task.request.out, task.resume, task.may_start, task.config.train)


def _finished(request: Request, place: LaunchPosition | None) -> Table | None:
    """The summary of a run that had finished when its launcher started it again."""
    if (
        request.out is None
        or not restarted(os.environ)
        or not (request.out / directory.SUMMARY).exists()
    ):
        return None
    if directory.steps_finished(request.out) < request.layers(place).config().train.steps:
        return None
    return {**directory.read_json(request.out / directory.SUMMARY), "directory": str(request.out)}


def restarted(env: Mapping[str, str]) -> bool:
    """True from the second start on: torchrun counts its restarts, SLURM the times it has queued
    the job again."""
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
