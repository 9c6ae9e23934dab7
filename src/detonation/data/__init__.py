"""Data sets by name. Sampling is deterministic: seed and step determine a batch.

`load_dataset` loads a data set, `batch` draws a batch from it, and `packages.fetch` downloads a
data set.
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
    """Returns the function that loads the data of a task. The name of the task is one of `TASKS`,
    or "package.module:function".

    Raises `ValueError` for an unknown name.
    """
    return find_function("data", task, TASKS)


def load_dataset(task: str, arguments: Mapping[str, Any]) -> Data:
    """Loads a data set by the name of its task. The arguments are those of `images`, `text`,
    `translation` or your own function.

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
