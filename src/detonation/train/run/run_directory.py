"""The run directory on each node, and the records of earlier starts in it."""

import contextlib
import platform
from collections.abc import Iterator
from pathlib import Path

from detonation.checkpoint.gather import Volumes, survey
from detonation.core.link.elastic_communicator import PeerLost, TextExchange
from detonation.train.loop.session import Session
from detonation.train.output import directory, metrics
from detonation.train.recipe.resolve import Request
from detonation.whole_files import MOST_RECORDS, read_text


@contextlib.contextmanager
def run_directory(
    session: Session, request: Request, resume: bool, may_start: bool
) -> Iterator[tuple[Path, Volumes]]:
    """Locks the run's directory on this node; yields its path and the ranks that share it.

    Nodes without a shared file system each have a directory: of the same name, or their own --out.
    One rank of each node creates and locks it.
    """
    texts = session.world.texts()
    path = request.out or Path()
    with contextlib.ExitStack() as held:
        if session.rank == 0:
            name = f"{request.recipe.stem}-{session.config.schemes}"
            path = request.out or directory.fresh_directory(name)
            directory.check_free(path, resume, may_start, session.config.train)
            held.enter_context(contextlib.closing(directory.RunDirectory(path)))
        if request.out is None:
            path = Path(texts.broadcast(str(path)))
        volumes = _surveyed(path, texts)
        problem = ""
        if session.rank and volumes.leads(session.rank):
            problem = _hold_on_node(held, path, resume)
        if not volumes.shared:
            first = next(filter(None, texts.gather(problem)), "")
            if first:
                raise ValueError(first)
        yield path, volumes


def _surveyed(path: Path, texts: TextExchange) -> Volumes:
    """Finds the ranks that share the directory. Collective.

    Raises `Unwritable` if a rank cannot write into it.
    """
    try:
        return survey(path, texts)
    except PeerLost:
        raise
    except OSError as error:
        raise directory.Unwritable(
            f"cannot write into the run directory: {error.strerror}"
        ) from error


def _hold_on_node(held: contextlib.ExitStack, path: Path, resume: bool) -> str:
    """Creates and locks the directory of a node without rank 0; returns an error message or ""."""
    try:
        # may_start: the checkpoints may be on another node
        directory.check_free(path, resume, may_start=True)
        held.enter_context(contextlib.closing(directory.RunDirectory(path)))
    except ValueError as error:
        return f"{error} (on {platform.node()})"
    return ""


def kept_records(
    session: Session, file: Path, done: int, volumes: Volumes
) -> tuple[list[metrics.Record], list[str]]:
    """Records of the first `done` steps, on all ranks, and warnings about lost records. Collective.

    Raises `ValueError` if no step is left to train and the records give no summary.
    """
    if not done:
        return [], []
    reads = (volumes.shared or session.rank == 0) and file.exists()
    text = ""
    if reads:
        text = read_text(file, errors="replace", most=MOST_RECORDS)
    if volumes.shared:
        session.world.texts().gather("")  # all ranks have read before rank 0 writes
    else:
        text = session.world.texts().broadcast(text)
    found, damaged = metrics.parse_metrics(text)
    kept = [record for record in found if record.step <= done]
    said = []
    if damaged:
        said = [f"damaged lines in {file}, which are dropped: {damaged}"]
    if not kept and done == session.config.train.steps:
        raise ValueError(f"all {done} steps have been taken, but {file} has no record of them")
    if kept and done == session.config.train.steps and kept[-1].val_loss is None:
        raise ValueError(
            f"the run stopped at step {done}, before its end and without validation: give more"
            " --steps"
        )
    if not kept:
        said += [
            f"{file} has none of the {done} steps before: the summary will be of those that follow"
        ]
    return kept, said
