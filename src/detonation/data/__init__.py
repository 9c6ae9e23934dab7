"""Real data by name, seeded, and resumable by construction: which examples a step sees is a pure function.

data = load("text", {"source": "sotu-sample", "context": 128})
inputs = batch(data.train, seed=0, step=17, part=1, parts=4, size=8)
loss = model(**inputs).loss
"""

from collections.abc import Callable, Mapping
from typing import Any

from detonation import choices
from detonation.data import images, text, translation
from detonation.data.base import Augmented, Data, Examples, Kind
from detonation.data.download.sources import SOURCES, MissingData
from detonation.data.sampling import batch, batches, predictions
from detonation.data.text import bigram_loss

__all__ = [
    "SOURCES", "TASKS", "Augmented", "Data", "Examples", "Kind", "MissingData",
    "batch", "batches", "bigram_loss", "load", "predictions",
]  # fmt: skip

TASKS: Mapping[str, Callable[..., Data]] = {
    "images": images.images,
    "text": text.text,
    "translation": translation.translation,
}


def load(task: str, arguments: Mapping[str, Any]) -> Data:
    """The data of `task`, one of `TASKS`, made by the function of that name from `arguments`.

    Raises `ValueError` for an unknown task or argument; `MissingData` when it has to be fetched first.

    >>> import torch
    >>> data = load("text", {"source": "sotu-sample", "context": 64})
    >>> data.train[torch.tensor([0, 5])]["input_ids"].shape
    torch.Size([2, 64])
    """
    return choices.make("data", TASKS, task, arguments)
