"""Reads images into arrays, from the formats of the named data sets, from class folders and from the hub."""

import gzip
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detonation.data.download.extras import needs
from detonation.data.formats import hub
from detonation.data.formats.pictures import Form, Pictures, agreed, readable

if TYPE_CHECKING:
    import numpy

SUFFIXES = {".png", ".jpg", ".jpeg"}


@dataclass(frozen=True, repr=False)
class Split:
    """Images `[N, H, W, C]` uint8 and labels `[N]` int64."""

    images: "numpy.ndarray[Any, Any] | Pictures"
    labels: "numpy.ndarray[Any, Any]"


@dataclass(frozen=True)
class Decoded:
    """Both splits, with images of one shape, and the number of classes."""

    train: Split
    validation: Split
    classes: int

    def __post_init__(self) -> None:
        train, validation = self.train.images.shape[1:], self.validation.images.shape[1:]
        if train != validation:
            raise ValueError(f"train images are {train}, validation images {validation} (height, width, channels)")


def fashion_mnist(directory: Path) -> Decoded:
    """Reads Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017, arXiv 1708.07747) in the idx format."""
    train, validation = (
        Split(
            _idx(directory / f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28, 1),
            _idx(directory / f"{part}-labels-idx1-ubyte.gz", 8).astype("int64"),
        )
        for part in ("train", "t10k")
    )
    return Decoded(train, validation, classes=10)


def _idx(file: Path, header: int) -> Any:
    """Reads the bytes after the header as one flat array."""
    return needs("numpy", "data").frombuffer(gzip.decompress(file.read_bytes()), dtype="uint8", offset=header)


def cifar10(directory: Path) -> Decoded:
    """Maps CIFAR-10 (Krizhevsky, 2009) from disk, so that all processes of a machine share one copy."""
    np = needs("numpy", "data")
    train, validation = (
        Split(
            np.load(directory / f"{part}-images.npy", mmap_mode="r", allow_pickle=False),
            np.load(directory / f"{part}-labels.npy", allow_pickle=False),
        )
        for part in ("train", "validation")
    )
    return Decoded(train, validation, classes=10)


def from_folder(path: Path, form: Form) -> Decoded:
    """Images in `train/CLASS/` and `validation/CLASS/`, or in `CLASS/`: every tenth of a class is then held out.

    Classes are numbered in the order of their names.
    """
    parts: tuple[list[Path], list[Path]]
    if not (path / "train").is_dir():
        parts, seen = ([], []), Counter[Path]()
        for file in _files(path):
            parts[seen[file.parent] % 10 == 9].append(file)
            seen[file.parent] += 1
        if not all(parts):
            raise ValueError(f"{path} needs CLASS/*.png, ten images at least, or train/CLASS and validation/CLASS")
    elif (path / "validation").is_dir():
        parts = (_files(path / "train"), _files(path / "validation"))
    else:
        raise ValueError(f"{path} has train/CLASS and no validation/CLASS: both, or CLASS alone")
    classes = sorted({file.parent.name for file in parts[0]})
    other = sorted({file.parent.name for file in parts[1]} - {*classes})
    if other:
        raise ValueError(f"{path / 'validation'} has classes that train has not: {', '.join(other)}")
    form = agreed([file for part in parts for file in part], form)
    train, validation = (_split(part, [classes.index(f.parent.name) for f in part], form) for part in parts)
    return Decoded(train, validation, len(classes))


def _files(path: Path) -> list[Path]:
    files = sorted(file for file in path.glob("*/*") if file.suffix.lower() in SUFFIXES)
    if not files:
        raise ValueError(f"{path} holds no images in folders of classes ({', '.join(sorted(SUFFIXES))})")
    return files


def _split(files: Sequence[Path], labels: Sequence[int], form: Form) -> Split:
    images = Pictures(lambda i: readable(files[i], form), len(files), form, lambda i: str(files[i]))
    return Split(images, needs("numpy", "data").array(labels, dtype="int64"))


def from_hub(
    source: str,
    split: str | None,
    validation_split: str | None,
    column: str | None,
    label_column: str | None,
    form: Form,
) -> Decoded:
    """Images from the hub; the arguments are those of `images`."""
    parts = (split or "train", validation_split or "test")
    train, validation = (_hub_split(source, part, column, label_column, form) for part in parts)
    return Decoded(train, validation, classes=int(max(train.labels.max(), validation.labels.max())) + 1)


def _hub_split(source: str, part: str, column: str | None, label_column: str | None, form: Form) -> Split:
    rows = hub.hub_rows(source, part)
    labels = [int(label) for label in hub.column(rows, label_column, ["label", "labels"])]
    pictures = hub.column(rows, column, ["image", "img"])
    if not labels:
        raise ValueError(f"{source} {part} holds no images")
    images = Pictures(pictures.__getitem__, len(labels), form.like(pictures[0]), lambda i: f"image {i} of {part}")
    return Split(images, needs("numpy", "data").array(labels, dtype="int64"))
