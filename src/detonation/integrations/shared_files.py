"""A warning where nodes share no file system, for libraries that save their own files once and need them everywhere."""

import logging
from pathlib import Path

import torch.distributed as dist
from torch import nn

from detonation.checkpoint.gather import Texts, device_of
from detonation.checkpoint.volumes import survey

_log = logging.getLogger("detonation")


def warn_unless_shared(directory: Path, model: nn.Module) -> bool:
    """Logs a warning where `directory` is not one for all ranks, before the first checkpoint. Collective.

    Each node has its own part of our state. The library's own part is missing somewhere, which it says only when it
    resumes.

    Args:
        directory: Of the library's checkpoints; it is made where it does not exist.
        model: Whose device carries the collectives.

    Returns:
        Whether all ranks see one directory.

    Raises:
        OSError: A rank cannot write there; raised on all ranks.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     warn_unless_shared(Path(folder), nn.Linear(1, 1))
        True
        >>> dist.destroy_process_group()
    """
    disks = survey(directory, Texts(device_of(model)))
    if dist.get_rank() == 0 and not disks.shared:
        _log.warning(
            "%s is not one directory for all ranks (%s): before a checkpoint is resumed, copy to each node what it "
            "lacks from the others (rsync -a --ignore-existing)",
            directory,
            disks.ranks_text(),
        )
    return disks.shared
