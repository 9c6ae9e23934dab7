"""Reads images into arrays, from the formats of the named data sets, from class folders and from the hub."""

import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detonation.data.download import hub
from detonation.data.download.extras import needs

if TYPE_CHECKING:
    import numpy

SUFFIXES = {".png", ".jpg", ".jpeg"}


@dataclass(frozen=True, repr=False)
class Split:
    """Images `[N, H, W, C]` uint8 and labels `[N]` int64."""

    images: "numpy.ndarray[Any, Any]"
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


def from_folder(path: Path) -> Decoded:
    """Reads images in `train/CLASS/` and `validation/CLASS/`; classes are numbered in the order of their names."""
    if not (path / "train").is_dir() or not (path / "validation").is_dir():
        raise ValueError(f"{path} needs the folders train/CLASS and validation/CLASS, with a folder for each class")
    classes = sorted(folder.name for folder in (path / "train").iterdir() if folder.is_dir())
    image = needs("PIL.Image", "data")
    train, validation = (_folder_split(image, path / part, classes) for part in ("train", "validation"))
    return Decoded(train, validation, len(classes))


def _folder_split(image: Any, path: Path, classes: Sequence[str]) -> Split:
    files = sorted(file for file in path.glob("*/*") if file.suffix.lower() in SUFFIXES)
    unknown = sorted({file.parent.name for file in files} - set(classes))
    if unknown:
        raise ValueError(f"{path} has classes that train has not: {', '.join(unknown)}")
    labels = [classes.index(file.parent.name) for file in files]
    return _stack(((str(file), _open(image, file)) for file in files), labels, path)


def _open(image: Any, file: Path) -> Any:
    try:
        with image.open(file) as picture:
            picture.load()
            return picture.copy()
    except OSError as error:
        raise ValueError(f"{file} is no image that pillow can read: {error}") from error


def from_hub(
    source: str, split: str | None, validation_split: str | None, column: str | None, label_column: str | None
) -> Decoded:
    """Reads images from the hub; the arguments are those of `images`."""
    train, validation = (
        _hub_split(source, part, column, label_column) for part in (split or "train", validation_split or "test")
    )
    return Decoded(train, validation, classes=int(max(train.labels.max(), validation.labels.max())) + 1)


def _hub_split(source: str, part: str, column: str | None, label_column: str | None) -> Split:
    rows = hub.hub_rows(source, part)
    labels = [int(label) for label in hub.column(rows, label_column, ["label", "labels"])]
    pictures = hub.column(rows, column, ["image", "img"])
    return _stack(((f"image {i}", picture) for i, picture in enumerate(pictures)), labels, f"{source} {part}")


def _stack(pictures: Iterable[tuple[str, Any]], labels: Sequence[int], where: object) -> Split:
    """Stacks pictures (name and PIL image) into one array; the first decides on size, and on grey or colour."""
    np = needs("numpy", "data")
    arrays: list[Any] = []
    mode = ""
    for name, picture in pictures:
        mode = mode or ("L" if picture.mode in ("1", "L") else "RGB")
        arrays.append(np.atleast_3d(np.asarray(picture.convert(mode))))
        if arrays[-1].shape != arrays[0].shape:
            raise ValueError(
                f"{name} is {_size(arrays[-1])}, the first image {_size(arrays[0])}: make them all one size"
            )
    if not arrays:
        raise ValueError(f"{where} holds no images ({', '.join(sorted(SUFFIXES))})")
    return Split(np.stack(arrays), np.array(labels, dtype="int64"))


def _size(array: Any) -> str:
    height, width = array.shape[:2]
    return f"{width}x{height}"
