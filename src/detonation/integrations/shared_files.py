"""Libraries that save, need and remove their own files on one node alone, where nodes share no file system."""

import logging
import re
import shutil
from pathlib import Path

import torch.distributed as dist
from torch import nn

from detonation.checkpoint.gather import Texts, Volumes, device_of, survey

_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")
"""The name of a checkpoint of the Trainer."""
_log = logging.getLogger("detonation")


def warn_unless_shared(directory: Path, model: nn.Module) -> Volumes:
    """Makes `directory`, and warns where it is not one for all ranks, before the first checkpoint. Collective.

    Each node has its own part of our state. The library's own part is missing somewhere, which it says when it resumes.
    Returns the ranks that see the same directory; raises `OSError` on all ranks where one cannot write there.
    """
    disks = survey(directory, Texts(device_of(model)))
    if dist.get_rank() == 0 and not disks.shared:
        _log.warning(
            "%s is not one directory for all ranks (%s): before a checkpoint is resumed, copy to each node what it "
            "lacks from the others (rsync -a --ignore-existing)",
            directory,
            disks.ranks_text(),
        )
    return disks


class CheckpointsElsewhere:
    """The checkpoints of the Trainer on disks of other nodes, of which it removes old ones on that of rank 0 alone.

    All ranks make it before training, with the line of `warn_unless_shared`. Only what rank 0 had and has no more is
    removed, on each other disk once, and only where it holds our `part`.
    """

    def __init__(self, directory: Path, model: nn.Module, part: str) -> None:
        self._directory, self._part, self._texts = directory, part, Texts(device_of(model))
        self._disks = warn_unless_shared(directory, model)
        self._before = self._names()

    def follow(self) -> None:
        """Removes elsewhere what rank 0 has removed since the last call. Collective."""
        if self._disks.shared:
            return
        here = self._names()
        removed = self._texts.broadcast("\n".join(sorted(self._before - here))).split()
        self._before, rank = here, self._texts.rank
        if self._disks.number(rank) and self._disks.leads(rank):
            for name in here.intersection(removed):
                if (self._directory / name / self._part).is_dir():
                    shutil.rmtree(self._directory / name, ignore_errors=True)

    def _names(self) -> set[str]:
        found = (each for each in self._directory.iterdir() if each.is_dir() and not each.is_symlink())
        return {each.name for each in found if _CHECKPOINT.fullmatch(each.name)}
