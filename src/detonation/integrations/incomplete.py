"""The checkpoint from which Trainer and Accelerate go on: the newest whole one.

Both take the one with the highest number, also where a kill cut its save short.
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
"""Of a folder that Accelerate names itself."""


def skip_checkpoints(name: re.Pattern[str], part: str) -> None:
    """Lets `train(resume_from_checkpoint=True)` of the Trainer that a caller makes skip some.

    name: of its checkpoints. part: our directory in each.
    """
    trainer = _trainer_above()
    if trainer is None:  # its callbacks are called without it
        return
    train, files = trainer.train, ["trainer_state.json"]

    def resumed(resume_from_checkpoint: Any = None, *others: Any, **named: Any) -> Any:
        if resume_from_checkpoint is True:
            folder, texts = Path(trainer.args.output_dir), Texts(trainer.args.device)
            found = newest_whole(folder, name, lambda path: lacking(path, part, files), texts)
            resume_from_checkpoint = str(found) if found else True
        return train(resume_from_checkpoint, *others, **named)

    trainer.train = resumed


def _trainer_above() -> Any:
    """The Trainer that is being made by a caller; it does not pass itself to its callbacks."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if hasattr(frame.f_locals.get("self"), "_get_output_dir"):
            return frame.f_locals["self"]
    return None


def skip_folders(accelerator: Any, part: str) -> None:
    """Lets `accelerator.load_state()` skip some, where Accelerate names the folders."""
    load_state = accelerator.load_state
    files = [f"random_states_{accelerator.process_index}.pkl"]  # each rank writes them last

    def load_newest(input_dir: Any = None, *others: Any, **named: Any) -> Any:
        if input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming:
            folder, texts = Path(accelerator.project_dir, "checkpoints"), Texts(accelerator.device)
            input_dir = newest_whole(
                folder, _FOLDER, lambda path: lacking(path, part, files), texts
            )
        return load_state(None if input_dir is None else str(input_dir), *others, **named)

    accelerator.load_state = load_newest


def newest_whole(
    folder: Path, name: re.Pattern[str], lacks: Callable[[Path], str], texts: Texts
) -> Path | None:
    """The newest checkpoint in `folder` that is whole for all ranks; None without any. Collective.

    Rank 0 logs those that are skipped.

    Args:
        folder: Of the checkpoints; each rank may have another, or none.
        name: Of a checkpoint; it ends with a number.
        lacks: What a checkpoint lacks on this rank; "" for nothing.

    Raises:
        ValueError: There are checkpoints, and none is whole.
    """
    here = folder.iterdir() if folder.is_dir() else ()
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
            "its save was cut short; start without a checkpoint, or copy to the node what it lacks"
        )
        raise ValueError(f"no checkpoint in {folder} is whole: {skipped[0]}: {remedy}")
    return None


def _number(name: str) -> int:
    match = _NUMBER.search(name)
    return int(match.group()) if match else -1


def _problem(name: str, views: Sequence[dict[str, str]]) -> str:
    for rank, view in enumerate(views):
        lack = view.get(name, "everything")
        if lack:
            return f"{name} lacks {lack} on rank {rank}"
    return ""


def _tell(skipped: Sequence[str], taken: str, texts: Texts) -> None:
    for problem in skipped if texts.rank == 0 else ():
        _log.warning("%s: its save was cut short; training goes on from %s", problem, taken)


def lacking(checkpoint: Path, part: str, files: Sequence[str]) -> str:
    """The first thing that `checkpoint` lacks of the library's `files` and our `part`; "" for none."""
    missing = [name for name in files if not (checkpoint / name).is_file()]
    if not saved_checkpoints(checkpoint / part):
        missing.append(part)
    return missing[0] if missing else ""
