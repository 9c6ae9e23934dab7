"""Makes Trainer and Accelerate resume from the newest complete checkpoint.

Without this module these libraries would load the checkpoint with the highest number, even if
saving this checkpoint was interrupted.
"""

import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from detonation.checkpoint.files.retention import saved_checkpoints
from detonation.checkpoint.gather import Texts

_log = logging.getLogger("detonation")
_NUMBER = re.compile(r"[0-9]+$")
_FOLDER = re.compile(r"checkpoint_[0-9]+")
"""Pattern of the folder names that Accelerate chooses."""


def skip_checkpoints(name: re.Pattern[str], part: str) -> None:
    """Makes `train(resume_from_checkpoint=True)` skip incomplete checkpoints.

    A constructor of a Trainer calls this function, directly or through a callback. The function
    finds this Trainer on the call stack, and replaces the Trainer's method `train`. Without a
    Trainer the function does nothing.

    Args:
        name: Pattern of the names of the Trainer's checkpoints.
        part: Name of this library's directory in each checkpoint.
    """
    trainer = _trainer_above()
    if trainer is None:
        return
    train = trainer.train
    files = ["trainer_state.json"]

    def resumed(resume_from_checkpoint: Any = None, *others: Any, **named: Any) -> Any:
        if resume_from_checkpoint is True:
            folder = Path(trainer.args.output_dir)
            texts = Texts(trainer.args.device)
            found = newest_whole(folder, name, lambda path: lacking(path, part, files), texts)
            if found:
                resume_from_checkpoint = str(found)
        return train(resume_from_checkpoint, *others, **named)

    trainer.train = resumed


def _trainer_above() -> Any:
    """Returns the Trainer whose constructor is among the callers of this function; None if there is
    none. The callers are searched because a Trainer does not pass itself to its callbacks.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if hasattr(frame.f_locals.get("self"), "_get_output_dir"):
            return frame.f_locals["self"]
    return None


def skip_folders(accelerator: Any, part: str) -> None:
    """Makes `accelerator.load_state()` skip incomplete checkpoints, if Accelerate chooses the names
    of checkpoints.
    """
    load_state = accelerator.load_state
    # each rank writes its random state last, so a complete checkpoint has the file of this state
    files = [f"random_states_{accelerator.process_index}.pkl"]

    def load_newest(input_dir: Any = None, *others: Any, **named: Any) -> Any:
        if input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming:
            folder = Path(accelerator.project_dir, "checkpoints")
            texts = Texts(accelerator.device)
            input_dir = newest_whole(
                folder, _FOLDER, lambda path: lacking(path, part, files), texts
            )
        if input_dir is not None:
            input_dir = str(input_dir)
        return load_state(input_dir, *others, **named)

    accelerator.load_state = load_newest


def newest_whole(
    folder: Path, name: re.Pattern[str], lacks: Callable[[Path], str], texts: Texts
) -> Path | None:
    """Returns the newest checkpoint in `folder` that is complete on all ranks; None if there are no
    checkpoints. Collective.

    Rank 0 logs each checkpoint that was skipped.

    Args:
        folder: Folder of checkpoints; it may differ between ranks, or be absent.
        name: Pattern of the names of checkpoints, which end with a number.
        lacks: Returns the name of a missing part of a checkpoint on this rank; "" if it is
            complete.

    Raises:
        ValueError: No checkpoint is complete.
    """
    here: list[Path] = []
    if folder.is_dir():
        here = [*folder.iterdir()]
    mine = {path.name: lacks(path) for path in here if name.fullmatch(path.name)}
    views = [json.loads(text) for text in texts.gather(json.dumps(mine))]
    names = sorted({each for view in views for each in view}, key=_number)
    skipped: list[str] = []
    for each in reversed(names):
        problem = _problem(each, views)
        if not problem:
            _tell(skipped, each, texts)
            return folder / each
        skipped.append(problem)
    if skipped:
        remedy = (
            "its save was cut short; start without a checkpoint, or copy to the node the files"
            " that it lacks"
        )
        raise ValueError(f"no checkpoint in {folder} is whole: {skipped[0]}: {remedy}")
    return None


def _number(name: str) -> int:
    match = _NUMBER.search(name)
    if match:
        return int(match.group())
    return -1


def _problem(name: str, views: Sequence[dict[str, str]]) -> str:
    for rank, view in enumerate(views):
        lack = view.get(name, "everything")
        if lack:
            return f"{name} lacks {lack} on rank {rank}"
    return ""


def _tell(skipped: Sequence[str], taken: str, texts: Texts) -> None:
    if texts.rank:
        return
    for problem in skipped:
        _log.warning("%s: its save was cut short; training goes on from %s", problem, taken)


def lacking(checkpoint: Path, part: str, files: Sequence[str]) -> str:
    """Returns the name of the first missing file of `files` in the directory `checkpoint`. If all
    these files exist, but the folder `part` of `checkpoint` holds no checkpoint of this library,
    returns `part`. Returns "" if nothing is missing.
    """
    for name in files:
        if not (checkpoint / name).is_file():
            return name
    if not saved_checkpoints(checkpoint / part):
        return part
    return ""
