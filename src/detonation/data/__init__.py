"""Data sets by name, with deterministic sampling: the batch of a step is a pure function of seed
and step.

`load_dataset` makes a data set, `batch` draws from it, and `fetch` downloads. It imports nothing
else of the package but `choices` and `whole_files`; `train` and `cli` may call it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from detonation.choices import find_function, make
from detonation.data import images, text, translation
from detonation.data.dataset import Data, Streamed, batch, batches, predictions
from detonation.data.packages import SOURCES, MissingData

__all__ = [
    "SOURCES",
    "TASKS",
    "Data",
    "MissingData",
    "Streamed",
    "batch",
    "batches",
    "load_dataset",
    "predictions",
]

TASKS: Mapping[str, Callable[..., Data]] = {
    "images": images.images,
    "text": text.text,
    "translation": translation.translation,
}


def dataset_function(task: str) -> Callable[..., Data]:
    """The function that makes the data of `task`; `ValueError` for a name that does not exist.

    Besides `TASKS`, a name may be "package.module:function".
    """
    return find_function("data", task, TASKS)


def load_dataset(task: str, arguments: Mapping[str, Any]) -> Data:
    """Makes a data set by the name of its task, with the arguments of `images`, `text`,
    `translation` or one's own.

    Raises:
        ValueError: Unknown task or argument, or a value out of range.
        MissingData: The source must be fetched first.

    Example:
        >>> from detonation.data import batch, load_dataset
        >>> data = load_dataset("text", {"source": "sotu-sample", "context": 64})
        >>> batch(data.train, seed=0, step=17, part=1, parts=4, size=2)["input_ids"].shape
        torch.Size([2, 64])
    """
    return make("data", {task: dataset_function(task)}, task, arguments)
